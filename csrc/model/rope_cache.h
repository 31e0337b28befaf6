// See rope_cache.cu.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace tpv {

struct RopeCacheParams {
  const uint4* x;         // [nodes, hidden]; here and below 8 bf16 are a vector
  const uint4* down;      // [nodes, low_width + row]
  const uint4* queries;   // [shards, nodes, shard_heads, nope + rope]
  const float4* rotation; // [nodes, rope / 2]: cos, sin
  const int64_t* slots;   // [nodes]
  uint4* nope;            // [shards, nodes, shard_heads, nope]
  uint4* q;               // [nodes, shards * shard_heads, row]: the rope part is written
  uint4* pool;            // [slots, row]
  int64_t q_stride_node, q_stride_head, pool_stride_slot;  // in vectors, as the next three
  int32_t hidden, low, nope_width;
  int32_t nodes, shards, shard_heads;
  float eps, norm_eps;
};

cudaError_t launch_rope_cache(const RopeCacheParams& params, cudaStream_t stream);

}  // namespace tpv
