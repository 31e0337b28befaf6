// The float32 kernels below the flash kernel: slow, plain, and what it is tested against. They take no plan.
#pragma once
#include <cuda_runtime.h>

#include "../params.h"

namespace tpv {

cudaError_t launch_naive(const VerifyParams& params, int batch, cudaStream_t stream);
cudaError_t launch_flash_fp32(const VerifyParams& params, int batch, cudaStream_t stream);

}  // namespace tpv
