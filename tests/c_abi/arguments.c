/* Each wrong argument, alone among good ones: a status and a message, and the process goes on. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "check.h"

static int refused = 0;

/* `change` to a copy `p` of `good` makes `call` refuse with `message`. */
#define REFUSE(type, good, call, change, message) \
    do {                                          \
        type p = good;                            \
        change;                                   \
        expect_refused(call(&p), message);        \
        ++refused;                                \
    } while (0)

static const tpv_verify_split split = {8, 16, 8, 16, 0, 0};

static tpv_verify_requests good_requests(char* memory) {
    tpv_verify_requests r = {0};
    int32_t* counts = (int32_t*)memory;
    r.slots = counts, r.slot_begin = counts, r.prefix_len = counts, r.nodes = counts, r.node_begin = counts;
    r.word_begin = counts, r.words = (uint64_t*)memory;
    r.batch = 2, r.max_nodes = 16, r.max_tokens = 64;
    return r;
}

static tpv_verify_plan_params good_plan(char* memory, char* workspace, uint64_t bytes) {
    tpv_verify_plan_params p = {0};
    p.struct_size = sizeof p, p.split = split, p.requests = good_requests(memory);
    p.workspace = workspace, p.workspace_bytes = bytes;
    return p;
}

static tpv_verify_run_params good_run(int kernel, char* memory, char* workspace, uint64_t bytes) {
    tpv_verify_run_params p = {0};
    p.struct_size = sizeof p, p.split = split, p.requests = good_requests(memory);
    p.workspace = workspace, p.workspace_bytes = bytes;
    p.kernel = kernel, p.dtype = kernel == TPV_FLASH ? TPV_BFLOAT16 : TPV_FLOAT32;
    p.q = memory, p.kv = memory, p.out = memory, p.lse = (float*)memory;
    p.q_stride_node = 8 * 576, p.q_stride_head = 576, p.kv_stride_slot = 576;
    p.out_stride_node = 8 * 512, p.out_stride_head = 512, p.lse_stride_node = 8;
    p.out_nodes = 32, p.softmax_scale = 0.1f;
    return p;
}

static tpv_move_rows_params good_move(char* memory) {
    tpv_move_rows_params p = {0};
    p.struct_size = sizeof p, p.pool = memory, p.src = (int32_t*)memory, p.dst = (int32_t*)memory;
    p.hashes = (uint64_t*)memory;
    p.layer_stride = 1152 * 4, p.slot_stride = 1152, p.row_bytes = 1152, p.layers = 1, p.count = 1;
    return p;
}

static tpv_rope_cache_params good_rope(char* memory) {
    tpv_rope_cache_params p = {0};
    p.struct_size = sizeof p, p.x = memory, p.down = memory, p.queries = memory, p.rotation = (float*)memory;
    p.slots = (int64_t*)memory, p.nope = memory, p.q = memory, p.pool = memory;
    p.q_stride_node = 576, p.q_stride_head = 576, p.pool_stride_slot = 576;
    p.nodes = 1, p.hidden = 64, p.low_width = 64, p.nope_width = 128, p.shards = 1, p.shard_heads = 1;
    return p;
}

static tpv_fetch_params good_fetch(char* memory, const void* source) {
    tpv_fetch_params p = {0};
    p.struct_size = sizeof p, p.source = source, p.target = memory, p.capacity = 4;
    return p;
}

#define FETCH(change, message) REFUSE(tpv_fetch_params, fetch, tpv_fetch, change, message)
#define SIZE(change, message) REFUSE(tpv_verify_workspace_params, size, tpv_verify_workspace_size, change, message)
#define PLAN(change, message) REFUSE(tpv_verify_plan_params, plan, tpv_verify_plan, change, message)
#define RUN(change, message) REFUSE(tpv_verify_run_params, run, tpv_verify_run, change, message)
#define FP32(change, message) REFUSE(tpv_verify_run_params, fp32, tpv_verify_run, change, message)
#define MOVE(change, message) REFUSE(tpv_move_rows_params, move, tpv_move_rows, change, message)
#define ROPE(change, message) REFUSE(tpv_rope_cache_params, rope, tpv_rope_cache, change, message)

