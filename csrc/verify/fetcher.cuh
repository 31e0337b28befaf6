// Brings queries and rows of the pool into the ring, tile after tile over all items of a block.
#pragma once
#include "flash_block.cuh"

namespace tpv {

// One PV warp's share of each tile: kCopyRows rows, one bulk copy each. It runs kSlots - 1 tiles ahead of the warp, which
// tells how many tiles it has done. The common case, a tile in the middle of an item, is next_whole(): it has no branch but
// one in kBatch, for it stands in the way of the next tile's softmax.
template <class T>
struct Fetcher {
  static constexpr int kBatch = 32 / T::kCopyRows;  // tiles, of whose rows each lane knows one slot
  const FlashBlock<T>& block;
  const int first_row;    // of a tile
  int index;              // item
  int tile;               // of the item, the next one to fetch; queries come first, below 0
  uint32_t slots, ahead;  // of this batch of tiles and of the next: lane kCopyRows t + r knows row first_row + r of tile t

  __device__ Fetcher(const FlashBlock<T>& block, int warp)
      : block(block), first_row(warp * T::kCopyRows), index(blockIdx.x) {
    // One load brings the item's first words and, in the other lanes, the number of items: ptxas would put a load of the item
    // behind the branch, a second cold round trip. Beyond the last item it reads what lies there, and drops it.
    const int32_t* const item_words = &block.p.items[index].slots;
    const int32_t word = __ldg(block.lane < 2 ? item_words + block.lane : &block.p.header->num_items);
    WorkItem item = {};
    item.slots = __shfl_sync(~0u, word, 0), item.tokens = __shfl_sync(~0u, word, 1);
    open(__shfl_sync(~0u, word, 2), item);
  }

  __device__ void open(int items, const WorkItem& item) {
    if (index >= uniform(items)) {
      index = kNoItem;
      return;
    }
    tile = -T::kQueryTiles;
    load_global(slots, slots_of(item, 0)), load_global(ahead, slots_of(item, kBatch));
  }

  __device__ const int32_t* slots_of(const WorkItem& item, int first_tile) const {
    const int token = (first_tile + block.lane / T::kCopyRows) * T::kTokens + first_row + block.lane % T::kCopyRows;
    return block.p.table.slots + item.slots + min(token, item.tokens - 1);
  }

  __device__ void turn() {
    __syncwarp();
    slots = __shfl_sync(~0u, ahead, block.lane);  // a move that the compiler keeps before the load, which may then land in place
    load_global(ahead, slots_of(block.item(index), tile + kBatch));
  }

  __device__ uint32_t slot_of(int r) const {
    return __shfl_sync(~0u, slots, static_cast<uint32_t>(tile) % kBatch * T::kCopyRows + r);
  }
  __device__ uint64_t row_of_pool(uint32_t slot) const {
    return reinterpret_cast<uint64_t>(block.p.kv) + static_cast<uint64_t>(slot) * block.p.kv_stride_bytes;
  }

  // Rows beyond the last repeat the tile's others in turn; nothing of them is stored. (Were it one row, all blocks would ask
  // for its lines many times at once: with 8 of 16 rows, 129 blocks waited 2 us longer.)
  __device__ uint64_t row_of_queries(const WorkItem& item, int tile, int r) const {
    const int first = item.row_tile * T::kRows, end = item.nodes * block.p.heads;
    int row = first + (tile + T::kQueryTiles) * 16 + first_row + r;
    while (row >= end) row -= end - first;
    const int node = node_of(block.p, row), head = row - node * block.p.heads;
    return reinterpret_cast<uint64_t>(block.p.q) +
           ((item.node_begin + node) * block.p.q_stride_node + head * block.p.q_stride_head) * 2;
  }

  // Of the next tile's rows, to be asked for well before next_whole().
  struct Slots {
    uint32_t row[T::kCopyRows];
  };
  __device__ Slots next_slots() const {
    Slots s;
#pragma unroll
    for (int r = 0; r < T::kCopyRows; ++r) s.row[r] = slot_of(r);
    return s;
  }

