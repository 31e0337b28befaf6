// The C ABI of the kernels: check, lay out the workspace, launch.
#include <algorithm>
#include <cmath>

#include "check.h"
#include "params.h"
#include "verify/combine.h"
#include "verify/flash.h"
#include "verify/planner.h"

namespace tpv {
namespace {

constexpr int64_t kFixedLength = 64;  // tiles of 16 tokens a split when batch_invariant

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

tpv_status check_requests(const tpv_verify_requests& r) {
  TPV_TRY(check_range("batch", r.batch, 1, 4096));
  for (const Pointer& p : {Pointer{"slots", r.slots}, {"slot_begin", r.slot_begin}, {"prefix_len", r.prefix_len},
                           {"nodes", r.nodes}, {"node_begin", r.node_begin}, {"word_begin", r.word_begin}})
    TPV_TRY(check_aligned(p.name, p.value, 4));
  return check_aligned("words", r.words, 8);
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

// The most work items that the planner makes within these limits. What it counts, row tiles of split_heads heads times
// splits, exceeds kMaxWaves waves only if no request is split; a tile of the rank's own heads covers as many rows or more.
int64_t most_items(const tpv_verify_workspace_params& p, int multiprocessors) {
  const tpv_verify_split& s = p.split;
  const int64_t row_tiles = divide_up(int64_t(p.max_nodes) * s.heads, s.tile_rows);
  if (s.batch_invariant) {
    const int64_t tokens = p.max_tokens + int64_t(p.max_batch) * p.max_nodes;
    return row_tiles * (tokens / (16 * kFixedLength) + 2 * int64_t(p.max_batch));
  }
  const int64_t counted_tiles = divide_up(int64_t(p.max_nodes) * s.split_heads, s.split_tile_rows);
  const int64_t counted = std::max<int64_t>(int64_t(kMaxWaves) * multiprocessors, p.max_batch * counted_tiles);
  // ceil(n heads / tile) <= ratio ceil(n split_heads / split_tile) for every n
  const int64_t ratio = divide_up(int64_t(s.heads) * s.split_tile_rows, int64_t(s.split_heads) * s.tile_rows);
  return counted * ratio;
}

RequestTable table_of(const tpv_verify_requests& r) {
  return {r.slots, r.slot_begin, r.prefix_len, r.nodes, r.node_begin, r.word_begin, r.words};
}

tpv_status check_common(const tpv_verify_split& split, const tpv_verify_requests& requests, void* workspace, uint64_t bytes) {
  TPV_TRY(check_split(split));
  TPV_TRY(check_requests(requests));
  TPV_TRY(check_aligned("workspace", workspace, 256));
  return check_range("workspace_bytes", int64_t(bytes), Workspace::bytes_of(4, split.tile_rows), INT64_MAX);
}

}  // namespace
}  // namespace tpv

using namespace tpv;

extern "C" const char* tpv_cuda_archs(void) { return "90,120"; }

extern "C" tpv_status tpv_verify_workspace_size(tpv_verify_workspace_params* params) {
  TPV_TRY(check_struct(params));
  TPV_TRY(check_split(params->split));
  TPV_TRY(check_range("max_batch", params->max_batch, 1, 4096));
  TPV_TRY(check_range("max_nodes", params->max_nodes, 1, TPV_MAX_NODES));
  TPV_TRY(check_range("max_tokens", params->max_tokens, 0, INT32_MAX));
  int multiprocessors;
  TPV_TRY(count_multiprocessors(multiprocessors));
  params->bytes = Workspace::bytes_of(divide_up(most_items(*params, multiprocessors), 4) * 4, params->split.tile_rows);
  return TPV_OK;
}

extern "C" tpv_status tpv_verify_plan(const tpv_verify_plan_params* params) {
  TPV_TRY(check_struct(params));
  TPV_TRY(check_common(params->split, params->requests, params->workspace, params->workspace_bytes));
  const tpv_verify_split& s = params->split;
  const Workspace workspace(params->workspace, params->workspace_bytes, s.tile_rows);
  PlanInput input = {table_of(params->requests), workspace.header(), workspace.work(), workspace.merges()};
  input.batch = params->requests.batch;
  input.heads = s.heads, input.tile_rows = s.tile_rows;
  input.split_heads = s.split_heads, input.split_tile_rows = s.split_tile_rows;
  TPV_TRY(count_multiprocessors(input.blocks));
  input.fixed_length = s.batch_invariant ? kFixedLength : 0;
  return check_cuda("plan kernel", launch_plan(input, static_cast<cudaStream_t>(params->stream)));
}

extern "C" tpv_status tpv_verify_run(const tpv_verify_run_params* params) {
  TPV_TRY(check_struct(params));
  const tpv_verify_run_params& r = *params;
  TPV_TRY(check_common(r.split, r.requests, r.workspace, r.workspace_bytes));
  TPV_TRY(check_aligned("q", r.q, 4));
  TPV_TRY(check_multiple("q_stride_node", r.q_stride_node, 2));
  TPV_TRY(check_multiple("q_stride_head", r.q_stride_head, 2));
  TPV_TRY(check_aligned("kv", r.kv, 16));
  TPV_TRY(check_multiple("kv_stride_slot", r.kv_stride_slot, 8));
  TPV_TRY(check_range("kv_stride_slot", r.kv_stride_slot, kRow, INT32_MAX));
  TPV_TRY(check_aligned("out", r.out, 8));
  TPV_TRY(check_multiple("out_stride_node", r.out_stride_node, 4));
  TPV_TRY(check_multiple("out_stride_head", r.out_stride_head, 4));
  TPV_TRY(check_aligned("lse", r.lse, 4));
  TPV_TRY(check_range("out_nodes", r.out_nodes, 1, int64_t(r.requests.batch) * TPV_MAX_NODES));
  if (!std::isfinite(r.softmax_scale))
    return fail(TPV_INVALID_ARGUMENT, "softmax_scale: expected a finite number, got %g", r.softmax_scale);
  int multiprocessors;
  TPV_TRY(count_multiprocessors(multiprocessors));

  const int rows = r.split.tile_rows;
  const Workspace workspace(r.workspace, r.workspace_bytes, rows);
  VerifyParams p = {r.q, r.kv, r.out, r.lse, workspace.partial_out(), workspace.partial_lse(rows)};
  p.header = workspace.header(), p.items = workspace.work(), p.merges = workspace.merges();
  p.table = table_of(r.requests);
  p.q_stride_node = r.q_stride_node, p.q_stride_head = r.q_stride_head;
  p.out_stride_node = r.out_stride_node, p.out_stride_head = r.out_stride_head;
  p.lse_stride_node = r.lse_stride_node;
  p.scale_log2 = r.softmax_scale * 1.4426950408889634f;
  p.kv_stride_bytes = static_cast<uint32_t>(r.kv_stride_slot * 2);
  p.heads = r.split.heads, p.out_nodes = r.out_nodes;

  const auto stream = static_cast<cudaStream_t>(r.stream);
  const auto launch_flash = rows == 16 ? launch_flash_16 : rows == 32 ? launch_flash_32 : launch_flash_64;
  TPV_TRY(check_cuda("flash kernel", launch_flash(p, multiprocessors, stream)));
  return check_cuda("combine kernel", launch_combine(p, rows, multiprocessors, stream));
}
