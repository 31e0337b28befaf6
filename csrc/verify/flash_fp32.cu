// The middle of the ladder: online softmax in float32. A block takes one node and eight heads, and reads the latent once for
// them, 32 tokens at a time, in shared memory. So 64 heads read it eight times; the naive kernel, 64 times and twice.
#include <cuda_pipeline.h>
#include <cuda_runtime.h>

#include <cmath>

#include "ladder.h"
#include "node.cuh"

namespace tpv {
namespace {

constexpr int kHeads = 8, kTokens = 32;
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kWarpTokens = kTokens / kWarps;  // whose scores a warp computes: with eight heads, as many scores as lanes
constexpr int kPairs = kRow / 64;              // pairs of a row's dims, a lane
static_assert(kWarpTokens * kHeads == 32 && kHeads == kWarps && kThreads * 2 == kLatent);

struct Shared {
  float kv[kTokens][kRow];
  float sums[kHeads][kLatent];
  float scores[kHeads][kTokens];  // then weights
};
static_assert(sizeof(Shared) == 91136 && sizeof(Shared) <= kSharedLimit);

struct FlashFp32 {
  const VerifyParams& p;
  Shared& s;
  const Node node;
  const int row, first_head;  // of the call

  __device__ static int thread() { return threadIdx.x; }
  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static int lane() { return threadIdx.x % 32; }

  // All eight heads in every warp: Q's 18,432 B would not fit beside the rest in shared memory.
  float2 q[kHeads][kPairs];

  __device__ void load_q() {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float* source = static_cast<const float*>(p.q) + row * p.q_stride_node + (first_head + h) * p.q_stride_head + 2 * lane();
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        q[h][i] = float2{};
        if (first_head + h < p.heads) q[h][i] = {source[64 * i], source[64 * i + 1]};
      }
    }
  }

  // Rows that the node does not see become zeros: they may hold anything, and a weight of 0 would not silence a NaN.
  __device__ void load_tile(int first, uint32_t seen) const {
    constexpr int kVectors = kRow / 4;
    for (int i = thread(); i < kTokens * kVectors; i += kThreads) {
      const int token = i / kVectors, vector = i % kVectors;
      float4* target = reinterpret_cast<float4*>(s.kv[token]) + vector;
      if (seen >> token & 1) {
        const char* source = static_cast<const char*>(p.kv) + (uint64_t)node.slots[first + token] * p.kv_stride_bytes;
        __pipeline_memcpy_async(target, source + vector * 16, 16);
      } else {
        *target = float4{};
      }
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
  }

  // Half of the first 2 N sums goes to the lane across, the other half stays.
  template <int N>
  __device__ static void hand_over(float (&sum)[32]) {
    const bool upper = lane() & N;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float given = upper ? sum[i] : sum[i + N], kept = upper ? sum[i + N] : sum[i];
      sum[i] = kept + __shfl_xor_sync(~0u, given, N);
    }
  }

  // A warp's tokens against all heads: every lane has its share of each of the 32 sums, and ends up with one sum whole.
  __device__ void score(uint32_t seen) const {
    float sum[32] = {};  // [token][head]
#pragma unroll
    for (int t = 0; t < kWarpTokens; ++t) {
      const float2* k = reinterpret_cast<const float2*>(s.kv[warp() * kWarpTokens + t]) + lane();
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float2 pair = k[32 * i];
#pragma unroll
        for (int h = 0; h < kHeads; ++h) sum[t * kHeads + h] = fmaf(q[h][i].y, pair.y, fmaf(q[h][i].x, pair.x, sum[t * kHeads + h]));
      }
    }
    hand_over<16>(sum), hand_over<8>(sum), hand_over<4>(sum), hand_over<2>(sum), hand_over<1>(sum);
    const int token = warp() * kWarpTokens + lane() / kHeads;
    s.scores[lane() % kHeads][token] = seen >> token & 1 ? sum[0] * p.scale_log2 : -INFINITY;
  }

  // A warp is a head here, a lane a token. `denominator` is the lane's share.
  __device__ void weigh(float& top, float& denominator) const {
    float& entry = s.scores[warp()][lane()];
    const float tile_top = warp_max(entry);
    if (tile_top > top) {
      const float factor = exp2f(top - tile_top);
      for (int i = lane(); i < kLatent; i += 32) s.sums[warp()][i] *= factor;
      denominator *= factor, top = tile_top;
    }
    entry = exp2f(entry - (top == -INFINITY ? 0.0f : top));
    denominator += entry;
  }

  // A thread is a pair of dims here, for all heads: V is read once.
  __device__ void accumulate() const {
    float2 sum[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) sum[h] = reinterpret_cast<const float2*>(s.sums[h])[thread()];
    for (int t = 0; t < kTokens; t += 4) {
      float2 v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = reinterpret_cast<const float2*>(s.kv[t + j])[thread()];
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float4 weight = *reinterpret_cast<const float4*>(&s.scores[h][t]);
        const float w[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[h].x = fmaf(w[j], v[j].x, sum[h].x), sum[h].y = fmaf(w[j], v[j].y, sum[h].y);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) reinterpret_cast<float2*>(s.sums[h])[thread()] = sum[h];
  }

  // The warp's head; of a node that sees nothing: 0 and -inf.
  __device__ void write(float top, float denominator) const {
    const int head = first_head + warp();
    if (head >= p.heads) return;
    float2* out = reinterpret_cast<float2*>(static_cast<float*>(p.out) + row * p.out_stride_node + head * p.out_stride_head);
    const float inverse = denominator == 0.0f ? 0.0f : 1.0f / denominator;
    for (int i = lane(); i < kLatent / 2; i += 32) {
      const float2 sum = reinterpret_cast<const float2*>(s.sums[warp()])[i];
      out[i] = {sum.x * inverse, sum.y * inverse};
    }
    if (lane() == 0) p.lse[row * p.lse_stride_node + head] = (top + log2f(denominator)) * 0.69314718055994531f;
  }

  __device__ void run() {
    float top = -INFINITY, denominator = 0.0f;  // of the warp's head
    for (int i = thread(); i < kHeads * kLatent; i += kThreads) s.sums[0][i] = 0.0f;
    if (node.tokens > 0) load_q();
    for (int first = 0; first < node.tokens; first += kTokens) {
      const uint32_t seen = __ballot_sync(~0u, node.sees(first + lane()));
      load_tile(first, seen);
      __syncthreads();
      score(seen);
      __syncthreads();
      weigh(top, denominator);
      __syncthreads();
      accumulate();
      __syncthreads();
    }
    __syncthreads();
    write(top, warp_sum(denominator));
  }
};

__global__ void __launch_bounds__(kThreads, 1) flash_fp32_kernel(const __grid_constant__ VerifyParams p, int batch) {
  extern __shared__ __align__(16) char shared[];
  const int row = blockIdx.x, request = request_of(p.table, batch, row);
  const Node node = request < 0 ? Node{} : node_at(p.table, request, row);  // padding has no tokens
  FlashFp32{p, *reinterpret_cast<Shared*>(shared), node, row, static_cast<int>(blockIdx.y) * kHeads}.run();
}

}  // namespace

cudaError_t launch_flash_fp32(const VerifyParams& params, int batch, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(flash_fp32_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (error != cudaSuccess) return error;
  flash_fp32_kernel<<<dim3(params.out_nodes, (params.heads + kHeads - 1) / kHeads), kThreads, sizeof(Shared), stream>>>(params, batch);
  return cudaGetLastError();
}

}  // namespace tpv
