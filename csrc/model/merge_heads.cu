// Gathered values come heads first; the output projection reads a node's heads side by side. A thread a vector.
#include "merge_heads.h"

#include "dependent.cuh"

namespace tpv {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) merge_heads_kernel(const __grid_constant__ MergeHeadsParams p) {
  wait_for_previous();
  const int vector = blockIdx.x * kThreads + threadIdx.x, vectors = p.heads * p.width, node = blockIdx.y;
  if (vector >= vectors) return;
  const int head = vector / p.width, column = vector % p.width;
  p.merged[int64_t(node) * vectors + vector] = p.values[(int64_t(head) * p.nodes + node) * p.width + column];
}

}  // namespace

cudaError_t launch_merge_heads(const MergeHeadsParams& p, cudaStream_t stream) {
  const dim3 grid((p.heads * p.width + kThreads - 1) / kThreads, p.nodes);
  return launch_dependent(merge_heads_kernel, grid, kThreads, p, stream);
}

}  // namespace tpv
