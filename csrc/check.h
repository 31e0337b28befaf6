// Checks of what callers of the CUDA entry points pass.
#pragma once
#include <cuda_runtime.h>

#include "host/error.h"

namespace tpv {

inline tpv_status check_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return TPV_OK;
  return fail(TPV_INVALID_ARGUMENT, "%s: expected %lld..%lld, got %lld", name, (long long)low, (long long)high, (long long)value);
}

inline tpv_status check_multiple(const char* name, int64_t value, int64_t of) {
  if (value >= 0 && value % of == 0) return TPV_OK;
  return fail(TPV_INVALID_ARGUMENT, "%s: expected a multiple of %lld, got %lld", name, (long long)of, (long long)value);
}

inline tpv_status check_aligned(const char* name, const void* pointer, int64_t bytes) {
  if (pointer != nullptr && reinterpret_cast<uintptr_t>(pointer) % bytes == 0) return TPV_OK;
  return fail(TPV_INVALID_ARGUMENT, "%s: expected device memory aligned to %lld bytes, got %p", name, (long long)bytes, pointer);
}

inline tpv_status check_cuda(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return TPV_OK;
  cudaGetLastError();  // else the next call would report it again
  return fail(TPV_CUDA_ERROR, "%s: %s", what, cudaGetErrorString(error));
}

// Returns from the calling function unless `expression` is TPV_OK.
#define TPV_TRY(expression) \
  if (const tpv_status status = (expression); status != TPV_OK) return status

}  // namespace tpv
