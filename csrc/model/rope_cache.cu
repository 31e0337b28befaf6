// What lies between an MLA layer's products for the queries: norms, rotation, the latent row's way into the pool. A thread a
// vector of 8, blocks of one node: those of its queries and one of its latent. Each block finds the norms' scales anew, from
// rows that are in the L2: that is cheaper than a kernel more.
#include "rope_cache.h"

#include "common/dependent.h"
#include "common/ptx.cuh"

namespace tpv {
namespace {

constexpr int kThreads = 192, kWarps = kThreads / 32;
constexpr int kInFlight = 5;  // vectors a thread loads at once; with all threads, more than a row of 7,168
constexpr int kRopeVectors = 8, kLatentVectors = 64;

struct Eight {
  float value[8];
};

__device__ __forceinline__ Eight unpack(const uint4& v) {
  return {low_float(v.x), high_float(v.x), low_float(v.y), high_float(v.y),
          low_float(v.z), high_float(v.z), low_float(v.w), high_float(v.w)};
}

__device__ __forceinline__ uint4 scaled(const Eight& e, float scale) {
  uint4 packed;
  packed.x = pack_bf16(e.value[0] * scale, e.value[1] * scale), packed.y = pack_bf16(e.value[2] * scale, e.value[3] * scale);
  packed.z = pack_bf16(e.value[4] * scale, e.value[5] * scale), packed.w = pack_bf16(e.value[6] * scale, e.value[7] * scale);
  return packed;
}

// Pairs side by side, each turned by its (cos, sin).
__device__ __forceinline__ Eight turned(const Eight& e, const float4* rotation) {
  Eight out;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 two = rotation[i];
    const float* in = e.value + 4 * i;
    out.value[4 * i] = in[0] * two.x - in[1] * two.y, out.value[4 * i + 1] = in[0] * two.y + in[1] * two.x;
    out.value[4 * i + 2] = in[2] * two.z - in[3] * two.w, out.value[4 * i + 3] = in[2] * two.w + in[3] * two.z;
  }
  return out;
}

// This thread's share of a row's sum of squares.
__device__ __forceinline__ float squares(const uint4* row, int vectors) {
  float sum = 0;
  for (int first = threadIdx.x; first < vectors; first += kThreads * kInFlight) {
    uint4 vector[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      vector[j] = first + j * kThreads < vectors ? row[first + j * kThreads] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const Eight e = unpack(vector[j]);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += e.value[i] * e.value[i];
    }
  }
  return sum;
}

// Both sums over the block, in an order that depends on nothing.
__device__ __forceinline__ float2 block_sum(float a, float b) {
  __shared__ float2 of_warp[kWarps];
#pragma unroll
  for (int offset = 16; offset; offset /= 2) {
    a += __shfl_xor_sync(~0u, a, offset);
    b += __shfl_xor_sync(~0u, b, offset);
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = {a, b};
  __syncthreads();
  float2 sum = of_warp[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum.x += of_warp[w].x, sum.y += of_warp[w].y;
  return sum;
}

__global__ void __launch_bounds__(kThreads) rope_cache_kernel(const __grid_constant__ RopeCacheParams p) {
  cudaGridDependencySynchronize();
  const int node = blockIdx.x;
  const bool latent = blockIdx.y == gridDim.y - 1;
  const int head_vectors = p.nope_width + kRopeVectors;
  const int vector = latent ? threadIdx.x : blockIdx.y * kThreads + threadIdx.x;
  const bool used = vector < (latent ? kLatentVectors + kRopeVectors : p.shards * p.shard_heads * head_vectors);
  const int head = vector / head_vectors, shard = head / p.shard_heads;
  const int64_t row = (int64_t(shard) * p.nodes + node) * p.shard_heads + head % p.shard_heads;  // of queries and of nope
  const int column = latent ? vector : vector % head_vectors;
  const int turns_from = latent ? kLatentVectors : p.nope_width;

  const uint4* down = p.down + int64_t(node) * (p.low + kLatentVectors + kRopeVectors);
  const uint4* own = latent ? down + p.low + column : p.queries + row * head_vectors + column;
  const int64_t slot = latent ? p.slots[node] : 0;
  Eight value = unpack(used ? *own : make_uint4(0, 0, 0, 0));
  if (used && column >= turns_from) value = turned(value, p.rotation + (node * kRopeVectors + column - turns_from) * 2);

  const int width = latent ? kLatentVectors : p.low;
  const float2 sums = block_sum(squares(p.x + int64_t(node) * p.hidden, p.hidden), squares(latent ? down + p.low : down, width));
  // The mean square of a normed row's product, were the row not normed, is `square` times as large: so is eps.
  const float square = sums.x / (8 * p.hidden) + p.eps;
  const float scale = rsqrtf(sums.y / (8 * width) + square * p.norm_eps);
  if (!used) return;
  if (latent)
    p.pool[slot * p.pool_stride_slot + column] = scaled(value, column < turns_from ? scale : rsqrtf(square));
  else if (column < turns_from)
    p.nope[row * p.nope_width + column] = scaled(value, scale);
  else
    p.q[node * p.q_stride_node + head * p.q_stride_head + kLatentVectors + column - turns_from] = scaled(value, scale);
}

}  // namespace

cudaError_t launch_rope_cache(const RopeCacheParams& p, cudaStream_t stream) {
  const int vectors = p.shards * p.shard_heads * (p.nope_width + kRopeVectors);
  const dim3 grid(p.nodes, (vectors + kThreads - 1) / kThreads + 1);
  return launch_dependent(rope_cache_kernel, grid, kThreads, p, stream);
}

}  // namespace tpv
