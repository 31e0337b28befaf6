// Merges the partials of split rows: out = sum of exp2(lse_i - max) out_i, over the same sum without out_i.
//
// The blocks start while the flash kernel still runs and read the plan meanwhile; they wait for it before the partials.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>

#include "combine.h"
#include "partial.cuh"

namespace tpv {
namespace {

constexpr int kWarps = 8;    // of a block
constexpr int kFew = 16;     // up to this many splits one warp merges alone; the order of sums depends on their number only
constexpr int kUnroll = 8;

struct Merged {
  float4 sum;
  float denominator;
};

// One slice of one row, on one warp at a time: four dims a lane, as partial_offset() has them.
template <int ROWS>
struct Unit {
  const VerifyParams& p;
  const MergeItem merge;
  const int local, slice, lane;  // row of the tile, slice of the row

  __device__ int row() const { return merge.row_tile * ROWS + local; }
  __device__ bool exists() const { return row() < merge.nodes * p.heads; }
  __device__ const float* lse() const { return p.partial_lse + (int64_t)merge.first * ROWS + local; }
  __device__ const float4* out() const {
    return reinterpret_cast<const float4*>(p.partial_out) + (int64_t)merge.first * ROWS * (kLatent / 4) +
           partial_offset(local, slice, lane / 4, lane % 4);
  }

  // What weights are relative to.
  __device__ float reference() const {
    float top = -INFINITY;
    for (int i = lane; i < merge.count; i += 32) top = fmaxf(top, lse()[(int64_t)i * ROWS]);
    for (int offset = 16; offset; offset /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
    return top == -INFINITY ? 0.0f : top;
  }

  // Splits first, first + STEP, ... and, in `reference`, what their weights are relative to.
  template <int STEP>
  __device__ Merged merge_splits(int first, float& reference) const {
    Merged m = {};
    bool known = false;
    for (; first < merge.count; first += STEP * kUnroll) {
      const float* const lses = lse() + (int64_t)first * ROWS;
      const float4* const outs = out() + (int64_t)first * ROWS * (kLatent / 4);
      float weight[kUnroll];
      float4 value[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const bool there = first + u * STEP < merge.count;
        weight[u] = there ? lses[u * STEP * ROWS] : -INFINITY;
        value[u] = there ? outs[u * STEP * ROWS * (kLatent / 4)] : float4{};
      }
      if (!known) reference = this->reference(), known = true;  // its loads and those above fly together
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const float w = exp2f(weight[u] - reference);
        m.sum.x = fmaf(w, value[u].x, m.sum.x), m.sum.y = fmaf(w, value[u].y, m.sum.y);
        m.sum.z = fmaf(w, value[u].z, m.sum.z), m.sum.w = fmaf(w, value[u].w, m.sum.w);
        m.denominator += w;
      }
    }
    return m;
  }

  __device__ void write(const Merged& m, float reference) const {
    const bool seen = m.denominator > 0.0f || m.denominator != m.denominator;
    const float inverse = seen ? 1.0f / m.denominator : 0.0f;
    const int64_t node = merge.node_begin + row() / p.heads;
    const int head = row() % p.heads;
    const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(m.sum.x * inverse, m.sum.y * inverse),
                                     __floats2bfloat162_rn(m.sum.z * inverse, m.sum.w * inverse)};
    __nv_bfloat16* target = static_cast<__nv_bfloat16*>(p.out) + node * p.out_stride_node + head * p.out_stride_head;
    auto* const first = reinterpret_cast<__nv_bfloat162*>(target + slice * kSlice + lane / 4 * 16 + lane % 4 * 2);
    first[0] = pairs[0], first[4] = pairs[1];
    if (slice == 0 && lane == 0)
      p.lse[node * p.lse_stride_node + head] = seen ? (reference + log2f(m.denominator)) * 0.69314718055994531f : -INFINITY;
  }
};

// Rows beyond the plan's nodes: nothing is seen there.
__device__ void clear_padding(const VerifyParams& p) {
  const int64_t first = (int64_t)p.header->num_nodes * p.heads, last = (int64_t)p.out_nodes * p.heads;
  for (int64_t row = first + blockIdx.x; row < last; row += gridDim.x) {
    const int64_t node = row / p.heads, head = row % p.heads;
    __nv_bfloat16* target = static_cast<__nv_bfloat16*>(p.out) + node * p.out_stride_node + head * p.out_stride_head;
    for (int i = threadIdx.x; i < kLatent / 4; i += 32 * kWarps) reinterpret_cast<uint2*>(target)[i] = uint2{};
    if (threadIdx.x == 0) p.lse[node * p.lse_stride_node + head] = -INFINITY;
  }
}

template <int ROWS>
__global__ void __launch_bounds__(32 * kWarps, 3) combine_kernel(const __grid_constant__ VerifyParams p) {
  __shared__ float4 sums[kWarps][32];
  __shared__ float denominators[kWarps];
  constexpr int kUnits = ROWS * kSlices;  // of a merge item
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  clear_padding(p);
  for (int i = blockIdx.x; i < p.header->num_merges * kUnits; i += gridDim.x) {
    const MergeItem merge = p.merges[i / kUnits];
    const bool alone = merge.count <= kFew;
    const int index = alone ? i % kUnits * kWarps + warp : i % kUnits;
    if (index >= kUnits) continue;  // with few splits the first eighth of a merge's turns does it all
    const Unit<ROWS> unit{p, merge, index / kSlices, index % kSlices, lane};
    if (!unit.exists()) continue;
    cudaGridDependencySynchronize();
    float reference = 0.0f;
    if (alone) {
      const Merged merged = unit.template merge_splits<1>(0, reference);
      unit.write(merged, reference);
      continue;
    }
    Merged merged = unit.template merge_splits<kWarps>(warp, reference);
    sums[warp][lane] = merged.sum;
    if (lane == 0) denominators[warp] = merged.denominator;
    __syncthreads();
    if (warp == 0) {
      for (int w = 1; w < kWarps; ++w) {
        const float4 other = sums[w][lane];
        merged.sum.x += other.x, merged.sum.y += other.y, merged.sum.z += other.z, merged.sum.w += other.w;
        merged.denominator += denominators[w];
      }
      unit.write(merged, reference);
    }
    __syncthreads();
  }
  cudaGridDependencySynchronize();  // whoever comes after this kernel may rely on the flash kernel's end
}

template <int ROWS>
cudaError_t launch(const VerifyParams& params, int multiprocessors, cudaStream_t stream) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = 8 * multiprocessors, config.blockDim = 32 * kWarps;
  config.stream = stream, config.attrs = &early, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, combine_kernel<ROWS>, params);
}

}  // namespace

cudaError_t launch_combine(const VerifyParams& params, int tile_rows, int multiprocessors, cudaStream_t stream) {
  switch (tile_rows) {
    case 16: return launch<16>(params, multiprocessors, stream);
    case 32: return launch<32>(params, multiprocessors, stream);
    default: return launch<64>(params, multiprocessors, stream);
  }
}

}  // namespace tpv
