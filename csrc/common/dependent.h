// Kernels that start while the one before them in the stream comes to its end (programmatic dependent launch): of a short
// kernel's time, most would be its launch. Until cudaGridDependencySynchronize such a kernel reads nothing of what came before.
#pragma once
#include <cuda_runtime.h>

namespace tpv {

template <typename Params>
cudaError_t launch_dependent(void (*kernel)(Params), dim3 grid, int threads, const Params& params, cudaStream_t stream) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = threads, config.stream = stream;
  config.attrs = &early, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace tpv
