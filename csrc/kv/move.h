// See move.cu.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace tpv {

struct MoveParams {
  char* pool;              // [layers, slots, row]
  const int32_t* src;      // [count] slots
  const int32_t* dst;      // [count] slots
  uint64_t* hashes;        // [layers, count], or null
  int64_t layer_stride, slot_stride;  // bytes
  int32_t row_vectors;     // 16 bytes each
  int32_t layers, count;
};

cudaError_t launch_move(const MoveParams& params, cudaStream_t stream);

}  // namespace tpv
