// What all warps of a flash block share: where things lie in shared memory, and the walk over work items.
#pragma once
#include "../common/ptx.cuh"
#include "flash_traits.h"

namespace tpv {

template <class T>
struct FlashBlock {
  const VerifyParams& p;
  const uint32_t base;
  __device__ uint32_t smem() const { return opaque(base); }
  __device__ static int lane() { return opaque(threadIdx.x) % 32; }

  __device__ int items() const { return __ldg(&p.header->num_items); }
  __device__ uint32_t tile(uint32_t count) const { return smem() + count % T::kSlots * T::kTileBytes; }
  __device__ uint32_t group_region(int group) const { return smem() + T::kGroupOffset + group * T::kGroupBytes; }
  // Of the tile ring: filled by copies, emptied by every warp.
  __device__ uint32_t full(uint32_t count) const { return smem() + T::kBarrierOffset + 8 * (count % T::kSlots); }
  __device__ uint32_t empty(uint32_t count) const { return full(count) + 8 * T::kSlots; }
  // Of the scores: filled by a group's QK warps, emptied by its PV warps.
  __device__ uint32_t scores_full(int group) const { return smem() + T::kBarrierOffset + 8 * (2 * T::kSlots + 2 * group); }
  __device__ uint32_t scores_empty(int group) const { return scores_full(group) + 8; }

  __device__ void arrive(uint32_t barrier) const {
    __syncwarp();
    if (lane() == 0) barrier_arrive(barrier);
  }
  __device__ static uint32_t tile_parity(uint32_t count) { return count / T::kSlots & 1; }

  __device__ static int tiles_of(const WorkItem& item) { return (item.end - item.begin + T::kTokens - 1) / T::kTokens; }
  // Loaded afresh at every call: kept across a loop over tiles, it would be spilled.
  __device__ WorkItem item(int index) const { return p.items[opaque(index)]; }
  // Tiles of an item, and how many of them, from the first, hold nothing but committed tokens.
  __device__ void count_tiles(const WorkItem& item, int& tiles, int& plain) const {
    tiles = tiles_of(item);
    plain = min(max(p.table.prefix_len[item.request] - item.begin, 0) / T::kTokens, tiles);
  }
  __device__ int rows_of(const WorkItem& item) const { return p.table.nodes[item.request] * p.heads; }
  __device__ int64_t node_of(const WorkItem& item, int row) const {
    return p.table.node_begin[item.request] + row / p.heads;
  }
};

}  // namespace tpv
