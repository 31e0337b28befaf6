/* Every kernel against reference files: "TPVREF01", then arrays of char name[24], uint64_t bytes, data, padding to 8. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

typedef struct {
    char* data;
    size_t bytes;
} file_t;

static file_t read_file(const char* path) {
    FILE* stream = fopen(path, "rb");
    file_t file = {NULL, 0};
    if (stream && !fseek(stream, 0, SEEK_END)) {
        file.bytes = (size_t)ftell(stream), file.data = malloc(file.bytes);
        rewind(stream);
    }
    if (!file.data || fread(file.data, 1, file.bytes, stream) != file.bytes || memcmp(file.data, "TPVREF01", 8)) {
        printf("%s: no reference file\n", path);
        exit(1);
    }
    fclose(stream);
    return file;
}

static const void* array(file_t file, const char* name, size_t* bytes) {
    size_t at = 8;
    while (at + 32 <= file.bytes) {
        uint64_t length;
        memcpy(&length, file.data + at + 24, 8);
        if (!strncmp(file.data + at, name, 24)) {
            if (bytes) *bytes = (size_t)length;
            return file.data + at + 32;
        }
        at += 32 + (size_t)(length + 7) / 8 * 8;
    }
    printf("no array %s\n", name);
    exit(1);
}

static void* upload(file_t file, const char* name) {
    size_t bytes;
    const void* data = array(file, name, &bytes);
    return device_copy(data, bytes);
}

static float float_of(uint16_t bf16) {
    const uint32_t bits = (uint32_t)bf16 << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* bfloat16 widened to float32: the same values for every kernel. */
static void* upload_float(file_t file, const char* name) {
    size_t bytes, i;
    const uint16_t* source = array(file, name, &bytes);
    float* wide = malloc(bytes * 2);
    void* device;
    for (i = 0; i < bytes / 2; ++i) wide[i] = float_of(source[i]);
    device = device_copy(wide, bytes * 2);
    free(wide);
    return device;
}

/* Rows of out within their allowed errors, lse within `lse_error`. */
static void compare(file_t file, const char* kernel, const float* out, const float* lse, const float* allowed,
                    float lse_error, int rows) {
    const float *exact = array(file, "out", NULL), *exact_lse = array(file, "lse", NULL);
    double worst = 0, worst_lse = 0;
    int row, i;
    for (row = 0; row < rows; ++row) {
        const double lse_off = lse[row] == exact_lse[row] ? 0 : fabs((double)lse[row] - exact_lse[row]); /* -inf is met */
        double squares = 0;
        for (i = 0; i < 512; ++i) {
            const double off = (double)out[row * 512 + i] - exact[row * 512 + i];
            squares += off * off;
        }
        if (!(sqrt(squares) / allowed[row] <= worst)) worst = sqrt(squares) / allowed[row];
        if (!(lse_off <= worst_lse)) worst_lse = lse_off;
    }
    printf("%s: error %.3f of what is allowed, lse off by %.1e\n", kernel, worst, worst_lse);
    expect(worst <= 1 && worst_lse <= lse_error, "%s is too far from the reference", kernel);
}

static void run_kernel(file_t file, tpv_verify_run_params run, const char* name, int rows) {
    const size_t size = run.kernel == TPV_FLASH ? 2 : 4, count = (size_t)rows * 512;
    char* out = malloc(count * size);
    float *wide = malloc(count * 4), *lse = malloc((size_t)rows * 4);
    size_t i;
    run.dtype = run.kernel == TPV_FLASH ? TPV_BFLOAT16 : TPV_FLOAT32;
    run.q = run.kernel == TPV_FLASH ? upload(file, "q") : upload_float(file, "q");
    run.kv = run.kernel == TPV_FLASH ? upload(file, "kv") : upload_float(file, "kv");
    run.out = device_memory(count * size), run.lse = device_memory((size_t)rows * 4);
    expect(tpv_verify_run(&run) == TPV_OK, "%s: %s", name, tpv_last_error());
    from_device(out, run.out, count * size);
    from_device(lse, run.lse, (size_t)rows * 4);
    for (i = 0; i < count; ++i) wide[i] = size == 2 ? float_of(((uint16_t*)out)[i]) : ((float*)out)[i];
    compare(file, name, wide, lse, array(file, size == 2 ? "bf16_error" : "fp32_error", NULL), size == 2 ? 4e-3f : 1e-4f, rows);
    free(out), free(wide), free(lse);
}

