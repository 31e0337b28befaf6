// Merges the partials of split rows: out = sum of exp2(lse_i - max) out_i, over the same sum without out_i.
//
// The blocks start while the flash kernel still runs and read the plan meanwhile; they wait for it before the partials.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>

#include "../common/ptx.cuh"
#include "combine.h"
#include "heads.cuh"
#include "partial.cuh"

namespace tpv {
namespace {

constexpr int kWarps = 8;   // of a block
constexpr int kBlocks = 4;  // of a multiprocessor, and in all: no block waits until another one has ended
constexpr int kLoads = 9;   // splits that a warp asks for at once
constexpr int kParts = 8, kPartDims = kLatent / kParts;  // of a row

// So many warps share a merge's splits: no more than it takes to ask for all of them at once. The order of sums depends on the
// number of splits only.
__device__ int team_of(int splits) { return splits <= kLoads ? 1 : splits <= 2 * kLoads ? 2 : splits <= 4 * kLoads ? 4 : kWarps; }

// What weights are relative to, in log2 units: a finite number.
__device__ float base_of(float top) { return top == -INFINITY ? 0.0f : top; }

// Four values of a row, times 2^-top.
struct Merged {
  float4 sum;
  float denominator, top;

  __device__ void rebase(float top) {
    const float factor = exp2_approx(this->top - base_of(top));
    sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor;
    denominator *= factor, this->top = top;
  }
  __device__ void add(float weight, const float4& value, float denominator) {
    sum.x = fmaf(weight, value.x, sum.x), sum.y = fmaf(weight, value.y, sum.y);
    sum.z = fmaf(weight, value.z, sum.z), sum.w = fmaf(weight, value.w, sum.w);
    this->denominator = fmaf(weight, denominator, this->denominator);
  }
};

// One part of two rows: of each split four times 128 bytes, see partial_offset(). Lanes 8 s to 8 s + 3 have a step of the first
// row, lanes 8 s + 4 to 8 s + 7 of the second.
template <int ROWS>
struct Unit {
  const VerifyParams& p;
  const MergeItem merge;
  const int first_row, part, lane;  // of the tile; of the row

  __device__ int row_of_tile() const { return first_row + lane / 4 % 2; }

  // Splits first, first + stride, ...
  __device__ Merged merge_splits(int first, int stride) const {
    const int64_t begin = merge.first + first;
    const float* lse = p.partial_lse + begin * ROWS + row_of_tile();
    const float4* out = reinterpret_cast<const float4*>(p.partial_out) + begin * ROWS * (kLatent / 4) +
                        partial_offset(row_of_tile(), part / 2, part % 2 * 4 + lane / 8, lane % 4);
    Merged m = {{}, 0.0f, -INFINITY};
    for (int left = merge.count - first; left > 0; left -= stride * kLoads) {
      float weight[kLoads];
      float4 value[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        weight[i] = -INFINITY, value[i] = {};
        if (i * stride < left) weight[i] = *lse, value[i] = *out;
        lse += stride * ROWS, out += stride * ROWS * (kLatent / 4);
      }
      float top = m.top;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) top = fmaxf(top, weight[i]);
      m.rebase(top);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) m.add(exp2_approx(weight[i] - base_of(top)), value[i], 1.0f);
    }
    return m;
  }

  __device__ void write(const Merged& m) const {
    const bool seen = m.denominator > 0.0f || m.denominator != m.denominator;
    const float inverse = seen ? reciprocal_approx(m.denominator) : 0.0f;
    // Lane q of a row has dims 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of a step. Neighbours swap two of them, so that each stores
    // four that lie together and a row's four lanes 32 bytes.
    const uint32_t low = pack_bf16(m.sum.x * inverse, m.sum.y * inverse), high = pack_bf16(m.sum.z * inverse, m.sum.w * inverse);
    const uint32_t other = __shfl_xor_sync(~0u, lane % 2 ? low : high, 1);
    const int row = merge.row_tile * ROWS + row_of_tile();
    if (row >= merge.nodes * p.heads) return;
    const int own_node = node_of(p, row), head = row - own_node * p.heads;
    const int64_t node = merge.node_begin + own_node;
    const int dim = part * kPartDims + lane / 8 * 16 + lane % 2 * 8 + lane / 2 % 2 * 4;
    __nv_bfloat16* const target = static_cast<__nv_bfloat16*>(p.out) + node * p.out_stride_node + head * p.out_stride_head + dim;
    *reinterpret_cast<uint2*>(target) = lane % 2 ? uint2{other, high} : uint2{low, other};
    if (part == 0 && lane < 8 && lane % 4 == 0)
      p.lse[node * p.lse_stride_node + head] = seen ? (m.top + log2f(m.denominator)) * 0.69314718055994531f : -INFINITY;
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
__global__ void __launch_bounds__(32 * kWarps, kBlocks) combine_kernel(const __grid_constant__ VerifyParams p) {
  __shared__ Merged others[kWarps][32];
  constexpr int kUnits = ROWS / 2 * kParts;  // of a merge item
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  clear_padding(p);
  const int turns = kUnits / kWarps * team_of(p.header->most_splits);  // that a merge may take
  for (int i = blockIdx.x; i < p.header->num_merges * turns; i += gridDim.x) {
    const MergeItem merge = p.merges[i / turns];
    const int team = team_of(merge.count), member = warp % team;
    const int index = i % turns * (kWarps / team) + warp / team;
    const int first_row = index / kParts * 2;
    // For all of a block at once: its units are of the same two rows. Small teams are done with a merge in its first turns.
    if (index >= kUnits || merge.row_tile * ROWS + first_row >= merge.nodes * p.heads) continue;
    const Unit<ROWS> unit{p, merge, first_row, index % kParts, lane};
    cudaGridDependencySynchronize();
    Merged merged = unit.merge_splits(member, team);
    if (team > 1) {
      others[warp][lane] = merged;
      __syncthreads();
      if (member == 0) {
        float top = -INFINITY;
        for (int w = 0; w < team; ++w) top = fmaxf(top, others[warp + w][lane].top);
        merged = {{}, 0.0f, top};
        for (int w = 0; w < team; ++w) {
          const Merged& one = others[warp + w][lane];
          merged.add(exp2_approx(one.top - base_of(top)), one.sum, one.denominator);
        }
      }
      __syncthreads();
    }
    if (member == 0) unit.write(merged);
  }
  cudaGridDependencySynchronize();  // whoever comes after this kernel may rely on the flash kernel's end
}

template <int ROWS>
cudaError_t launch(const VerifyParams& params, int multiprocessors, cudaStream_t stream) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = kBlocks * multiprocessors, config.blockDim = 32 * kWarps;
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