void check_arguments(void) {
    static _Alignas(256) char host[1 << 20];
    tpv_verify_workspace_params size = {0};
    const tpv_fetch_params fetch = good_fetch(host, host);
    const tpv_verify_plan_params plan = good_plan(host, host, sizeof host);
    const tpv_verify_run_params run = good_run(TPV_FLASH, host, host, sizeof host);
    const tpv_verify_run_params fp32 = good_run(TPV_FLASH_FP32, host, NULL, 0);
    const tpv_move_rows_params move = good_move(host);
    const tpv_rope_cache_params rope = good_rope(host);
    size.struct_size = sizeof size, size.split = split;
    size.max_batch = 2, size.max_nodes = 16, size.max_tokens = 64;

    expect_refused(tpv_verify_workspace_size(NULL), "params: expected a struct, got NULL");
    expect_refused(tpv_fetch(NULL), "params: expected a struct, got NULL");
    expect_refused(tpv_verify_plan(NULL), "params: expected a struct, got NULL");
    expect_refused(tpv_verify_run(NULL), "params: expected a struct, got NULL");
    expect_refused(tpv_move_rows(NULL), "params: expected a struct, got NULL");
    expect_refused(tpv_rope_cache(NULL), "params: expected a struct, got NULL");
    SIZE(p.struct_size = 0, "struct_size: expected ");
    PLAN(--p.struct_size, "struct_size: expected ");
    RUN(++p.struct_size, "struct_size: expected ");
    MOVE(p.struct_size = 8, "struct_size: expected ");

    SIZE(p.split.heads = 0, "heads: expected 1..128, got 0");
    SIZE(p.split.heads = 129, "heads: expected 1..128, got 129");
    SIZE(p.split.tile_rows = 8, "tile_rows: expected 16, 32 or 64, got 8");
    SIZE(p.split.split_heads = -1, "split_heads: expected 1..128");
    SIZE(p.split.split_tile_rows = 0, "split_tile_rows: expected 16, 32 or 64");
    SIZE(p.split.batch_invariant = 2, "batch_invariant: expected 0..1");
    SIZE(p.max_batch = 0, "max_batch: expected 1..4096");
    SIZE(p.max_nodes = 1025, "max_nodes: expected 1..1024");
    SIZE(p.max_tokens = -1, "max_tokens: expected 0..");
    SIZE(p.max_tokens = (int64_t)TPV_MAX_TOKENS + 1, "max_tokens: expected 0..1879048192, got 1879048193");

    FETCH(p.struct_size = 0, "struct_size: expected ");
    FETCH(p.capacity = 0, "capacity: expected 1..");
    FETCH(p.target = host + 8, "target: expected device memory aligned to 16 bytes");
    FETCH(p.source = NULL, "source: expected page-locked memory of the host, aligned to 8 bytes, got ");
    FETCH(p.source = (void*)(host + 4), "source: expected page-locked memory of the host, aligned to 8 bytes, got ");

    PLAN(p.split_tile_rows = (int32_t*)(host + 2), "split_tile_rows: expected device memory aligned to 4 bytes");
    PLAN(p.requests.batch = 0, "batch: expected 1..4096");
    PLAN(p.requests.max_nodes = 0, "max_nodes: expected 1..1024");
    PLAN(p.requests.slots = NULL, "slots: expected device memory aligned to 4 bytes");
    PLAN(p.requests.slot_begin = (int32_t*)(host + 2), "slot_begin: expected device memory aligned to 4 bytes");
    PLAN(p.requests.prefix_len = NULL, "prefix_len: ");
    PLAN(p.requests.nodes = NULL, "nodes: ");
    PLAN(p.requests.node_begin = NULL, "node_begin: ");
    PLAN(p.requests.word_begin = NULL, "word_begin: ");
    PLAN(p.requests.words = (uint64_t*)(host + 4), "words: expected device memory aligned to 8 bytes");
    PLAN(p.workspace = host + 16, "workspace: expected device memory aligned to 256 bytes");
    PLAN(p.workspace_bytes = 1000, "workspace_bytes: expected ");

    RUN(p.kernel = 3, "kernel: expected 0..2, got 3");
    RUN(p.dtype = TPV_FLOAT32, "dtype: expected TPV_BFLOAT16 for this kernel, got 2");
    FP32(p.dtype = TPV_BFLOAT16, "dtype: expected TPV_FLOAT32 for this kernel, got 1");
    RUN(p.dtype = 0, "dtype: ");
    FP32(p.split.heads = 200, "heads: expected 1..128, got 200");
    RUN(p.q = host + 2, "q: expected device memory aligned to 16 bytes");
    RUN(p.q_stride_node = 577, "q_stride_node: expected a multiple of 8, got 577");
    RUN(p.q_stride_head = -576, "q_stride_head: expected a multiple of 8, got -576");
    FP32(p.q_stride_head = -576, "q_stride_head: expected a multiple of 4, got -576");
    RUN(p.kv = host + 8, "kv: expected device memory aligned to 16 bytes");
    RUN(p.kv_stride_slot = 580, "kv_stride_slot: expected a multiple of 8, got 580");
    FP32(p.kv_stride_slot = 578, "kv_stride_slot: expected a multiple of 4, got 578");
    RUN(p.kv_stride_slot = 512, "kv_stride_slot: expected 576..");
    RUN(p.kv_stride_slot = (int64_t)1 << 31, "kv_stride_slot: expected 576..2147483647");
    RUN(p.out = host + 4, "out: expected device memory aligned to 8 bytes");
    RUN(p.out_stride_node = 2, "out_stride_node: expected a multiple of 4, got 2");
    FP32(p.out_stride_head = 513, "out_stride_head: expected a multiple of 2, got 513");
    RUN(p.lse = (float*)(host + 1), "lse: expected device memory aligned to 4 bytes");
    RUN(p.lse_stride_node = -8, "lse_stride_node: expected ");
    RUN(p.out_nodes = 0, "out_nodes: expected 1..2048, got 0");
    RUN(p.softmax_scale = INFINITY, "softmax_scale: expected a number from above 0 to 2.35866e+38 for this kernel, got inf");
    RUN(p.softmax_scale = NAN, "softmax_scale: expected a number from above 0");
    RUN(p.softmax_scale = 0, "softmax_scale: expected a number from above 0");
    RUN(p.softmax_scale = -0.1f, "softmax_scale: expected a number from above 0");
    RUN(p.softmax_scale = 3e38f, "softmax_scale: expected a number from above 0");
    FP32(p.softmax_scale = -INFINITY, "softmax_scale: expected a number from as far below 0 to 2.35866e+38");
    FP32(p.softmax_scale = 3e38f, "softmax_scale: expected a number from as far below 0");
    RUN(p.workspace = NULL, "workspace: expected device memory aligned to 256 bytes");

    MOVE(p.layers = 0, "layers: expected 1..65535, got 0");
    MOVE(p.count = 0, "count: expected 1..");
    MOVE(p.row_bytes = 8, "row_bytes: expected 16..");
    MOVE(p.row_bytes = 1000, "row_bytes: expected a multiple of 16, got 1000");
    MOVE(p.slot_stride = 576, "slot_stride: expected 1152..");
    MOVE(p.slot_stride = 1160, "slot_stride: expected a multiple of 16, got 1160");
    MOVE(p.layer_stride = -16, "layer_stride: expected a multiple of 16, got -16");
    MOVE(p.pool = host + 8, "pool: expected device memory aligned to 16 bytes");
    MOVE(p.src = NULL, "src: expected device memory aligned to 4 bytes");
    MOVE(p.dst = (int32_t*)(host + 1), "dst: expected device memory aligned to 4 bytes");
    MOVE(p.hashes = (uint64_t*)(host + 4), "hashes: expected device memory aligned to 8 bytes");

    ROPE(p.struct_size = 0, "struct_size: expected ");
    ROPE(p.nodes = 0, "nodes: expected 1..65535, got 0");
    ROPE(p.shards = 129, "shards: expected 1..128, got 129");
    ROPE(p.shards = 8; p.shard_heads = 17, "shard_heads: expected 1..16, got 17");
    ROPE(p.hidden = 7164, "hidden: expected a multiple of 8, got 7164");
    ROPE(p.low_width = 0, "low_width: expected 8..");
    ROPE(p.nope_width = -8, "nope_width: expected 8..");
    ROPE(p.nope_width = (1 << 19) + 8, "nope_width: expected 8..524288, got 524296");
    ROPE(p.q_stride_node = 580, "q_stride_node: expected a multiple of 8, got 580");
    ROPE(p.q_stride_head = -8, "q_stride_head: expected a multiple of 8, got -8");
    ROPE(p.pool_stride_slot = 580, "pool_stride_slot: expected a multiple of 8, got 580");
    ROPE(p.pool_stride_slot = 512, "pool_stride_slot: expected 576..");
    ROPE(p.x = host + 8, "x: expected device memory aligned to 16 bytes");
    ROPE(p.down = NULL, "down: expected device memory aligned to 16 bytes");
    ROPE(p.queries = host + 2, "queries: expected device memory aligned to 16 bytes");
    ROPE(p.rotation = NULL, "rotation: expected device memory aligned to 16 bytes");
    ROPE(p.slots = (int64_t*)(host + 4), "slots: expected device memory aligned to 8 bytes");
    ROPE(p.nope = host + 8, "nope: expected device memory aligned to 16 bytes");
    ROPE(p.q = NULL, "q: expected device memory aligned to 16 bytes");
    ROPE(p.pool = host + 4, "pool: expected device memory aligned to 16 bytes");

    /* Nothing left to refuse but the memory, or the lack of a device. */
    expect(tpv_fetch(&fetch) != TPV_OK, "a fetch into host memory went through");
    expect(tpv_verify_plan(&plan) != TPV_OK, "a plan in host memory went through");
    expect(tpv_verify_run(&run) != TPV_OK, "a run on host memory went through");
    expect(tpv_move_rows(&move) != TPV_OK, "a move in host memory went through");
    expect(tpv_rope_cache(&rope) != TPV_OK, "rows in host memory went through");
    expect(strlen(tpv_last_error()) > 0, "no message");
    printf("%d wrong arguments refused; then: %s\n", refused, tpv_last_error());
}

