// See fetch.cu.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace tpv {

// In page-locked memory of the host: where the values lie now, and how many there are.
struct FetchSource {
  const uint4* values;
  int64_t vectors;  // of 16 bytes
};

struct FetchParams {
  const FetchSource* source;
  uint4* target;
  int64_t capacity;  // vectors; more are not written
};

cudaError_t launch_fetch(const FetchParams& params, cudaStream_t stream);

}  // namespace tpv
