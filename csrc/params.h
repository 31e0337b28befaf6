// What the kernels read. Device pointers, shapes beside them; capi.cu fills them from the C ABI's structs.
#pragma once
#include <cstdint>

namespace tpv {

constexpr int kLatent = 512;              // kv_lora_rank: V is this much of a row
constexpr int kRope = 64;                 // qk_rope_head_dim
constexpr int kRow = kLatent + kRope;     // elements of a row of q or of the pool
constexpr int kSharedLimit = 101376;      // bytes of shared memory a block may have on sm_120; kept on sm_90 too

// The requests of a step, updated in place between launches.
struct RequestTable {
  const int32_t* slots;        // [sum of tokens]: a request's prefix slots, then its tree slots
  const int32_t* slot_begin;   // [batch]: where a request's slots start
  const int32_t* prefix_len;   // [batch]: committed tokens S
  const int32_t* nodes;        // [batch]: tree nodes n; 0 for a padded request
  const int32_t* node_begin;   // [batch]: first row of q, out and lse, in nodes
  const int32_t* word_begin;   // [batch]: first of the request's ancestor words
  const uint64_t* words;       // [sum of n * ceil(n/64)]: bit j of row i, node i sees node j
};

// One block's piece: a row tile of a request against some of its tokens. Written by the planner, and all that a block needs
// before it can fetch: what is cold in the caches costs a block as many round trips as loads that wait for another.
struct alignas(16) WorkItem {
  int32_t slots;       // in the slot table, of the first token
  int32_t tokens;      // 1 or more
  int32_t committed;   // of these, so many are prefix; the rest are tree nodes. Below 0: the first is node -committed
  int32_t row_tile;    // first row is row_tile * rows of a tile
  int32_t nodes;       // of the request
  int32_t node_begin;  // its first row of q, in nodes
  int32_t word_begin;  // its first ancestor word
  int32_t partial;     // index of the partial result
};

// Rows whose partials are merged: `count` consecutive partials from `first`, one a split.
struct alignas(16) MergeItem {
  int32_t first, count;
  int32_t row_tile;
  int32_t nodes, node_begin;  // of the request
  int32_t pad[3];
};

struct PlanHeader {
  int32_t num_items, num_merges;
  int32_t num_nodes;  // of all requests
  int32_t alone;      // items, the first ones, that are all that their block does; the other blocks share the rest
  int32_t most_splits;  // of a request
};

struct VerifyParams {
  const void* q;          // [nodes, heads, 576]
  const void* kv;         // [slots, 576]
  void* out;              // [nodes, heads, 512]
  float* lse;             // [nodes, heads], natural log
  float* partial_out;     // [partials, tile rows, 512], normalised, in the order of partial.cuh
  float* partial_lse;     // [partials, tile rows], log2
  const PlanHeader* header;
  const WorkItem* items;
  const MergeItem* merges;
  RequestTable table;
  int64_t q_stride_node, q_stride_head;      // elements
  int64_t out_stride_node, out_stride_head;  // elements
  int64_t lse_stride_node;                   // elements; heads are contiguous
  float scale_log2;                          // softmax_scale * log2(e)
  uint32_t kv_stride_bytes;                  // from slot to slot
  int32_t heads;
  uint32_t heads_reciprocal;                 // see heads.cuh
  int32_t out_nodes;                         // rows of out and lse, in nodes: those beyond the plan's are cleared
};

}  // namespace tpv
