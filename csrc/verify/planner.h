// The planner's input; see planner.cu.
#pragma once
#include <cuda_runtime.h>

#include "../params.h"

namespace tpv {

// The most blocks, in waves of all SMs, that the planner cuts a step into where rows alone do not need more.
constexpr int kMaxWaves = 3;

struct PlanInput {
  RequestTable table;
  PlanHeader* header;
  WorkItem* items;
  MergeItem* merges;
  int32_t batch;
  int32_t heads, tile_rows;              // of this rank's kernel
  int32_t split_heads, split_tile_rows;  // that the cost counts: the same at every tp, and so are the splits
  const int32_t* split_tile_rows_now;    // on the device, in the other's place; or null
  int32_t blocks;                        // that run at once
  int32_t fixed_length;                  // tiles a split, whatever else is in the batch; 0: chosen for the batch
};

cudaError_t launch_plan(const PlanInput& input, cudaStream_t stream);

}  // namespace tpv
