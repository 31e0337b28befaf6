// Brings rows of the pool into the ring, tile after tile over all items of a block.
#pragma once
#include "flash_block.cuh"

namespace tpv {

// One PV warp's share of each tile: kCopyRows rows, one bulk copy each. It runs kSlots - 1 tiles ahead of the warp's own
// count. The common case, a tile in the middle of an item, is next_plain(): it has no branch, for it stands in the way of the
// next tile's softmax. Positions count slots of the table, in 32 bits: registers are scarce here.
template <class T>
struct Fetcher {
  static constexpr uint32_t kAhead = T::kSlots - 1;
  const FlashBlock<T>& block;
  const int first_row;    // of a tile
  int index;              // item
  int position, end = 0;  // in the slot table: of this lane's row of the next tile, and of the item's end
  uint32_t slot = 0;      // of that row. Lanes r, r + kCopyRows, ... hold row first_row + r

  __device__ Fetcher(const FlashBlock<T>& block, int warp)
      : block(block), first_row(warp * T::kCopyRows), index(blockIdx.x) {
    open();
  }

  __device__ int lane_row() const { return block.lane() % T::kCopyRows; }

  __device__ void open() {
    if (index >= block.items()) return;
    const WorkItem item = block.p.items[index];
    const int begin = block.p.table.slot_begin[item.request];
    position = begin + item.begin + first_row + lane_row(), end = begin + item.end;
    if (position < end) slot = __ldg(block.p.table.slots + position);
  }

  // Every lane computes one row's address, then the rows' addresses are made uniform: a copy takes uniform registers.
  __device__ void addresses(uint64_t (&source)[T::kCopyRows]) const {
    const uint64_t address = reinterpret_cast<uint64_t>(block.p.kv) + static_cast<uint64_t>(slot) * block.p.kv_stride_bytes;
    const uint32_t low = static_cast<uint32_t>(address), high = static_cast<uint32_t>(address >> 32);
#pragma unroll
    for (int r = 0; r < T::kCopyRows; ++r)
      source[r] = static_cast<uint64_t>(__shfl_sync(~0u, high, r)) << 32 | __shfl_sync(~0u, low, r);
  }

  // The tile after `done`; it is whole and not its item's last.
  __device__ void next_plain(uint32_t done) {
    const uint32_t count = done + kAhead;
    uint64_t source[T::kCopyRows];
    addresses(source);
    position += T::kTokens;
    slot = __ldg(block.p.table.slots + min(position, end - 1));
    barrier_wait(block.empty(count), block.tile_parity(count) ^ 1);
    const uint32_t destination = block.tile(count) + first_row * T::kPitch;
    if (elect_lane()) {
      barrier_arrive_expect(block.full(count), T::kCopyRows * kRow * 2);
#pragma unroll
      for (int r = 0; r < T::kCopyRows; ++r) copy_row(destination + r * T::kPitch, source[r], kRow * 2, block.full(count));
    }
  }

  // The same for any tile, and nothing after the last.
  __device__ void next(uint32_t done) {
    if (index >= block.items()) return;
    const uint32_t count = done + kAhead;
    barrier_wait(block.empty(count), block.tile_parity(count) ^ 1);
    const uint32_t destination = block.tile(count) + first_row * T::kPitch, full = block.full(count);
    const int valid = min(max(end - position + lane_row(), 0), T::kCopyRows);
    // Zeros where no token is: P is 0 there, and 0 times what was left could be NaN.
    for (int r = valid; r < T::kCopyRows; ++r)
      for (int i = block.lane(); i < kRow / 8; i += 32) store_shared(destination + r * T::kPitch + i * 16, 0u, 0u, 0u, 0u);
    if (valid < T::kCopyRows) fence_async_proxy();
    __syncwarp();
    uint64_t source[T::kCopyRows];
    addresses(source);
    if (elect_lane()) {
      barrier_arrive_expect(full, valid * kRow * 2);
#pragma unroll
      for (int r = 0; r < T::kCopyRows; ++r)
        if (r < valid) copy_row(destination + r * T::kPitch, source[r], kRow * 2, full);
    }
    __syncwarp();
    position += T::kTokens;
    if (position - lane_row() - first_row < end) {
      if (position < end) slot = __ldg(block.p.table.slots + position);
    } else {
      index += gridDim.x;
      open();
    }
  }
};

}  // namespace tpv
