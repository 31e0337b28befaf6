// The bottom of the ladder: a block computes one row of one head in float32, and does the obvious. First the largest score,
// then weights relative to it: scores are computed twice, and nothing is ever rescaled.
#include <cuda_runtime.h>

#include <cmath>

#include "ladder.h"
#include "node.cuh"

namespace tpv {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kDims = kLatent / kThreads;  // of out, a thread

__global__ void __launch_bounds__(kThreads) naive_kernel(const __grid_constant__ VerifyParams p, int batch) {
  __shared__ float q[kRow];
  __shared__ float weights[kThreads];  // of as many tokens
  __shared__ float warp_tops[kWarps];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int row = blockIdx.x, head = blockIdx.y;
  float* out = static_cast<float*>(p.out) + row * p.out_stride_node + head * p.out_stride_head;
  float* lse = p.lse + row * p.lse_stride_node + head;

  const int request = request_of(p.table, batch, row);
  if (request < 0) {  // padding: nothing is seen
    for (int i = 0; i < kDims; ++i) out[thread + i * kThreads] = 0.0f;
    if (thread == 0) *lse = -INFINITY;
    return;
  }
  const Node node = node_at(p.table, request, row);
  const float* source = static_cast<const float*>(p.q) + row * p.q_stride_node + head * p.q_stride_head;
  for (int i = thread; i < kRow; i += kThreads) q[i] = source[i];
  __syncthreads();

  const auto latent = [&](int token) {
    return reinterpret_cast<const float*>(static_cast<const char*>(p.kv) + (uint64_t)node.slots[token] * p.kv_stride_bytes);
  };
  const auto score = [&](int token) {  // a warp computes it together
    float sum = 0.0f;
    for (int i = lane; i < kRow; i += 32) sum = fmaf(q[i], latent(token)[i], sum);
    return warp_sum(sum) * p.scale_log2;
  };

  float top = -INFINITY;
  for (int token = warp; token < node.tokens; token += kWarps)
    if (node.sees(token)) top = fmaxf(top, score(token));
  if (lane == 0) warp_tops[warp] = top;
  __syncthreads();
  for (float other : warp_tops) top = fmaxf(top, other);

  float denominator = 0.0f, sums[kDims] = {};
  for (int first = 0; first < node.tokens; first += kThreads) {
    for (int i = warp; i < kThreads; i += kWarps) {
      const float weight = node.sees(first + i) ? exp2f(score(first + i) - top) : 0.0f;
      if (lane == 0) weights[i] = weight;
    }
    __syncthreads();
    for (int i = 0; i < kThreads; ++i) {
      if (weights[i] == 0.0f) continue;  // hidden rows may hold anything, and 0 times NaN is NaN
      denominator += weights[i];
      for (int d = 0; d < kDims; ++d) sums[d] = fmaf(weights[i], latent(first + i)[thread + d * kThreads], sums[d]);
    }
    __syncthreads();
  }
  for (int d = 0; d < kDims; ++d) out[thread + d * kThreads] = sums[d] / denominator;
  if (thread == 0) *lse = (top + log2f(denominator)) * 0.69314718055994531f;
}

}  // namespace

cudaError_t launch_naive(const VerifyParams& params, int batch, cudaStream_t stream) {
  naive_kernel<<<dim3(params.out_nodes, params.heads), kThreads, 0, stream>>>(params, batch);
  return cudaGetLastError();
}

}  // namespace tpv
