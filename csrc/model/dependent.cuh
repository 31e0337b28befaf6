// Kernels that start while the one before them in the stream comes to its end (programmatic dependent launch): of a short
// kernel's time, most would be its launch.
#pragma once
#include <cuda_runtime.h>

namespace tpv {

// Until what came before in the stream is done, and its results can be read. Before this a kernel reads nothing.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

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