void check_verify(const char* path) {
    const file_t file = read_file(path);
    const int32_t* sizes = array(file, "sizes", NULL); /* heads, batch, max_nodes, max_tokens, nodes */
    static const int32_t tiles[] = {16, 32, 64};
    tpv_verify_workspace_params size = {0};
    tpv_verify_plan_params plan = {0};
    tpv_verify_run_params run = {0};
    int i;
    char name[32];
    run.struct_size = sizeof run;
    run.requests.slots = upload(file, "slots"), run.requests.slot_begin = upload(file, "slot_begin");
    run.requests.prefix_len = upload(file, "prefix_len"), run.requests.nodes = upload(file, "nodes");
    run.requests.node_begin = upload(file, "node_begin"), run.requests.word_begin = upload(file, "word_begin");
    run.requests.words = upload(file, "words");
    run.requests.batch = sizes[1], run.requests.max_nodes = sizes[2], run.requests.max_tokens = sizes[3];
    run.split.heads = sizes[0], run.out_nodes = sizes[4];
    run.q_stride_node = sizes[0] * 576, run.q_stride_head = 576, run.kv_stride_slot = 576;
    run.out_stride_node = sizes[0] * 512, run.out_stride_head = 512, run.lse_stride_node = sizes[0];
    memcpy(&run.softmax_scale, array(file, "softmax_scale", NULL), 4);

    run.kernel = TPV_NAIVE;
    run_kernel(file, run, "naive", sizes[0] * sizes[4]);
    run.kernel = TPV_FLASH_FP32;
    run_kernel(file, run, "flash_fp32", sizes[0] * sizes[4]);
    run.kernel = TPV_FLASH;
    for (i = 0; i < 3; ++i) {
        const tpv_verify_split split = {sizes[0], tiles[i], 8, 16, 0, 0};
        size.struct_size = sizeof size, size.split = split;
        size.max_batch = sizes[1], size.max_nodes = sizes[2], size.max_tokens = sizes[3];
        expect(tpv_verify_workspace_size(&size) == TPV_OK, "workspace: %s", tpv_last_error());
        run.split = split, run.workspace = device_memory(size.bytes), run.workspace_bytes = size.bytes;
        plan.struct_size = sizeof plan, plan.split = split, plan.requests = run.requests;
        plan.workspace = run.workspace, plan.workspace_bytes = size.bytes;
        expect(tpv_verify_plan(&plan) == TPV_OK, "plan: %s", tpv_last_error());
        snprintf(name, sizeof name, "flash, %d rows", tiles[i]);
        run_kernel(file, run, name, sizes[0] * sizes[4]);
    }
    free(file.data);
}

/* What a launch finds in the source, and not a vector more: of several lengths, in one round of the kernel and in more. */
void check_fetch(void) {
    enum { ROOM = 40000 }; /* vectors */
    static const int64_t lengths[] = {0, 1, 5, 8192, 8193, 39999, ROOM, ROOM + 7};
    tpv_fetch_source* source = locked_memory(sizeof *source);
    tpv_fetch_params fetch = {0};
    char *values = locked_memory(16 * (ROOM + 8)), *found = malloc(16 * (ROOM + 8)), *before = malloc(16 * (ROOM + 8));
    void* target = device_copy(values, 16 * (ROOM + 8));
    size_t i, bytes;
    fetch.struct_size = sizeof fetch, fetch.source = source, fetch.target = target, fetch.capacity = ROOM;
    for (i = 0; i < sizeof lengths / sizeof *lengths; ++i) {
        size_t at;
        from_device(before, target, 16 * (ROOM + 8));
        for (at = 0; at < 16 * (ROOM + 8); ++at) values[at] = (char)(at * 7 + at / 251 + i);
        source->values = values, source->vectors = lengths[i];
        expect(tpv_fetch(&fetch) == TPV_OK, "fetch: %s", tpv_last_error());
        from_device(found, target, 16 * (ROOM + 8));
        bytes = 16 * (size_t)(lengths[i] < ROOM ? lengths[i] : ROOM);
        expect(!memcmp(found, values, bytes), "%zu bytes that were fetched differ", bytes);
        expect(!memcmp(found + bytes, before + bytes, 16 * (ROOM + 8) - bytes), "more than %zu bytes were written", bytes);
    }
    printf("fetch: up to %d vectors compared\n", ROOM);
    free(found), free(before);
}

void check_move(const char* path) {
    const file_t file = read_file(path);
    const int32_t* sizes = array(file, "sizes", NULL); /* layers, slots, row_bytes, count */
    tpv_move_rows_params move = {0};
    size_t bytes, hash_bytes;
    const void *after = array(file, "after", &bytes), *hashes = array(file, "hashes", &hash_bytes);
    char *found = malloc(bytes), *found_hashes = malloc(hash_bytes);
    move.struct_size = sizeof move, move.pool = upload(file, "before");
    move.src = upload(file, "src"), move.dst = upload(file, "dst"), move.hashes = device_memory(hash_bytes);
    move.layers = sizes[0], move.row_bytes = move.slot_stride = sizes[2], move.count = sizes[3];
    move.layer_stride = (int64_t)sizes[1] * sizes[2];
    expect(tpv_move_rows(&move) == TPV_OK, "move: %s", tpv_last_error());
    from_device(found, move.pool, bytes);
    from_device(found_hashes, move.hashes, hash_bytes);
    expect(!memcmp(found, after, bytes), "the moved pool differs");
    expect(!memcmp(found_hashes, hashes, hash_bytes), "the hashes differ");
    printf("move: %zu bytes and %zu hashes compared\n", bytes, hash_bytes / 8);
    free(found), free(found_hashes), free(file.data);
}
