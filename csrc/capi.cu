// The C ABI of the kernels: check, lay out the workspace, launch.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <utility>

#include "check.h"
#include "kv/move.h"
#include "model/rope_cache.h"
#include "params.h"
#include "verify/combine.h"
#include "verify/fetch.h"
#include "verify/flash.h"
#include "verify/heads.cuh"
#include "verify/ladder.h"
#include "verify/planner.h"

namespace tpv {
namespace {

constexpr int64_t kFixedLength = 64;  // tiles of 16 tokens a split when batch_invariant
constexpr float kLog2e = 1.4426950408889634f;

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

tpv_status check_tile(const char* name, int rows) {
  if (rows == 16 || rows == 32 || rows == 64) return TPV_OK;
  return fail(TPV_INVALID_ARGUMENT, "%s: expected 16, 32 or 64, got %d", name, rows);
}

tpv_status check_split(const tpv_verify_split& s) {
  TPV_TRY(check_range("heads", s.heads, 1, TPV_MAX_HEADS));
  TPV_TRY(check_tile("tile_rows", s.tile_rows));
  TPV_TRY(check_range("split_heads", s.split_heads, 1, TPV_MAX_HEADS));
  TPV_TRY(check_tile("split_tile_rows", s.split_tile_rows));
  return check_range("batch_invariant", s.batch_invariant, 0, 1);
}

tpv_status check_limits(int batch, const char* batch_name, int max_nodes, int64_t max_tokens) {
  TPV_TRY(check_range(batch_name, batch, 1, 4096));
  TPV_TRY(check_range("max_nodes", max_nodes, 1, TPV_MAX_NODES));
  return check_range("max_tokens", max_tokens, 0, TPV_MAX_TOKENS);
}

tpv_status check_requests(const tpv_verify_requests& r) {
  TPV_TRY(check_limits(r.batch, "batch", r.max_nodes, r.max_tokens));
  for (const Pointer& p : {Pointer{"slots", r.slots}, {"slot_begin", r.slot_begin}, {"prefix_len", r.prefix_len},
                           {"nodes", r.nodes}, {"node_begin", r.node_begin}, {"word_begin", r.word_begin}})
    TPV_TRY(check_aligned(p.name, p.value, 4));
  return check_aligned("words", r.words, 8);
}

tpv_status check_tables(const tpv_verify_requests& r) {
  return check_device_memory({{"slots", r.slots}, {"slot_begin", r.slot_begin}, {"prefix_len", r.prefix_len},
                              {"nodes", r.nodes}, {"node_begin", r.node_begin}, {"word_begin", r.word_begin},
                              {"words", r.words}});
}

tpv_status count_multiprocessors(int& count) {
  int device;
  TPV_TRY(check_cuda("cudaGetDevice", cudaGetDevice(&device)));
  return check_cuda("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
}

// Where the plan and the partials lie.
struct Workspace {
  char* base;
  int64_t items;  // as many as there is room for; a merge and a partial result each at most

  static int64_t bytes_of(int64_t items, int tile_rows) {
    return 256 + items * (sizeof(WorkItem) + sizeof(MergeItem) + tile_rows * (kLatent + 4) * sizeof(float));
  }
  Workspace(void* base, uint64_t bytes, int tile_rows)
      : base(static_cast<char*>(base)), items((int64_t(bytes) - 256) / (bytes_of(1, tile_rows) - 256) / 4 * 4) {}

  PlanHeader* header() const { return reinterpret_cast<PlanHeader*>(base); }
  WorkItem* work() const { return reinterpret_cast<WorkItem*>(base + 256); }
  MergeItem* merges() const { return reinterpret_cast<MergeItem*>(work() + items); }
  float* partial_out() const { return reinterpret_cast<float*>(merges() + items); }
  float* partial_lse(int tile_rows) const { return partial_out() + items * tile_rows * kLatent; }
};

// The most work items that the planner makes for requests within their limits, one a block at least. What it counts, row
// tiles of split_heads heads times splits, exceeds kMaxWaves waves only if no request is split; a tile of the rank's own
// heads covers as many rows or more.
int64_t most_items(const tpv_verify_split& s, int batch, int max_nodes, int64_t max_tokens, int multiprocessors) {
  const int64_t row_tiles = divide_up(int64_t(max_nodes) * s.heads, s.tile_rows);
  if (s.batch_invariant) {
    const int64_t tokens = max_tokens + int64_t(batch) * max_nodes;
    return std::max<int64_t>(multiprocessors, row_tiles * (tokens / (16 * kFixedLength) + 2 * int64_t(batch)));
  }
  const int64_t counted_tiles = divide_up(int64_t(max_nodes) * s.split_heads, s.split_tile_rows);
  const int64_t counted = std::max<int64_t>(int64_t(kMaxWaves) * multiprocessors, batch * counted_tiles);
  // ceil(n heads / tile) <= ratio ceil(n split_heads / split_tile) for every n
  const int64_t ratio = divide_up(int64_t(s.heads) * s.split_tile_rows, int64_t(s.split_heads) * s.tile_rows);
  return counted * ratio;
}

int64_t workspace_bytes(const tpv_verify_split& s, int batch, int max_nodes, int64_t max_tokens, int multiprocessors) {
  const int64_t items = most_items(s, batch, max_nodes, max_tokens, multiprocessors);
  return Workspace::bytes_of(divide_up(items, 4) * 4, s.tile_rows);
}

RequestTable table_of(const tpv_verify_requests& r) {
  return {r.slots, r.slot_begin, r.prefix_len, r.nodes, r.node_begin, r.word_begin, r.words};
}

tpv_status check_workspace(const tpv_verify_split& s, const tpv_verify_requests& r, uint64_t bytes, int multiprocessors) {
  const int64_t needed = workspace_bytes(s, r.batch, r.max_nodes, r.max_tokens, multiprocessors);
  if (bytes >= static_cast<uint64_t>(needed)) return TPV_OK;
  return fail(TPV_INVALID_ARGUMENT, "workspace_bytes: expected at least %lld for these limits, got %llu", (long long)needed,
              (unsigned long long)bytes);
}

tpv_status check_workspace_pointer(const tpv_verify_split& split, void* workspace, uint64_t bytes) {
  TPV_TRY(check_aligned("workspace", workspace, 256));
  if (bytes >= uint64_t(Workspace::bytes_of(4, split.tile_rows))) return TPV_OK;
  return fail(TPV_INVALID_ARGUMENT, "workspace_bytes: expected what tpv_verify_workspace_size says, got %llu", (unsigned long long)bytes);
}

// The flash kernel keeps maxima of unscaled scores, which a scale must leave where they are.
tpv_status check_scale(const tpv_verify_run_params& r) {
  const bool positive = r.kernel == TPV_FLASH;
  if (std::isfinite(r.softmax_scale * kLog2e) && (r.softmax_scale > 0 || !positive)) return TPV_OK;
  return fail(TPV_INVALID_ARGUMENT, "softmax_scale: expected a number from %s to %g for this kernel, got %g",
              positive ? "above 0" : "as far below 0", double(FLT_MAX / kLog2e), r.softmax_scale);
}

// q, kv, out and lse, whose elements have `size` bytes.
tpv_status check_tensors(const tpv_verify_run_params& r, int64_t size) {
  TPV_TRY(check_aligned("q", r.q, 16));
  TPV_TRY(check_multiple("q_stride_node", r.q_stride_node, 16 / size));
  TPV_TRY(check_multiple("q_stride_head", r.q_stride_head, 16 / size));
  TPV_TRY(check_aligned("kv", r.kv, 16));
  TPV_TRY(check_multiple("kv_stride_slot", r.kv_stride_slot, 16 / size));
  TPV_TRY(check_range("kv_stride_slot", r.kv_stride_slot, kRow, UINT32_MAX / size));
  TPV_TRY(check_aligned("out", r.out, 8));
  TPV_TRY(check_multiple("out_stride_node", r.out_stride_node, 8 / size));
  TPV_TRY(check_multiple("out_stride_head", r.out_stride_head, 8 / size));
  TPV_TRY(check_aligned("lse", r.lse, 4));
  TPV_TRY(check_multiple("lse_stride_node", r.lse_stride_node, 1));
  TPV_TRY(check_range("out_nodes", r.out_nodes, 1, int64_t(r.requests.batch) * TPV_MAX_NODES));
  return check_scale(r);
}

VerifyParams params_of(const tpv_verify_run_params& r, int64_t size) {
  VerifyParams p = {};
  p.q = r.q, p.kv = r.kv, p.out = r.out, p.lse = r.lse;
  p.table = table_of(r.requests);
  p.q_stride_node = r.q_stride_node, p.q_stride_head = r.q_stride_head;
  p.out_stride_node = r.out_stride_node, p.out_stride_head = r.out_stride_head;
  p.lse_stride_node = r.lse_stride_node;
  p.scale_log2 = r.softmax_scale * kLog2e;
  p.kv_stride_bytes = static_cast<uint32_t>(r.kv_stride_slot * size);
  p.heads = r.split.heads, p.heads_reciprocal = heads_reciprocal(p.heads);
  p.out_nodes = r.out_nodes;
  return p;
}

}  // namespace
}  // namespace tpv

using namespace tpv;

extern "C" const char* tpv_cuda_archs(void) { return "90,120"; }

extern "C" tpv_status tpv_verify_workspace_size(tpv_verify_workspace_params* params) {
  TPV_TRY(check_struct(params));
  TPV_TRY(check_split(params->split));
  TPV_TRY(check_limits(params->max_batch, "max_batch", params->max_nodes, params->max_tokens));
  int multiprocessors;
  TPV_TRY(count_multiprocessors(multiprocessors));
  params->bytes = workspace_bytes(params->split, params->max_batch, params->max_nodes, params->max_tokens, multiprocessors);
  return TPV_OK;
}

extern "C" tpv_status tpv_fetch(const tpv_fetch_params* params) {
  TPV_TRY(check_struct(params));
  const tpv_fetch_params& f = *params;
  TPV_TRY(check_range("capacity", f.capacity, 1, INT32_MAX));
  TPV_TRY(check_aligned("target", f.target, 16));
  if (f.source == nullptr || reinterpret_cast<uintptr_t>(f.source) % alignof(tpv_fetch_source))
    return fail(TPV_INVALID_ARGUMENT, "source: expected page-locked memory of the host, aligned to 8 bytes, got %p", f.source);
  TPV_TRY(check_device_memory({{"target", f.target}}));
  TPV_TRY(check_locked_memory("source", f.source));
  const FetchParams p = {f.source, static_cast<uint4*>(f.target), f.capacity};
  return check_cuda("fetch kernel", launch_fetch(p, static_cast<cudaStream_t>(f.stream)));
}

extern "C" tpv_status tpv_verify_plan(const tpv_verify_plan_params* params) {
  TPV_TRY(check_struct(params));
  const tpv_verify_split& s = params->split;
  TPV_TRY(check_split(s));
  TPV_TRY(check_requests(params->requests));
  if (params->split_tile_rows) TPV_TRY(check_aligned("split_tile_rows", params->split_tile_rows, 4));
  TPV_TRY(check_workspace_pointer(s, params->workspace, params->workspace_bytes));
  int multiprocessors;
  TPV_TRY(count_multiprocessors(multiprocessors));
  TPV_TRY(check_workspace(s, params->requests, params->workspace_bytes, multiprocessors));
  for (int rows = 16; rows <= 64 && params->split_tile_rows; rows *= 2) {
    tpv_verify_split any = s;
    any.split_tile_rows = rows;
    TPV_TRY(check_workspace(any, params->requests, params->workspace_bytes, multiprocessors));
  }
  TPV_TRY(check_tables(params->requests));
  TPV_TRY(check_device_memory({{"workspace", params->workspace}}));
  if (params->split_tile_rows) TPV_TRY(check_device_memory({{"split_tile_rows", params->split_tile_rows}}));

  const Workspace workspace(params->workspace, params->workspace_bytes, s.tile_rows);
  PlanInput input = {table_of(params->requests), workspace.header(), workspace.work(), workspace.merges()};
  input.batch = params->requests.batch;
  input.heads = s.heads, input.tile_rows = s.tile_rows;
  input.split_heads = s.split_heads, input.split_tile_rows = s.split_tile_rows;
  input.split_tile_rows_now = params->split_tile_rows;
  input.blocks = multiprocessors;
  input.fixed_length = s.batch_invariant ? kFixedLength : 0;
  return check_cuda("plan kernel", launch_plan(input, static_cast<cudaStream_t>(params->stream)));
}

extern "C" tpv_status tpv_verify_run(const tpv_verify_run_params* params) {
  TPV_TRY(check_struct(params));
  const tpv_verify_run_params& r = *params;
  TPV_TRY(check_range("kernel", r.kernel, TPV_FLASH, TPV_NAIVE));
  const bool planned = r.kernel == TPV_FLASH;
  const int64_t size = planned ? 2 : 4;  // bytes of an element
  if (r.dtype != (planned ? TPV_BFLOAT16 : TPV_FLOAT32))
    return fail(TPV_INVALID_ARGUMENT, "dtype: expected %s for this kernel, got %d",
                planned ? "TPV_BFLOAT16" : "TPV_FLOAT32", r.dtype);
  if (planned) {
    TPV_TRY(check_split(r.split));
    TPV_TRY(check_workspace_pointer(r.split, r.workspace, r.workspace_bytes));
  }
  TPV_TRY(check_range("heads", r.split.heads, 1, TPV_MAX_HEADS));
  TPV_TRY(check_requests(r.requests));
  TPV_TRY(check_tensors(r, size));
  int multiprocessors;
  TPV_TRY(count_multiprocessors(multiprocessors));
  if (planned) {
    TPV_TRY(check_workspace(r.split, r.requests, r.workspace_bytes, multiprocessors));
    TPV_TRY(check_device_memory({{"workspace", r.workspace}}));
  }
  TPV_TRY(check_tables(r.requests));
  TPV_TRY(check_device_memory({{"q", r.q}, {"kv", r.kv}, {"out", r.out}, {"lse", r.lse}}));

  VerifyParams p = params_of(r, size);
  const auto stream = static_cast<cudaStream_t>(r.stream);
  if (r.kernel == TPV_NAIVE) return check_cuda("naive kernel", launch_naive(p, r.requests.batch, stream));
  if (r.kernel == TPV_FLASH_FP32) return check_cuda("fp32 kernel", launch_flash_fp32(p, r.requests.batch, stream));
  const int rows = r.split.tile_rows;
  const Workspace workspace(r.workspace, r.workspace_bytes, rows);
  p.partial_out = workspace.partial_out(), p.partial_lse = workspace.partial_lse(rows);
  p.header = workspace.header(), p.items = workspace.work(), p.merges = workspace.merges();
  const auto launch_flash = rows == 16 ? launch_flash_16 : rows == 32 ? launch_flash_32 : launch_flash_64;
  TPV_TRY(check_cuda("flash kernel", launch_flash(p, multiprocessors, stream)));
  return check_cuda("combine kernel", launch_combine(p, rows, multiprocessors, stream));
}

extern "C" tpv_status tpv_move_rows(const tpv_move_rows_params* params) {
  TPV_TRY(check_struct(params));
  const tpv_move_rows_params& m = *params;
  TPV_TRY(check_range("layers", m.layers, 1, 65535));
  TPV_TRY(check_range("count", m.count, 1, INT32_MAX));
  TPV_TRY(check_range("row_bytes", m.row_bytes, 16, 1 << 20));
  TPV_TRY(check_multiple("row_bytes", m.row_bytes, 16));
  TPV_TRY(check_range("slot_stride", m.slot_stride, m.row_bytes, INT64_MAX));
  TPV_TRY(check_multiple("slot_stride", m.slot_stride, 16));
  TPV_TRY(check_multiple("layer_stride", m.layer_stride, 16));
  TPV_TRY(check_aligned("pool", m.pool, 16));
  TPV_TRY(check_aligned("src", m.src, 4));
  TPV_TRY(check_aligned("dst", m.dst, 4));
  if (m.hashes) TPV_TRY(check_aligned("hashes", m.hashes, 8));
  TPV_TRY(check_device_memory({{"pool", m.pool}, {"src", m.src}, {"dst", m.dst}}));
  if (m.hashes) TPV_TRY(check_device_memory({{"hashes", m.hashes}}));

  const MoveParams p = {static_cast<char*>(m.pool), m.src, m.dst, m.hashes, m.layer_stride, m.slot_stride,
                        static_cast<int32_t>(m.row_bytes / 16), m.layers, m.count};
  return check_cuda("move kernel", launch_move(p, static_cast<cudaStream_t>(m.stream)));
}

extern "C" tpv_status tpv_rope_cache(const tpv_rope_cache_params* params) {
  TPV_TRY(check_struct(params));
  const tpv_rope_cache_params& r = *params;
  TPV_TRY(check_range("nodes", r.nodes, 1, 65535));
  TPV_TRY(check_range("shards", r.shards, 1, TPV_MAX_HEADS));
  TPV_TRY(check_range("shard_heads", r.shard_heads, 1, TPV_MAX_HEADS / r.shards));
  for (const auto& [name, width] : {std::pair{"hidden", r.hidden}, {"low_width", r.low_width}, {"nope_width", r.nope_width}}) {
    TPV_TRY(check_range(name, width, 8, 1 << 20));
    TPV_TRY(check_multiple(name, width, 8));
  }
  TPV_TRY(check_range("nope_width", r.nope_width, 8, 1 << 19));  // heads of more would be more blocks than a grid has
  TPV_TRY(check_multiple("q_stride_node", r.q_stride_node, 8));
  TPV_TRY(check_multiple("q_stride_head", r.q_stride_head, 8));
  TPV_TRY(check_multiple("pool_stride_slot", r.pool_stride_slot, 8));
  TPV_TRY(check_range("pool_stride_slot", r.pool_stride_slot, kRow, INT64_MAX));
  const Pointer arrays[] = {{"x", r.x}, {"down", r.down}, {"queries", r.queries}, {"rotation", r.rotation},
                            {"nope", r.nope}, {"q", r.q}, {"pool", r.pool}};
  for (const Pointer& p : arrays) TPV_TRY(check_aligned(p.name, p.value, 16));
  TPV_TRY(check_aligned("slots", r.slots, 8));
  for (const Pointer& p : arrays) TPV_TRY(check_device_memory({p}));
  TPV_TRY(check_device_memory({{"slots", r.slots}}));

  RopeCacheParams p = {};
  p.x = static_cast<const uint4*>(r.x), p.down = static_cast<const uint4*>(r.down);
  p.queries = static_cast<const uint4*>(r.queries), p.rotation = reinterpret_cast<const float4*>(r.rotation);
  p.slots = r.slots;
  p.nope = static_cast<uint4*>(r.nope), p.q = static_cast<uint4*>(r.q), p.pool = static_cast<uint4*>(r.pool);
  p.q_stride_node = r.q_stride_node / 8, p.q_stride_head = r.q_stride_head / 8, p.pool_stride_slot = r.pool_stride_slot / 8;
  p.hidden = r.hidden / 8, p.low = r.low_width / 8, p.nope_width = r.nope_width / 8;
  p.nodes = r.nodes, p.shards = r.shards, p.shard_heads = r.shard_heads;
  p.eps = r.eps, p.norm_eps = r.norm_eps;
  return check_cuda("rope and cache kernel", launch_rope_cache(p, static_cast<cudaStream_t>(r.stream)));
}
