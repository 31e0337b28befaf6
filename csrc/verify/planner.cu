// Splits the step's work over the blocks, on the device, once a step: all layers reuse the plan, and a captured graph
// replays it for other lengths.
//
// Every request is cut into splits of at most C tiles of 16 tokens. C is what minimises a simple cost: waves of blocks, each
// as long as the longest split. Splits are as even as they can be, or all of C tiles but a request's last one. In the second
// way one wave can take all blocks: 128 splits of C tiles have a block each, and the 4 that are left share the remainders.
// The cost counts row tiles of split_heads heads, whatever the number of local heads, so that split boundaries, and with
// them the bits, are the same at every tp.
//
// One block does it all, and the tables may be cold: each is read once, all at the same time.
#include <cuda_runtime.h>

#include "planner.h"

namespace tpv {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;  // each tries another number of blocks
constexpr int kMaxBatch = 4096;
constexpr uint64_t kHalf = 1 << 20;
__constant__ int kEighthWaves[kWarps] = {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 22, 8 * kMaxWaves};
constexpr float kItemCost = 10.0f, kPartialCost = 0.02f;  // in tiles: of starting an item, of writing and merging a partial
constexpr float kSplitCost = 0.03f;  // and of one more split of the longest request, whose rows are merged one split after another

__device__ int divide_up(int a, int b) { return (a + b - 1) / b; }

// A request as items are made of it.
struct Piece {
  int items_end;  // items of this one and of those before it
  int whole_end;  // of these, those of full length
  int prefix, nodes, slot_begin, node_begin, word_begin, row_tiles, splits;
};

// How requests are cut: into splits as even as they can be, of at most `length` tiles, or into whole ones and a remainder.
struct Cut {
  int length;
  bool whole;
};

__device__ Piece piece_of(const PlanInput& in, int request, int prefix, int nodes) {
  return {0, 0, prefix, nodes, in.table.slot_begin[request], in.table.node_begin[request], in.table.word_begin[request], 0, 0};
}

struct Shared {
  int tiles[kMaxBatch];      // of 16 tokens; 0 for a padded request
  uint16_t rows[kMaxBatch];  // row tiles that the cost counts
  Piece piece[kThreads];
  float cost[kWarps];
  Cut cut[kWarps];
  int items[kWarps], whole[kWarps], merges[kWarps];  // of each warp's requests
  int longest, total_rows, total_nodes;
  unsigned long long work;   // row tiles x tiles
};

// Blocks needed when no split is longer than `length` tiles.
__device__ int blocks_at(const Shared& s, int batch, int length, int lane) {
  int blocks = 0;
  for (int request = lane; request < batch; request += 32) blocks += s.rows[request] * divide_up(s.tiles[request], length);
  return __reduce_add_sync(~0u, blocks);
}

// The shortest length that needs no more than `budget` blocks, or the longest request.
__device__ int shortest_length(const Shared& s, int batch, int budget, int lane) {
  // blocks(C) lies between work / C and work / C + total_rows.
  const float work = s.work;
  int low = max(1, static_cast<int>(work / budget * 0.999f)), high = s.longest;
  if (budget > s.total_rows) {
    const float bound = work / (budget - s.total_rows) * 1.001f + 2;
    if (bound < high) high = static_cast<int>(bound);  // one that is larger need not be an int32
  }
  low = min(low, high);
  while (low < high) {
    const int middle = (low + high) / 2;
    if (blocks_at(s, batch, middle, lane) <= budget) high = middle; else low = middle + 1;
  }
  return low;
}

__device__ float even_cost(const Shared& s, const PlanInput& in, int length, int lane) {
  const int items = blocks_at(s, in.batch, length, lane);
  return divide_up(items, in.blocks) * (length + kItemCost) + items * kPartialCost +
         divide_up(s.longest, length) * kSplitCost;
}

// Infinite if the splits of full length leave no block for the others.
__device__ float whole_cost(const Shared& s, const PlanInput& in, int length, int lane) {
  int whole = 0, others = 0, longest_other = 0;
  for (int request = lane; request < in.batch; request += 32) {
    const int tiles = s.tiles[request] / length, other = s.tiles[request] - tiles * length;
    whole += s.rows[request] * tiles;
    if (other > 0) others += s.rows[request];
    longest_other = max(longest_other, other);
  }
  whole = __reduce_add_sync(~0u, whole), others = __reduce_add_sync(~0u, others);
  longest_other = __reduce_max_sync(~0u, longest_other);
  if (whole == 0 || whole >= in.blocks) return INFINITY;
  const float shared = divide_up(others, in.blocks - whole) * (longest_other + kItemCost);
  return fmaxf(length + kItemCost, shared) + (whole + others) * kPartialCost + divide_up(s.longest, length) * kSplitCost;
}

__device__ Cut choose_cut(Shared& s, const PlanInput& in, int warp, int lane) {
  const int even = shortest_length(s, in.batch, max(1, in.blocks * kEighthWaves[warp] / 8), lane);
  float cost = even_cost(s, in, even, lane);
  Cut cut = {even, false};
  const int whole = max(1, static_cast<int>(static_cast<float>(s.work) / in.blocks)) + warp;
  if (in.batch <= kThreads && s.total_rows < in.blocks) {
    const float other = whole_cost(s, in, whole, lane);
    if (other < cost) cost = other, cut = {whole, true};
  }
  if (lane == 0) s.cost[warp] = cost, s.cut[warp] = cut;
  __syncthreads();
  int best = 0;
  for (int w = 1; w < kWarps; ++w)
    if (s.cost[w] < s.cost[best]) best = w;
  return s.cut[best];
}

__global__ void __launch_bounds__(kThreads) plan_kernel(const __grid_constant__ PlanInput in) {
  __shared__ Shared s;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) s.longest = 1, s.total_rows = s.total_nodes = 0, s.work = 0;
  __syncthreads();

