// What all warps of a flash block share: where things lie in shared memory, and the walk over work items.
#pragma once
#include "../common/ptx.cuh"
#include "flash_traits.h"
#include "heads.cuh"

namespace tpv {

// Of a warp at a barrier: its first lane stands for all. racecheck does not see that order, only that of lanes which arrive
// themselves; for it there is a build with -DTPV_ALL_LANES_ARRIVE.
#ifdef TPV_ALL_LANES_ARRIVE
constexpr int kArrivals = 32;
#else
constexpr int kArrivals = 1;
#endif

constexpr int kNoItem = 1 << 30;  // beyond any, and twice that is a number still

// `count` numbers the tiles that went through the ring, `step` those of them that are tokens.
template <class T>
struct FlashBlock {
  const VerifyParams& p;
  const uint32_t smem;
  const int lane;

  // Barriers are made: for all warps, in the code of each role. The PV warps ask for their item before.
  __device__ void begin() const { named_barrier(0, T::kThreads); }

  __device__ int items() const { return uniform(__ldg(&p.header->num_items)); }
  // From a block's item to its next one.
  __device__ int stride() const {
    const int alone = __ldg(&p.header->alone);
    return uniform(blockIdx.x < alone ? kNoItem : gridDim.x - alone);
  }

  __device__ uint32_t tile(uint32_t count) const { return smem + count % T::kSlots * T::kTileBytes; }
  // A QK warp's own: its scores and what it keeps of Q, 16 bytes of this lane at a time.
  __device__ uint32_t scores(int qk_warp) const { return smem + T::kQkOffset + qk_warp * T::kQkBytes + lane * 16; }
  // Holds the last step with a score that exceeds its row's maximum.
  __device__ uint32_t exceeds(int group, uint32_t step) const {
    return smem + T::kExceedsOffset + group * 8 + step % 2 * 4;
  }
  // Of the tile ring: filled by copies, emptied by every warp.
  __device__ uint32_t full(uint32_t count) const { return smem + T::kBarrierOffset + 8 * (count % T::kSlots); }
  __device__ uint32_t empty(uint32_t count) const { return full(count) + 8 * T::kSlots; }
  // Of the scores: filled by a group's QK warps, emptied by its PV warps.
  __device__ uint32_t scores_full(int group) const { return smem + T::kBarrierOffset + 8 * (2 * T::kSlots + 2 * group); }
  __device__ uint32_t scores_empty(int group) const { return scores_full(group) + 8; }

  __device__ void arrive(uint32_t barrier) const {
    __syncwarp();
    if (kArrivals == 32 || lane == 0) barrier_arrive(barrier);
  }
  __device__ static uint32_t tile_parity(uint32_t count) { return count / T::kSlots & 1; }

  // Loaded afresh at every call: kept across a loop over tiles, it would be spilled.
  __device__ WorkItem item(int index) const { return p.items[opaque(index)]; }
  __device__ static int tiles_of(const WorkItem& item) { return uniform((item.tokens + T::kTokens - 1) / T::kTokens); }
  // Those of an item's tiles, from the first, that hold nothing but committed tokens.
  __device__ static int plain_of(const WorkItem& item) {
    return uniform(min(max(item.committed, 0) / T::kTokens, (item.tokens + T::kTokens - 1) / T::kTokens));
  }
};

}  // namespace tpv
