// One node of a step, for kernels that give a block to each.
#pragma once
#include "../params.h"

namespace tpv {

struct Node {
  const int32_t* slots;   // of its request: prefix, then tree
  const uint64_t* words;  // its ancestors
  int prefix, tokens;     // of its request: committed; all

  __device__ bool sees(int token) const {
    const int other = token - prefix;
    return token < prefix || (token < tokens && (words[other / 64] >> other % 64 & 1));
  }
};

// The request that has row `row` of q, out and lse (in nodes), or -1 for a padded row. The whole block asks together.
__device__ inline int request_of(const RequestTable& table, int batch, int row) {
  __shared__ int found;
  if (threadIdx.x == 0) found = -1;
  __syncthreads();
  for (int i = threadIdx.x; i < batch; i += blockDim.x) {
    const int node = row - table.node_begin[i];
    if (node >= 0 && node < table.nodes[i]) found = i;
  }
  __syncthreads();
  return found;
}

__device__ inline Node node_at(const RequestTable& table, int request, int row) {
  const int nodes = table.nodes[request], prefix = table.prefix_len[request];
  const int64_t first_word = (int64_t)(row - table.node_begin[request]) * ((nodes + 63) / 64);
  return {table.slots + table.slot_begin[request], table.words + table.word_begin[request] + first_word, prefix, prefix + nodes};
}

__device__ inline float warp_sum(float value) {
  for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

__device__ inline float warp_max(float value) {
  for (int offset = 16; offset; offset /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
  return value;
}

}  // namespace tpv
