// Moves rows of the pool, in all layers at once, and hashes them on the way: a warp a row, each lane a few vectors in flight.
// Moves are disjoint, so their order does not matter.
#include <cuda_runtime.h>

#include "move.h"

namespace tpv {
namespace {

constexpr int kWarps = 8;    // of a block
constexpr int kVectors = 3;  // of 16 bytes in flight a lane; with 32 lanes, more than the 1,152 bytes of a bf16 row

// The i-th output of SplitMix64 (Steele, Lea, Flood 2014) seeded with `word`; see tpverify.h.
__device__ uint64_t mix(uint64_t word, int i) {
  uint64_t z = word + (i + 1ull) * 0x9E3779B97F4A7C15ull;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}

template <bool HASH>
__global__ void __launch_bounds__(32 * kWarps) move_kernel(const __grid_constant__ MoveParams p) {
  const int lane = threadIdx.x % 32, move = blockIdx.x * kWarps + threadIdx.x / 32, layer = blockIdx.y;
  if (move >= p.count) return;
  char* base = p.pool + layer * p.layer_stride;
  const uint4* source = reinterpret_cast<const uint4*>(base + p.src[move] * p.slot_stride);
  uint4* target = reinterpret_cast<uint4*>(base + p.dst[move] * p.slot_stride);
  uint64_t hash = 0;
  for (int first = lane; first < p.row_vectors; first += 32 * kVectors) {
    uint4 vector[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (first + 32 * j < p.row_vectors) vector[j] = source[first + 32 * j];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int i = first + 32 * j;
      if (i >= p.row_vectors) break;
      target[i] = vector[j];
      if (HASH) {
        const uint4 v = vector[j];
        hash += mix(v.x | static_cast<uint64_t>(v.y) << 32, 2 * i) + mix(v.z | static_cast<uint64_t>(v.w) << 32, 2 * i + 1);
      }
    }
  }
  if (HASH) {
    for (int offset = 16; offset; offset /= 2) hash += __shfl_xor_sync(~0u, hash, offset);
    if (lane == 0) p.hashes[static_cast<int64_t>(layer) * p.count + move] = hash;
  }
}

}  // namespace

cudaError_t launch_move(const MoveParams& params, cudaStream_t stream) {
  const dim3 grid((params.count + kWarps - 1) / kWarps, params.layers);
  const auto kernel = params.hashes ? move_kernel<true> : move_kernel<false>;
  kernel<<<grid, 32 * kWarps, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace tpv
