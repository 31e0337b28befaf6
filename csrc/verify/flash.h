// The bf16 flash kernel by rows of a tile. One source file each, so that they compile side by side.
#pragma once
#include <cuda_runtime.h>

#include "../params.h"

namespace tpv {

cudaError_t launch_flash_16(const VerifyParams& params, int blocks, cudaStream_t stream);
cudaError_t launch_flash_32(const VerifyParams& params, int blocks, cudaStream_t stream);
cudaError_t launch_flash_64(const VerifyParams& params, int blocks, cudaStream_t stream);

}  // namespace tpv