  const int split_tile_rows = in.split_tile_rows_now ? *in.split_tile_rows_now : in.split_tile_rows;
  Piece piece = {};
  for (int start = 0; start < in.batch; start += kThreads) {
    const int request = start + threadIdx.x;
    int tiles = 0, rows = 0, nodes = 0;
    if (request < in.batch) {
      const int prefix = in.table.prefix_len[request];
      nodes = in.table.nodes[request];
      if (start == 0) piece = piece_of(in, request, prefix, nodes);
      if (nodes > 0) tiles = divide_up(prefix + nodes, 16), rows = divide_up(nodes * in.split_heads, split_tile_rows);
      s.tiles[request] = tiles, s.rows[request] = rows;
    }
    const int longest = __reduce_max_sync(~0u, tiles), total_rows = __reduce_add_sync(~0u, rows);
    const int total_nodes = __reduce_add_sync(~0u, nodes);
    const uint64_t own = static_cast<uint64_t>(tiles) * rows;  // of a warp, in two sums that fit
    const uint64_t low = __reduce_add_sync(~0u, static_cast<uint32_t>(own % kHalf));
    const uint64_t work = __reduce_add_sync(~0u, static_cast<uint32_t>(own / kHalf)) * kHalf + low;
    if (lane == 0) {
      atomicMax(&s.longest, longest), atomicAdd(&s.total_rows, total_rows);
      atomicAdd(&s.total_nodes, total_nodes), atomicAdd(&s.work, work);
    }
  }
  __syncthreads();
  const Cut cut = in.fixed_length > 0 ? Cut{in.fixed_length, false} : choose_cut(s, in, warp, lane);

