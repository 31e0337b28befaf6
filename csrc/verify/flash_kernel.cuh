// bf16 verify attention: roles of the warps and the start of a block. See flash_qk.cuh and flash_pv.cuh.
#pragma once
#include <cuda_runtime.h>

#include "flash_pv.cuh"
#include "flash_qk.cuh"

namespace tpv {

template <int GROUPS, int MT>
__global__ void __launch_bounds__(FlashTraits<GROUPS, MT>::kThreads, 1) flash_verify(const __grid_constant__ VerifyParams p) {
  using T = FlashTraits<GROUPS, MT>;
  extern __shared__ __align__(128) char shared[];
  const FlashBlock<T> block{p, opaque(smem_address(shared)), static_cast<int>(threadIdx.x % 32)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < T::kSlots; ++i) {
      barrier_init(block.full(i), T::kPvWarps);
      barrier_init(block.empty(i), (T::kQkWarps + T::kPvWarps) * kArrivals);
    }
    for (int g = 0; g < T::kGroups; ++g) {
      barrier_init(block.scores_full(g), 2 * kArrivals);
      barrier_init(block.scores_empty(g), 4 * kArrivals);
    }
    for (int i = 0; i < 2 * T::kGroups; ++i) store_shared(block.exceeds(i / 2, i), ~0u);
    fence_barrier_init();
  }
  const int warp = uniform(threadIdx.x / 32);
  if (warp < T::kQkWarps) {
    block.begin();
    cudaTriggerProgrammaticLaunchCompletion();  // the combine kernel's blocks may come as soon as there is room for them
    QkWarp<T>(block, warp).run();
  } else {
    PvWarp<T>(block, warp - T::kQkWarps).run();
  }
}

template <int GROUPS, int MT>
cudaError_t launch_flash(const VerifyParams& p, int blocks, cudaStream_t stream) {
  using T = FlashTraits<GROUPS, MT>;
  constexpr auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  if (const cudaError_t error = cudaFuncSetAttribute(flash_verify<GROUPS, MT>, attribute, T::kSharedBytes)) return error;
  flash_verify<GROUPS, MT><<<blocks, T::kThreads, T::kSharedBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace tpv
