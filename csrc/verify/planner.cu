// Splits the step's work over the blocks, on the device, once a step: all layers reuse the plan, and a captured graph
// replays it for other lengths.
//
// Every request is cut into splits of at most C tiles of 16 tokens. C is what minimises a simple cost: waves of blocks, each
// as long as the longest split. The cost counts row tiles of split_heads heads, whatever the number of local heads, so that
// split boundaries, and with them the bits, are the same at every tp.
//
// One block does it all, and the tables may be cold: each is read once, all at the same time.
#include <cuda_runtime.h>

#include "planner.h"

namespace tpv {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;  // each tries another number of blocks
constexpr int kMaxBatch = 4096;
__constant__ int kEighthWaves[kWarps] = {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 22, 8 * kMaxWaves};
constexpr float kItemCost = 4.0f, kPartialCost = 0.02f;  // in tiles: of starting an item, of writing and merging a partial

__device__ int divide_up(int a, int b) { return (a + b - 1) / b; }

// A request as items are made of it.
struct Piece {
  int items_end;  // items of this one and of those before it
  int prefix, nodes, slot_begin, node_begin, word_begin, row_tiles, splits;
};

__device__ Piece piece_of(const PlanInput& in, int request, int prefix, int nodes) {
  return {0, prefix, nodes, in.table.slot_begin[request], in.table.node_begin[request], in.table.word_begin[request], 0, 0};
}

struct Shared {
  int tiles[kMaxBatch];      // of 16 tokens; 0 for a padded request
  uint16_t rows[kMaxBatch];  // row tiles that the cost counts
  Piece piece[kThreads];
  float cost[kWarps];
  int length[kWarps];
  int items[kWarps], merges[kWarps];  // of each warp's requests
  int longest, total_rows, total_nodes;
  float work;                // row tiles x tiles
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
  int low = max(1, static_cast<int>(s.work / budget * 0.999f)), high = s.longest;
  if (budget > s.total_rows) high = min(high, static_cast<int>(s.work / (budget - s.total_rows) * 1.001f) + 2);
  low = min(low, high);
  while (low < high) {
    const int middle = (low + high) / 2;
    if (blocks_at(s, batch, middle, lane) <= budget) high = middle; else low = middle + 1;
  }
  return low;
}

__device__ int choose_length(Shared& s, const PlanInput& in, int warp, int lane) {
  const int length = shortest_length(s, in.batch, max(1, in.blocks * kEighthWaves[warp] / 8), lane);
  const int blocks = blocks_at(s, in.batch, length, lane);
  if (lane == 0) {
    s.length[warp] = length;
    s.cost[warp] = divide_up(blocks, in.blocks) * (length + kItemCost) + blocks * kPartialCost;
  }
  __syncthreads();
  int best = 0;
  for (int w = 1; w < kWarps; ++w)
    if (s.cost[w] < s.cost[best]) best = w;
  return s.length[best];
}

__global__ void __launch_bounds__(kThreads) plan_kernel(const __grid_constant__ PlanInput in) {
  __shared__ Shared s;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) s.longest = 1, s.total_rows = s.total_nodes = 0, s.work = 0.0f;
  __syncthreads();

  Piece piece = {};
  for (int start = 0; start < in.batch; start += kThreads) {
    const int request = start + threadIdx.x;
    int tiles = 0, rows = 0, nodes = 0;
    if (request < in.batch) {
      const int prefix = in.table.prefix_len[request];
      nodes = in.table.nodes[request];
      if (start == 0) piece = piece_of(in, request, prefix, nodes);
      if (nodes > 0) tiles = divide_up(prefix + nodes, 16), rows = divide_up(nodes * in.split_heads, in.split_tile_rows);
      s.tiles[request] = tiles, s.rows[request] = rows;
    }
    const int longest = __reduce_max_sync(~0u, tiles), total_rows = __reduce_add_sync(~0u, rows);
    const int total_nodes = __reduce_add_sync(~0u, nodes), work = __reduce_add_sync(~0u, tiles * rows);
    if (lane == 0) {
      atomicMax(&s.longest, longest), atomicAdd(&s.total_rows, total_rows);
      atomicAdd(&s.total_nodes, total_nodes), atomicAdd(&s.work, static_cast<float>(work));
    }
  }
  __syncthreads();
  const int length = in.fixed_length > 0 ? in.fixed_length : choose_length(s, in, warp, lane);

  // Items request by request; row tiles of one split side by side, so that blocks that read the same tokens run together.
  int items = 0, merges = 0;
  for (int start = 0; start < in.batch; start += kThreads) {
    const int request = start + threadIdx.x;
    if (start > 0) {
      piece = {};
      if (request < in.batch) piece = piece_of(in, request, in.table.prefix_len[request], in.table.nodes[request]);
    }
    if (piece.nodes > 0) {
      piece.row_tiles = divide_up(piece.nodes * in.heads, in.tile_rows);
      piece.splits = divide_up(s.tiles[request], length);
    }
    int items_end = piece.row_tiles * piece.splits, merges_end = piece.row_tiles;
    for (int offset = 1; offset < 32; offset *= 2) {
      const int a = __shfl_up_sync(~0u, items_end, offset), b = __shfl_up_sync(~0u, merges_end, offset);
      if (lane >= offset) items_end += a, merges_end += b;
    }
    if (lane == 31) s.items[warp] = items_end, s.merges[warp] = merges_end;
    __syncthreads();
    int chunk_items = 0, chunk_merges = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) items_end += chunk_items, merges_end += chunk_merges;
      chunk_items += s.items[w], chunk_merges += s.merges[w];
    }
    piece.items_end = items_end;
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
      const int begin = all_tiles * split / p.splits * 16, end = min(all_tiles * (split + 1) / p.splits * 16, tokens);
      const int partial = items + i - own + row_tile * p.splits + split;
      in.items[items + i] = {p.slot_begin + begin, end - begin, p.prefix - begin, row_tile, p.nodes, p.node_begin,
                             p.word_begin, partial};
    }
    items += chunk_items, merges += chunk_merges;
    __syncthreads();
  }
  if (threadIdx.x == 0) *in.header = {items, merges, s.total_nodes, length};
}

}  // namespace

cudaError_t launch_plan(const PlanInput& input, cudaStream_t stream) {
  plan_kernel<<<1, kThreads, 0, stream>>>(input);
  return cudaGetLastError();
}

}  // namespace tpv
