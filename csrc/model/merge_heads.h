// See merge_heads.cu.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace tpv {

struct MergeHeadsParams {
  const uint4* values;  // [heads, nodes, width]; 16 bytes are a vector
  uint4* merged;        // [nodes, heads, width]
  int32_t heads, nodes, width;
};

cudaError_t launch_merge_heads(const MergeHeadsParams& params, cudaStream_t stream);

}  // namespace tpv
