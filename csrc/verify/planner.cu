// Splits the step's work over the blocks, on the device, once a step: all layers reuse the plan, and a captured graph
// replays it for other lengths.
//
// Every request is cut into splits of at most C tiles of 16 tokens. C is what minimises a simple cost: waves of blocks, each
// as long as the longest split. The cost counts row tiles of split_heads heads, whatever the number of local heads, so that
// split boundaries, and with them the bits, are the same at every tp.
#include <cuda_runtime.h>

#include "planner.h"

namespace tpv {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;  // each tries another number of blocks
__constant__ int kQuarterWaves[kWarps] = {1, 2, 3, 4, 6, 8, 10, 4 * kMaxWaves};
constexpr float kItemCost = 4.0f, kPartialCost = 0.02f;  // in tiles: of starting an item, of writing and merging a partial

__device__ int divide_up(int a, int b) { return (a + b - 1) / b; }

__device__ int warp_sum(int value) {
  for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

struct Shape {
  int tiles, rows;  // tiles of 16 tokens; row tiles that the cost counts
};

__device__ Shape shape_of(const PlanInput& in, int request) {
  const int nodes = in.table.nodes[request];
  if (nodes == 0) return {0, 0};
  return {divide_up(in.table.prefix_len[request] + nodes, 16), divide_up(nodes * in.split_heads, in.split_tile_rows)};
}

// Blocks needed when no split is longer than `length` tiles.
__device__ int blocks_at(const PlanInput& in, int length, int lane) {
  int blocks = 0;
  for (int request = lane; request < in.batch; request += 32) {
    const Shape shape = shape_of(in, request);
    blocks += shape.rows * divide_up(shape.tiles, length);
  }
  return warp_sum(blocks);
}

__global__ void __launch_bounds__(kThreads) plan_kernel(const __grid_constant__ PlanInput in) {
  __shared__ float cost[kWarps];
  __shared__ int length[kWarps];
  __shared__ int item_base[kThreads], merge_base[kThreads];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (in.fixed_length > 0) {
    if (threadIdx.x == 0) length[0] = in.fixed_length;
  } else {
    int longest = 1;
    for (int request = lane; request < in.batch; request += 32) longest = max(longest, shape_of(in, request).tiles);
    for (int offset = 16; offset; offset /= 2) longest = max(longest, __shfl_xor_sync(~0u, longest, offset));
    const int budget = max(1, in.blocks * kQuarterWaves[warp] / 4);
    int low = 1, high = longest;  // the shortest length that fits into that many quarters of a wave
    while (low < high) {
      const int middle = (low + high) / 2;
      if (blocks_at(in, middle, lane) <= budget) high = middle; else low = middle + 1;
    }
    const int blocks = blocks_at(in, low, lane);
    if (lane == 0) {
      length[warp] = low;
      cost[warp] = divide_up(blocks, in.blocks) * (low + kItemCost) + blocks * kPartialCost;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int best = 0;
      for (int w = 1; w < kWarps; ++w)
        if (cost[w] < cost[best]) best = w;
      length[0] = length[best];
    }
  }
  __syncthreads();
  const int chosen = length[0];

  // Items request by request; row tiles of one split side by side, so that blocks that read the same tokens run together.
  int items = 0, merges = 0;
  for (int start = 0; start < in.batch; start += kThreads) {
    const int request = start + threadIdx.x;
    int row_tiles = 0, splits = 0, tiles = 0;
    if (request < in.batch && in.table.nodes[request] > 0) {
      const int nodes = in.table.nodes[request];
      tiles = divide_up(in.table.prefix_len[request] + nodes, 16);
      row_tiles = divide_up(nodes * in.heads, in.tile_rows);
      splits = divide_up(tiles, chosen);
    }
    item_base[threadIdx.x] = row_tiles * splits;
    merge_base[threadIdx.x] = row_tiles;
    __syncthreads();
    for (int offset = 1; offset < kThreads; offset *= 2) {  // inclusive scan
      int a = 0, b = 0;
      if (threadIdx.x >= offset) {
        a = item_base[threadIdx.x - offset], b = merge_base[threadIdx.x - offset];
      }
      __syncthreads();
      item_base[threadIdx.x] += a, merge_base[threadIdx.x] += b;
      __syncthreads();
    }
    const int in_batch = min(kThreads, in.batch - start);
    for (int r = warp; r < in_batch; r += kWarps) {
      const int before_items = r ? item_base[r - 1] : 0, count = item_base[r] - before_items;
      if (count == 0) continue;
      const int before_merges = r ? merge_base[r - 1] : 0, own_rows = merge_base[r] - before_merges;
      const int own_splits = count / own_rows, first_partial = items + before_items;
      const int tokens = in.table.prefix_len[start + r] + in.table.nodes[start + r], all_tiles = divide_up(tokens, 16);
      for (int split = 0; split < own_splits; ++split) {
        const int begin = all_tiles * split / own_splits * 16, end = min(all_tiles * (split + 1) / own_splits * 16, tokens);
        for (int row_tile = lane; row_tile < own_rows; row_tile += 32)
          in.items[items + before_items + split * own_rows + row_tile] = {
              start + r, row_tile, begin, end, first_partial + row_tile * own_splits + split, {}};
      }
      for (int i = lane; i < own_rows; i += 32)
        in.merges[merges + before_merges + i] = {start + r, i, first_partial + i * own_splits, own_splits};
    }
    items += item_base[kThreads - 1], merges += merge_base[kThreads - 1];
    __syncthreads();
  }
  if (warp == 0) {
    int nodes = 0;
    for (int request = lane; request < in.batch; request += 32) nodes += in.table.nodes[request];
    nodes = warp_sum(nodes);
    if (lane == 0) *in.header = {items, merges, nodes, chosen};
  }
}

}  // namespace

cudaError_t launch_plan(const PlanInput& input, cudaStream_t stream) {
  plan_kernel<<<1, kThreads, 0, stream>>>(input);
  return cudaGetLastError();
}

}  // namespace tpv
