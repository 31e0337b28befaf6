// Merges the partials of split rows: out = sum of exp2(lse_i - max) out_i, over the same sum without out_i.
//
// The blocks start while the flash kernel still runs and read the plan meanwhile; they wait for it before the partials. They
// live for 2 us, and their instructions come from memory as cold as data do: 1 KB costs some 0.4 us. So there is no division,
// and loops that take long only rarely stay loops.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>

#include "../common/dependent.h"
#include "../common/ptx.cuh"
#include "combine.h"
#include "heads.cuh"
#include "partial.cuh"

namespace tpv {
namespace {

constexpr int kLogWarps = 3, kWarps = 1 << kLogWarps;  // of a block
constexpr int kBlocks = 4;  // of a multiprocessor, and in all: no block waits until another one has ended
// Splits that a warp asks for at once: as many as registers hold.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 1000
constexpr int kLoads = 9;
#else
constexpr int kLoads = 8;
#endif
constexpr int kLogParts = 3, kPartDims = kLatent >> kLogParts;  // of a row

// So many warps, as a power of two, share a merge's splits: no more than it takes to ask for all of them at once. The order of
// sums depends on the number of splits only.
__device__ int log_team_of(int splits) { return (splits > kLoads) + (splits > 2 * kLoads) + (splits > 4 * kLoads); }

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

// One part of two rows: of each split four times 128 bytes, see partial_offset(). Lanes 0 to 15 have the first row, the others
// the second; four lanes have a step.
template <int ROWS>
struct Unit {
  const VerifyParams& p;
  const MergeItem& merge;
  const uint32_t first_row, part, lane;  // of the tile; of the row

  __device__ uint32_t row() const { return first_row + lane / 16; }

  // Splits first, first + 2^log_stride, ...
  __device__ Merged merge_splits(int first, int log_stride) const {
    const int64_t begin = merge.first + first;
    const float* lse = p.partial_lse + (begin + (lane % 16 << log_stride)) * ROWS + row();  // a split's a lane
    const float4* out = reinterpret_cast<const float4*>(p.partial_out) + begin * ROWS * (kLatent / 4) +
                        partial_offset(row(), part / 2, part % 2 * 4 + lane / 4 % 4, lane % 4);
    Merged m = {{}, 0.0f, -INFINITY};
#pragma unroll 1
    for (int left = merge.count - first; left > 0; left -= kLoads << log_stride) {
      float weight = -INFINITY;
      float4 value[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        value[i] = {};
        load_global_if(i << log_stride < left, value[i], out);
        out += ROWS * (kLatent / 4) << log_stride;
      }
      load_global_if(lane % 16 < kLoads && lane % 16 << log_stride < left, weight, lse);
      lse += kLoads * ROWS << log_stride;
      float top = fmaxf(weight, m.top);
#pragma unroll
      for (int mask = 8; mask; mask /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, mask));
      m.rebase(top);
      weight = exp2_approx(weight - base_of(top));
#pragma unroll
      for (int i = 0; i < kLoads; ++i) m.add(__shfl_sync(~0u, weight, i, 16), value[i], 1.0f);
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
    const int row = merge.row_tile * ROWS + this->row();
    if (row >= merge.nodes * p.heads) return;
    const int own_node = node_of(p, row), head = row - own_node * p.heads;
    const int64_t node = merge.node_begin + own_node;
    const int dim = part * kPartDims + lane / 4 % 4 * 16 + lane % 2 * 8 + lane / 2 % 2 * 4;
    __nv_bfloat16* const target = static_cast<__nv_bfloat16*>(p.out) + node * p.out_stride_node + head * p.out_stride_head + dim;
    *reinterpret_cast<uint2*>(target) = lane % 2 ? uint2{other, high} : uint2{low, other};
    if (part == 0 && lane % 16 == 0)
      p.lse[node * p.lse_stride_node + head] = seen ? (m.top + log2_approx(m.denominator)) * 0.69314718055994531f : -INFINITY;
  }
};

// Rows beyond the plan's nodes: nothing is seen there.
__device__ void clear_padding(const VerifyParams& p) {
#pragma unroll 1
  for (int64_t node = p.header->num_nodes + blockIdx.x; node < p.out_nodes; node += gridDim.x)
#pragma unroll 1
    for (int head = threadIdx.x / 32; head < p.heads; head += kWarps) {
      __nv_bfloat16* target = static_cast<__nv_bfloat16*>(p.out) + node * p.out_stride_node + head * p.out_stride_head;
#pragma unroll 1
      for (int i = threadIdx.x % 32; i < kLatent / 4; i += 32) reinterpret_cast<uint2*>(target)[i] = uint2{};
      if (threadIdx.x % 32 == 0) p.lse[node * p.lse_stride_node + head] = -INFINITY;
    }
}

template <int ROWS>
__global__ void __launch_bounds__(32 * kWarps, kBlocks) combine_kernel(const __grid_constant__ VerifyParams p) {
  __shared__ Merged others[kWarps][32];
  constexpr int kLogTurns = (ROWS == 16 ? 3 : ROWS == 32 ? 4 : 5) + kLogParts - kLogWarps;  // of a merge with one warp a unit
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int log_turns = kLogTurns + log_team_of(p.header->most_splits);
  const uint32_t end = p.header->num_merges << log_turns;
  clear_padding(p);
#pragma unroll 1
  for (uint32_t i = blockIdx.x; i < end; i += gridDim.x) {
    const MergeItem merge = p.merges[i >> log_turns];
    const int log_team = log_team_of(merge.count);
    const uint32_t turn = i & ((1 << log_turns) - 1), member = warp & ((1 << log_team) - 1);
    const uint32_t index = (turn << (kLogWarps - log_team)) + (warp >> log_team);
    const uint32_t first_row = index >> kLogParts << 1;
    // For all of a block at once: its units are of the same two rows. Small teams are done with a merge in its first turns.
    if (turn >> (kLogTurns + log_team) || merge.row_tile * ROWS + first_row >= merge.nodes * p.heads) continue;
    const Unit<ROWS> unit{p, merge, first_row, index % (1 << kLogParts), lane};
    cudaGridDependencySynchronize();
    Merged merged = unit.merge_splits(member, log_team);
    if (log_team > 0) {
      others[warp][lane] = merged;
      __syncthreads();
      if (member == 0) {
#pragma unroll 1
        for (uint32_t w = warp + 1; w >> log_team == warp >> log_team; ++w) {
          const Merged& one = others[w][lane];
          merged.rebase(fmaxf(merged.top, one.top));
          merged.add(exp2_approx(one.top - base_of(merged.top)), one.sum, one.denominator);
        }
      }
      __syncthreads();
    }
    if (member == 0) unit.write(merged);
  }
  cudaGridDependencySynchronize();  // whoever comes after this kernel may rely on the flash kernel's end
}

}  // namespace

cudaError_t launch_combine(const VerifyParams& params, int tile_rows, int multiprocessors, cudaStream_t stream) {
  const auto kernel = tile_rows == 16 ? combine_kernel<16> : tile_rows == 32 ? combine_kernel<32> : combine_kernel<64>;
  return launch_dependent(kernel, kBlocks * multiprocessors, 32 * kWarps, params, stream);
}

}  // namespace tpv