  // A block's first kSlots - 1 tiles, before any tile is done, or all but as many as it returns, below 0. Queries come as in
  // next(), but without what cannot be yet: the instructions are as cold as the data.
  __device__ int start() {
    constexpr int kFirst = T::kQueryTiles < T::kSlots ? T::kQueryTiles : T::kSlots - 1;
    if (index == kNoItem) return 0;
    const uint64_t address = row_of_queries(
        block.item(index), block.lane / T::kCopyRows % T::kQueryTiles - T::kQueryTiles, block.lane % T::kCopyRows);
#pragma unroll
    for (int t = 0; t < kFirst; ++t) {
      uint64_t source[T::kCopyRows];
#pragma unroll
      for (int r = 0; r < T::kCopyRows; ++r) source[r] = __shfl_sync(~0u, address, t * T::kCopyRows + r);
      copy_rows<T::kCopyRows, T::kPitch>(block.tile(t) + first_row * T::kPitch, source, kRow * 2, block.full(t));
    }
    tile += kFirst;
    int done = kFirst - (T::kSlots - 1);
    if (!T::kWholeFirst)
      for (; done < 0; ++done) next(done);
    return done;
  }

  // A tile of tokens that is whole and not its item's last.
  __device__ void next_whole(const Slots& slots, uint32_t done) {
    const uint32_t count = done + T::kSlots - 1;
    uint64_t source[T::kCopyRows];
#pragma unroll
    for (int r = 0; r < T::kCopyRows; ++r) source[r] = row_of_pool(slots.row[r]);
    barrier_wait(block.empty(count), block.tile_parity(count) ^ 1);
    copy_rows<T::kCopyRows, T::kPitch>(block.tile(count) + first_row * T::kPitch, source, kRow * 2, block.full(count));
    if (static_cast<uint32_t>(++tile) % kBatch == 0) turn();
  }

  // One of an item's first tiles.
  __device__ void next_first(uint32_t done) {
    const bool whole =
        T::kWholeFirst && index != kNoItem && tile >= 0 && (tile + 1) * T::kTokens < uniform(block.item(index).tokens);
    if (whole) next_whole(next_slots(), done); else next(done);
  }

  // Any tile; nothing after the last.
  __device__ void next(uint32_t done) {
    if (index == kNoItem) return;
    const uint32_t count = done + T::kSlots - 1;
    const WorkItem item = block.item(index);
    barrier_wait(block.empty(count), block.tile_parity(count) ^ 1);
    const uint32_t destination = block.tile(count) + first_row * T::kPitch, full = block.full(count);
    const int valid = tile < 0 ? T::kCopyRows : min(max(item.tokens - tile * T::kTokens - first_row, 0), T::kCopyRows);
    // Zeros where no token is: P is 0 there, and 0 times what was left could be NaN.
    for (int r = valid; r < T::kCopyRows; ++r)
      for (int i = block.lane; i < kRow / 8; i += 32) store_shared(destination + r * T::kPitch + i * 16, 0u, 0u, 0u, 0u);
    if (valid < T::kCopyRows) fence_async_proxy();
    __syncwarp();
    if (block.lane == 0) barrier_arrive_expect(full, valid * kRow * 2);
    __syncwarp();
    const int own = block.lane % T::kCopyRows;
    const uint64_t address = tile < 0 ? row_of_queries(item, tile, own) : row_of_pool(slot_of(own));
#pragma unroll
    for (int r = 0; r < T::kCopyRows; ++r) {
      const uint64_t source = __shfl_sync(~0u, address, r);
      if (r < valid) copy_row(destination + r * T::kPitch, source, kRow * 2, full);
    }
    if (++tile == block.tiles_of(item)) {
      index += block.stride();
      open(__ldg(&block.p.header->num_items), block.item(index));
    } else if (tile > 0 && tile % kBatch == 0) {
      turn();
    }
  }
};

}  // namespace tpv