void check_device_pointers(void) {
    static _Alignas(256) char host[1 << 20];
    char* device = device_memory(1 << 20);
    const tpv_fetch_params fetch = good_fetch(device, locked_memory(16));
    tpv_verify_workspace_params size = {0};
    tpv_verify_plan_params plan;
    tpv_verify_run_params run, fp32;
    tpv_move_rows_params move = good_move(device);
    tpv_rope_cache_params rope = good_rope(device);
    char* workspace;
    uint64_t enough = 0; /* for any tile */
    size.struct_size = sizeof size, size.split = split;
    size.max_batch = 2, size.max_nodes = 16, size.max_tokens = 64;
    for (size.split.split_tile_rows = 64; size.split.split_tile_rows >= 16; size.split.split_tile_rows /= 2) {
        expect(tpv_verify_workspace_size(&size) == TPV_OK, "workspace size: %s", tpv_last_error());
        enough = size.bytes > enough ? size.bytes : enough;
    }
    expect(size.bytes < enough, "a workspace for 16 rows, %llu bytes, is enough for any tile", (unsigned long long)size.bytes);
    workspace = device_memory(enough);
    plan = good_plan(device, workspace, size.bytes), run = good_run(TPV_FLASH, device, workspace, size.bytes);
    fp32 = good_run(TPV_FLASH_FP32, device, NULL, 0);
    refused = 0;

    PLAN(--p.workspace_bytes, "workspace_bytes: expected at least ");
    PLAN(p.requests.max_nodes = 1024, "workspace_bytes: expected at least ");
    RUN(--p.workspace_bytes, "workspace_bytes: expected at least ");
#define ON_HOST(name) #name ": expected memory of device 0, got host memory"
    FETCH(p.target = host, ON_HOST(target));
    FETCH(p.source = (void*)host, "source: expected page-locked memory of the host, got other host memory");
    FETCH(p.source = (void*)device, "source: expected page-locked memory of the host, got device memory");
    PLAN(p.split_tile_rows = (int32_t*)device, "workspace_bytes: expected at least "); /* enough for 16 rows alone */
    plan.workspace_bytes = enough;
    PLAN(p.split_tile_rows = (int32_t*)host, ON_HOST(split_tile_rows));
    PLAN(p.workspace = host, ON_HOST(workspace));
    PLAN(p.requests.slots = (int32_t*)host, ON_HOST(slots));
    PLAN(p.requests.slot_begin = (int32_t*)host, ON_HOST(slot_begin));
    PLAN(p.requests.prefix_len = (int32_t*)host, ON_HOST(prefix_len));
    PLAN(p.requests.nodes = (int32_t*)host, ON_HOST(nodes));
    PLAN(p.requests.node_begin = (int32_t*)host, ON_HOST(node_begin));
    PLAN(p.requests.word_begin = (int32_t*)host, ON_HOST(word_begin));
    PLAN(p.requests.words = (uint64_t*)host, ON_HOST(words));
    RUN(p.workspace = host, ON_HOST(workspace));
    RUN(p.requests.slots = (int32_t*)host, ON_HOST(slots));
    RUN(p.q = host, ON_HOST(q));
    RUN(p.kv = host, ON_HOST(kv));
    RUN(p.out = host, ON_HOST(out));
    RUN(p.lse = (float*)host, ON_HOST(lse));
    FP32(p.q = host, ON_HOST(q));
    MOVE(p.pool = host, ON_HOST(pool));
    MOVE(p.src = (int32_t*)host, ON_HOST(src));
    MOVE(p.dst = (int32_t*)host, ON_HOST(dst));
    MOVE(p.hashes = (uint64_t*)host, ON_HOST(hashes));
    ROPE(p.x = host, ON_HOST(x));
    ROPE(p.down = host, ON_HOST(down));
    ROPE(p.queries = host, ON_HOST(queries));
    ROPE(p.rotation = (float*)host, ON_HOST(rotation));
    ROPE(p.slots = (int64_t*)host, ON_HOST(slots));
    ROPE(p.nope = host, ON_HOST(nope));
    ROPE(p.q = host, ON_HOST(q));
    ROPE(p.pool = host, ON_HOST(pool));
    printf("%d pointers and workspaces refused\n", refused);
}
