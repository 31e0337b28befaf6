// Tiles of 32 rows.
#include "flash.h"
#include "flash_kernel.cuh"

cudaError_t tpv::launch_flash_32(const VerifyParams& params, int blocks, cudaStream_t stream) {
  return launch_flash<2, 1>(params, blocks, stream);
}