  // Items request by request; row tiles of one split side by side, so that blocks that read the same tokens run together.
  // Remainders come after all whole splits. (Where there are such, all requests are in one turn of this loop.)
  int items = 0, merges = 0, alone = 0;
  for (int start = 0; start < in.batch; start += kThreads) {
    const int request = start + threadIdx.x;
    if (start > 0) {
      piece = {};
      if (request < in.batch) piece = piece_of(in, request, in.table.prefix_len[request], in.table.nodes[request]);
    }
    if (piece.nodes > 0) {
      piece.row_tiles = divide_up(piece.nodes * in.heads, in.tile_rows);
      piece.splits = divide_up(s.tiles[request], cut.length);
    }
    int items_end = piece.row_tiles * piece.splits, merges_end = piece.row_tiles;
    int whole_end = cut.whole && piece.nodes > 0 ? piece.row_tiles * (s.tiles[request] / cut.length) : items_end;
    for (int offset = 1; offset < 32; offset *= 2) {
      const int a = __shfl_up_sync(~0u, items_end, offset), b = __shfl_up_sync(~0u, merges_end, offset);
      const int c = __shfl_up_sync(~0u, whole_end, offset);
      if (lane >= offset) items_end += a, merges_end += b, whole_end += c;
    }
    if (lane == 31) s.items[warp] = items_end, s.merges[warp] = merges_end, s.whole[warp] = whole_end;
    __syncthreads();
    int chunk_items = 0, chunk_merges = 0, chunk_whole = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) items_end += chunk_items, merges_end += chunk_merges, whole_end += chunk_whole;
      chunk_items += s.items[w], chunk_merges += s.merges[w], chunk_whole += s.whole[w];
    }
    piece.items_end = items_end, piece.whole_end = whole_end;
    s.piece[threadIdx.x] = piece;
    for (int i = 0; i < piece.row_tiles; ++i)
      in.merges[merges + merges_end - piece.row_tiles + i] = {
          items + items_end - (piece.row_tiles - i) * piece.splits, piece.splits, i, piece.nodes, piece.node_begin, {}};
    __syncthreads();

    for (int i = threadIdx.x; i < chunk_items; i += kThreads) {
      int low = 0, high = min(kThreads, in.batch - start) - 1;  // the first request whose items end beyond i
      while (low < high) {
        const int middle = (low + high) / 2;
        if (s.piece[middle].items_end > i) high = middle; else low = middle + 1;
      }
      const Piece& p = s.piece[low];
      const int own = i - (p.items_end - p.row_tiles * p.splits), split = own / p.row_tiles, row_tile = own % p.row_tiles;
      const int tokens = p.prefix + p.nodes, all_tiles = divide_up(tokens, 16);
      const auto tiles_before = [&](int split) {
        return cut.whole ? min(split * cut.length, all_tiles) : split * (all_tiles / p.splits) + min(split, all_tiles % p.splits);
      };
      const int begin = tiles_before(split) * 16, end = min(tiles_before(split + 1) * 16, tokens);
      const int partial = items + i - own + row_tile * p.splits + split;
      int place = i;
      if (cut.whole) {
        const bool whole = (split + 1) * cut.length <= all_tiles;
        const int others_end = p.items_end - p.whole_end;
        place = whole ? i - (others_end - (p.splits * cut.length > all_tiles ? p.row_tiles : 0))
                      : chunk_whole + others_end - p.row_tiles + row_tile;
      }
      in.items[items + place] = {p.slot_begin + begin, end - begin, p.prefix - begin, row_tile, p.nodes, p.node_begin,
                                 p.word_begin, partial};
    }
    if (cut.whole && chunk_whole < in.blocks) alone = chunk_whole;
    items += chunk_items, merges += chunk_merges;
    __syncthreads();
  }
  // A block reads its first item before it knows how many there are.
  for (int i = items + threadIdx.x; i < in.blocks; i += kThreads) in.items[i] = {};
  if (threadIdx.x == 0) *in.header = {items, merges, s.total_nodes, alone, divide_up(s.longest, cut.length)};
}

}  // namespace

cudaError_t launch_plan(const PlanInput& input, cudaStream_t stream) {
  plan_kernel<<<1, kThreads, 0, stream>>>(input);
  return cudaGetLastError();
}

}  // namespace tpv
