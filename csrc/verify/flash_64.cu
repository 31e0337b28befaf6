// Tiles of 64 rows.
#include "flash.h"
#include "flash_kernel.cuh"

cudaError_t tpv::launch_flash_64(const VerifyParams& params, int blocks, cudaStream_t stream) {
  return launch_flash<2, 2>(params, blocks, stream);
}
