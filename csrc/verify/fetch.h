// See fetch.cu.
#pragma once
#include <cuda_runtime.h>

#include "../tpverify.h"

namespace tpv {

struct FetchParams {
  const tpv_fetch_source* source;
  uint4* target;
  int64_t capacity;  // vectors; more are not written
};

cudaError_t launch_fetch(const FetchParams& params, cudaStream_t stream);

}  // namespace tpv
