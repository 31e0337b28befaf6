// Tiles of 16 rows.
#include "flash.h"
#include "flash_kernel.cuh"

cudaError_t tpv::launch_flash_16(const VerifyParams& params, int blocks, cudaStream_t stream) {
  return launch_flash<1, 1>(params, blocks, stream);
}
