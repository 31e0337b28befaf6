// See combine.cu.
#pragma once
#include <cuda_runtime.h>

#include "../params.h"

namespace tpv {

cudaError_t launch_combine(const VerifyParams& params, int tile_rows, int multiprocessors, cudaStream_t stream);

}  // namespace tpv
