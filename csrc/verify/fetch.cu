// A step's tables on their way from the host: the GPU reads them itself. So a captured graph can have what a copy of fixed
// length cannot do, and a step's host writes memory and calls nobody.
#include "fetch.h"

namespace tpv {
namespace {

constexpr int kThreads = 128, kBlocks = 64;  // a vector each: the slots of 32,768 tokens in one round

__global__ void __launch_bounds__(kThreads) fetch_kernel(const __grid_constant__ FetchParams p) {
  // Plain loads: what the host wrote before the launch is seen, and a warp's go over PCIe together. Volatile ones do not.
  const auto* values = static_cast<const uint4*>(p.source->values);
  const int64_t vectors = min(p.source->vectors, p.capacity);
#pragma unroll 4
  for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < vectors; i += kBlocks * kThreads) p.target[i] = values[i];
}

}  // namespace

cudaError_t launch_fetch(const FetchParams& params, cudaStream_t stream) {
  fetch_kernel<<<kBlocks, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace tpv
