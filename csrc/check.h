// Checks of what callers of the CUDA entry points pass.
#pragma once
#include <cuda_runtime.h>

#include "host/error.h"

namespace tpv {

// Returns from the calling function unless `expression` is TPV_OK.
#define TPV_TRY(expression) \
  if (const tpv_status status = (expression); status != TPV_OK) return status

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

// Memory of the current device. What needs no driver should be checked before.
inline tpv_status check_device_memory(std::initializer_list<Pointer> pointers) {
  int device;
  TPV_TRY(check_cuda("current device", cudaGetDevice(&device)));
  for (const Pointer& p : pointers) {
    cudaPointerAttributes found;
    TPV_TRY(check_cuda(p.name, cudaPointerGetAttributes(&found, p.value)));
    if (found.type == cudaMemoryTypeManaged) continue;
    if (found.type != cudaMemoryTypeDevice)
      return fail(TPV_INVALID_ARGUMENT, "%s: expected memory of device %d, got host memory", p.name, device);
    if (found.device != device)
      return fail(TPV_INVALID_ARGUMENT, "%s: expected memory of device %d, got memory of device %d", p.name, device, found.device);
  }
  return TPV_OK;
}

// Memory of the host that the current device can read.
inline tpv_status check_locked_memory(const char* name, const void* pointer) {
  cudaPointerAttributes found;
  TPV_TRY(check_cuda(name, cudaPointerGetAttributes(&found, pointer)));
  if (found.type == cudaMemoryTypeHost) return TPV_OK;
  return fail(TPV_INVALID_ARGUMENT, "%s: expected page-locked memory of the host, got %s memory", name,
              found.type == cudaMemoryTypeUnregistered ? "other host" : "device");
}

}  // namespace tpv
