/* tpverify's C ABI (C99).
 *
 * libtpverify_host.so holds the tree functions and a CPU's layers and needs neither CUDA nor torch, libtpverify_cuda.so
 * the kernels. Every library exports tpv_abi_version and tpv_last_error for itself.
 *
 * Calling convention: one parameter struct a call, its first field struct_size = sizeof the struct as the caller
 * compiled it. The caller owns all memory; arrays are dense and row-major. A call returns TPV_OK or another status and
 * leaves a message "argument: expected ..., got ..." in tpv_last_error(), which belongs to the calling thread. Nothing
 * exits the process and no C++ exception crosses the boundary. On failure the outputs are unspecified.
 */
#ifndef TPVERIFY_H
#define TPVERIFY_H

#include <stdint.h>

#define TPV_ABI_VERSION 2

#if defined(__GNUC__)
#define TPV_API __attribute__((visibility("default")))
#else
#define TPV_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum tpv_status {
    TPV_OK = 0,
    TPV_INVALID_ARGUMENT = 1,
    TPV_OUT_OF_MEMORY = 2,
    TPV_INTERNAL_ERROR = 3,
    TPV_CUDA_ERROR = 4
} tpv_status;

/* The largest tree (root included) and the deepest draft. */
#define TPV_MAX_NODES 1024
#define TPV_MAX_DEPTH 64

TPV_API int32_t tpv_abi_version(void);

/* The message of this thread's last failed call; "" if none failed. Never NULL. */
TPV_API const char* tpv_last_error(void);

/* ---- DDTree from each depth's top-k ------------------------------------------------------------------------------ */

typedef struct tpv_ddtree_params {
    uint64_t struct_size;
    int32_t depth;      /* 0..TPV_MAX_DEPTH */
    int32_t k;          /* candidates a depth */
    int32_t budget;     /* drafted nodes at most, 0..TPV_MAX_NODES - 1; the root comes on top */
    int32_t num_nodes;  /* out: n, root included */
    int32_t exact;      /* out: 0 if a candidate beyond k was needed, else 1 */
    int32_t reserved;   /* 0 */
    int64_t vocab_size; /* 0 if unknown */
    int64_t root_token;
    const float* logprobs;    /* [depth, k], descending, full-vocabulary log-probabilities; -inf is never a node */
    const int64_t* token_ids; /* [depth, k], distinct in a row */
    int64_t* tokens;          /* out [budget + 1], the first n written; so for the int32 arrays */
    int32_t* parents;         /* out [budget + 1], -1 for the root */
    int32_t* depths;          /* out [budget + 1] */
    int32_t* first_child;     /* out [budget + 1], -1 for none */
    int32_t* next_sibling;    /* out [budget + 1], ascending node index, -1 for none */
    uint64_t* ancestor_words; /* out [(budget + 1) * ceil((budget + 1) / 64)], written as [n, ceil(n / 64)] */
} tpv_ddtree_params;

TPV_API tpv_status tpv_build_ddtree(tpv_ddtree_params* params);

typedef struct tpv_ancestry_params { /* a tree in which parents come first */
    uint64_t struct_size;
    int32_t nodes;            /* n, 1..TPV_MAX_NODES */
    int32_t reserved;         /* 0 */
    const int32_t* parents;   /* [n], -1 for the root, which is the first */
    int32_t* depths;          /* out [n] */
    uint64_t* ancestor_words; /* out [n, ceil(n / 64)]: bit j of row i, i is j or descends from it */
} tpv_ancestry_params;

TPV_API tpv_status tpv_ancestry(const tpv_ancestry_params* params);

/* ---- Acceptance -------------------------------------------------------------------------------------------------- */

/* A tree as the builder writes it. */
typedef struct tpv_tree {
    const int64_t* tokens;       /* [n] */
    const int32_t* first_child;  /* [n] */
    const int32_t* next_sibling; /* [n] */
    int32_t num_nodes;           /* n, 1..TPV_MAX_NODES */
    int32_t reserved;            /* 0 */
} tpv_tree;

typedef struct tpv_accept_greedy_params {
    uint64_t struct_size;
    tpv_tree tree;
    const int64_t* target_tokens; /* [n] */
    int32_t* path;                /* out [n], the first path_length written */
    int32_t path_length;          /* out, >= 1 */
    int32_t reserved;             /* 0 */
    int64_t bonus;                /* out */
} tpv_accept_greedy_params;

TPV_API tpv_status tpv_accept_greedy(tpv_accept_greedy_params* params);

typedef struct tpv_accept_sampled_params {
    uint64_t struct_size;
    tpv_tree tree;
    int64_t vocab_size;
    const double* target_probs; /* [n, vocab_size], >= 0, rows that sum to 1: the caller has checked */
    const double* coins;        /* [n] in [0, 1) */
    double final_coin;          /* [0, 1) */
    double threshold_single;    /* [0, 1]; 1 and 1 is exact, below is lossy */
    double threshold_acc;       /* [0, 1] */
    int32_t* path;              /* out [n], the first path_length written */
    int32_t path_length;        /* out, >= 1 */
    int32_t reserved;           /* 0 */
    int64_t bonus;              /* out */
} tpv_accept_sampled_params;

TPV_API tpv_status tpv_accept_sampled(tpv_accept_sampled_params* params);

/* ---- Verify attention on the CPU --------------------------------------------------------------------------------- */

/* One request of tree-masked MLA attention in float32. A row's bits are a function of its own token sequence alone: not
 * of the tree around it, of heads, slots, threads or other requests. */
typedef struct tpv_attention_params {
    uint64_t struct_size;
    int32_t nodes;    /* of the tree, 1..TPV_MAX_NODES */
    int32_t heads;    /* query rows a node */
    int32_t rank;     /* columns of a row of the pool that are the value: a multiple of 16 */
    int32_t row_dim;  /* columns of a row, all of them the key: a multiple of 8 */
    int32_t threads;  /* 1 or more */
    int32_t reserved; /* 0 */
    int64_t prefix;   /* committed tokens */
    int64_t slots;    /* rows of the pool */
    int64_t pool_stride;            /* floats from a row of the pool to the next */
    const float* q;                 /* [nodes, heads, row_dim], times the softmax scale */
    const float* kv_pool;           /* [slots] rows of row_dim */
    const int64_t* prefix_slots;    /* [prefix] */
    const int64_t* tree_slots;      /* [nodes] */
    const int32_t* depths;          /* [nodes] */
    const uint64_t* ancestor_words; /* [nodes, ceil(nodes / 64)], every node an ancestor of itself */
    float* out;                     /* [nodes, heads, rank] */
    float* lse;                     /* [nodes, heads], natural log */
} tpv_attention_params;

TPV_API tpv_status tpv_attention(const tpv_attention_params* params);

/* ---- Dense layers on the CPU ------------------------------------------------------------------------------------- */

/* In float32, on the calling thread. A row's bits are a function of that row and of the weights alone: not of the rows
 * beside it, of how many there are, or of where they lie. No y may overlap anything that is read. */

#define TPV_PANEL 16

/* y[head] = x[head] @ weight[head] + add[head]: every element one chain of sums over the inputs in their order. */
typedef struct tpv_linear_params {
    uint64_t struct_size;
    int64_t rows;     /* 0 or more */
    int32_t inputs;
    int32_t outputs;
    int32_t heads;    /* products of one shape, 1 or more */
    int32_t reserved; /* 0 */
    int64_t x_stride_row, x_stride_head, y_stride_row, y_stride_head; /* in floats */
    const float* x;      /* [heads, rows, inputs] */
    const float* weight; /* [heads, ceil(outputs / TPV_PANEL), inputs, TPV_PANEL]: columns side by side in panels */
    const float* add;    /* as y, or NULL */
    float* y;            /* out [heads, rows, outputs] */
} tpv_linear_params;

TPV_API tpv_status tpv_linear(const tpv_linear_params* params);

/* y = weight * x / sqrt(mean(x^2) + eps), the mean over a row. */
typedef struct tpv_rms_norm_params {
    uint64_t struct_size;
    int64_t rows; /* 0 or more */
    int32_t columns;
    float eps;
    int64_t x_stride_row, y_stride_row; /* in floats */
    const float* x;      /* [rows, columns] */
    const float* weight; /* [columns] */
    float* y;            /* out [rows, columns] */
} tpv_rms_norm_params;

TPV_API tpv_status tpv_rms_norm(const tpv_rms_norm_params* params);

/* Pairs (a, b) of a row's head are rotated to (a cos - b sin, b cos + a sin) and written as halves: all a, then all b. */
typedef struct tpv_rope_params {
    uint64_t struct_size;
    int64_t rows;        /* 0 or more */
    int32_t heads;
    int32_t dim;         /* even */
    int32_t interleaved; /* 1: pairs lie side by side in x; 0: in halves */
    int32_t reserved;    /* 0 */
    int64_t x_stride_row, x_stride_head, y_stride_row, y_stride_head; /* in floats */
    const float* x;   /* [rows, heads, dim] */
    const float* cos; /* [rows, dim / 2] */
    const float* sin; /* [rows, dim / 2] */
    float* y;         /* out [rows, heads, dim] */
} tpv_rope_params;

TPV_API tpv_status tpv_rope(const tpv_rope_params* params);

/* y = silu(gate) * up, silu(g) = g / (1 + exp(-g)). */
typedef struct tpv_silu_mul_params {
    uint64_t struct_size;
    int64_t rows;     /* 0 or more */
    int32_t columns;
    int32_t reserved; /* 0 */
    const float* x;   /* [rows, 2, columns]: gate, then up */
    float* y;         /* out [rows, columns] */
} tpv_silu_mul_params;

TPV_API tpv_status tpv_silu_mul(const tpv_silu_mul_params* params);

/* ---- Verify attention (libtpverify_cuda.so) ---------------------------------------------------------------------- */

/* Tree-masked MLA attention over a paged latent pool, one row a slot: 512 latent, then 64 rope. Node i of a request sees
 * all of its prefix, its ancestors and itself.
 *
 * Plan once a step, run once a layer. Both only launch on `stream`, a cudaStream_t of the current device: they neither
 * allocate nor synchronise, and may be captured in a CUDA graph. A replay reads the tables anew, so they may be rewritten
 * in place for other lengths, trees and batches, within the limits that were captured. Pointers are memory of the current
 * device; what needs no driver is checked before anything that does. */

#define TPV_MAX_HEADS 128

/* Of all prefixes of a step: begins of slots and words that lie in one buffer are int32. */
#define TPV_MAX_TOKENS (7 << 28)

typedef enum tpv_dtype { TPV_BFLOAT16 = 1, TPV_FLOAT32 = 2 } tpv_dtype;

/* TPV_FLASH is what serves. The two below it need no plan and no workspace: they are what it is tested against. */
typedef enum tpv_kernel {
    TPV_FLASH = 0,       /* bfloat16, products in fp32; split over all multiprocessors */
    TPV_FLASH_FP32 = 1,  /* float32; one block for a node and eight heads */
    TPV_NAIVE = 2        /* float32; one block for a node and a head, scores twice and no rescaling */
} tpv_kernel;

/* Compute capabilities that the library holds kernels for, as "90,120". */
TPV_API const char* tpv_cuda_archs(void);

/* How a step is cut. A head's bits depend on the splits, and on nothing else of this. */
typedef struct tpv_verify_split {
    int32_t heads;            /* of this call, 1..TPV_MAX_HEADS */
    int32_t tile_rows;        /* 16, 32 or 64 rows (node * heads + head) a tile */
    int32_t split_heads;      /* what splits are chosen for: the same at every tp, so that all give the same bits */
    int32_t split_tile_rows;  /* 16, 32 or 64 */
    int32_t batch_invariant;  /* 1: splits of a request do not depend on the others either */
    int32_t reserved;         /* 0 */
} tpv_verify_split;

typedef struct tpv_verify_workspace_params {
    uint64_t struct_size;
    tpv_verify_split split;
    int32_t max_batch;   /* 1..4096 */
    int32_t max_nodes;   /* of one request, 1..TPV_MAX_NODES */
    int64_t max_tokens;  /* of all prefixes, 0..TPV_MAX_TOKENS */
    uint64_t bytes;      /* out; on the current device */
} tpv_verify_workspace_params;

TPV_API tpv_status tpv_verify_workspace_size(tpv_verify_workspace_params* params);

/* Tables that the host has written reach `target`, but for what exceeds `capacity`. The launch, and every replay of it,
 * reads `source` and what it points to as they are then. */
typedef struct tpv_fetch_source {
    const void* values; /* page-locked memory of the host, as `source` itself is; 16-byte aligned */
    int64_t vectors;    /* of 16 bytes */
} tpv_fetch_source;

typedef struct tpv_fetch_params {
    uint64_t struct_size;
    void* stream;
    const tpv_fetch_source* source;
    void* target;     /* 16-byte aligned */
    int64_t capacity; /* of target, in vectors of 16 bytes */
} tpv_fetch_params;

TPV_API tpv_status tpv_fetch(const tpv_fetch_params* params);

/* The requests of a step. Rows of q, out and lse and the words lie request after request, without gaps. What the tables
 * hold is the caller's word: slots within the pool, lengths within the limits. */
typedef struct tpv_verify_requests {
    const int32_t* slots;          /* [sum of tokens]: a request's prefix slots in position order, then its tree slots */
    const int32_t* slot_begin;     /* [batch]: where its slots start */
    const int32_t* prefix_len;     /* [batch] */
    const int32_t* nodes;          /* [batch]: 0 for a padded request */
    const int32_t* node_begin;     /* [batch]: its first node among those of all */
    const int32_t* word_begin;     /* [batch]: its first ancestor word */
    const uint64_t* words;         /* [sum of n * ceil(n / 64)]: bit j of row i, node i sees node j */
    int32_t batch;                 /* entries of the tables, 1..4096 */
    int32_t max_nodes;             /* of one request, 1..TPV_MAX_NODES */
    int64_t max_tokens;            /* of all prefixes, 0..TPV_MAX_TOKENS */
} tpv_verify_requests;

typedef struct tpv_verify_plan_params {
    uint64_t struct_size;
    tpv_verify_split split;
    tpv_verify_requests requests;
    void* workspace;  /* 256-byte aligned */
    uint64_t workspace_bytes;  /* at least what tpv_verify_workspace_size says for the requests' limits */
    void* stream;
    const int32_t* split_tile_rows; /* what takes split's place, read with the tables: the workspace has to be large enough
                                       for 16, 32 and 64. NULL for split's own */
} tpv_verify_plan_params;

TPV_API tpv_status tpv_verify_plan(const tpv_verify_plan_params* params);

typedef struct tpv_verify_run_params {
    uint64_t struct_size;
    tpv_verify_split split;        /* as planned; without a plan only its heads count */
    tpv_verify_requests requests;  /* as planned */
    void* workspace;               /* as planned; not read without a plan */
    uint64_t workspace_bytes;
    void* stream;
    int32_t kernel;  /* tpv_kernel */
    int32_t dtype;   /* tpv_dtype of q, kv and out: the kernel's */
    const void* q;   /* [nodes, heads, 576], 16-byte aligned, strides multiples of 16 bytes */
    const void* kv;  /* [slots, 576], 16-byte aligned, stride a multiple of 16 bytes */
    void* out;       /* [out_nodes, heads, 512], 8-byte aligned, strides multiples of 8 bytes */
    float* lse;      /* [out_nodes, heads], natural log */
    int64_t q_stride_node, q_stride_head, kv_stride_slot;           /* in elements */
    int64_t out_stride_node, out_stride_head, lse_stride_node;      /* in elements; heads of lse lie side by side */
    int32_t out_nodes;  /* at least the plan's nodes; rows beyond them get 0 and -inf */
    float softmax_scale;  /* finite, also times log2(e); above 0 for TPV_FLASH */
} tpv_verify_run_params;

TPV_API tpv_status tpv_verify_run(const tpv_verify_run_params* params);

/* ---- Moving rows (libtpverify_cuda.so) --------------------------------------------------------------------------- */

/* Row src[i] goes to row dst[i], in every layer, for all i at once: no dst may be a src or another dst. One launch on
 * `stream`; nothing is allocated or synchronised.
 *
 * The hash of a row depends on its bytes alone: with w_0, w_1, ... its little-endian 64-bit words, it is the sum, modulo
 * 2^64, of the i-th output (from 0) of SplitMix64 seeded with w_i:
 *     z = w_i + (i + 1) * 0x9E3779B97F4A7C15
 *     z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9
 *     z = (z ^ z >> 27) * 0x94D049BB133111EB
 *     z ^ z >> 31 */
typedef struct tpv_move_rows_params {
    uint64_t struct_size;
    void* stream;
    void* pool;            /* [layers, slots, row_bytes], 16-byte aligned */
    int64_t layer_stride;  /* in bytes, as the next two; multiples of 16 */
    int64_t slot_stride;   /* at least row_bytes */
    int64_t row_bytes;     /* 16 to 2^20 */
    const int32_t* src;    /* [count] slots */
    const int32_t* dst;    /* [count] slots */
    uint64_t* hashes;      /* out [layers, count]: of each row moved; may be NULL */
    int32_t layers;        /* 1..65535 */
    int32_t count;         /* moves, at least 1 */
} tpv_move_rows_params;

TPV_API tpv_status tpv_move_rows(const tpv_move_rows_params* params);

/* ---- Between the products of an MLA layer (libtpverify_cuda.so) --------------------------------------------------- */

/* bfloat16, sums in fp32; one launch on `stream`, nothing is allocated or synchronised. A row's bits depend on that
 * row alone. Arrays are dense where no stride is given; widths are multiples of 8, and arrays 16-byte aligned.
 *
 * A norm is a row's scale here: its weights are the next matrix's, and a scale can wait until after a product. */

/* Queries and latent of a layer, made by products of rows that are not yet normed, become what attention reads. With
 *     square = mean(x^2) + eps
 *     scale(y) = 1 / sqrt(mean(y^2) + square * norm_eps)
 * over a row, and low, latent, k_pe the parts of `down`:
 *     nope = scale(low) * queries' first part              q = scale(low) * queries' last 64, rotated
 *     pool[slot] = scale(latent) * latent, then k_pe / sqrt(square), rotated
 * Rotation turns pairs that lie side by side. */
typedef struct tpv_rope_cache_params {
    uint64_t struct_size;
    void* stream;
    const void* x;         /* [nodes, hidden]: the residual stream */
    const void* down;      /* [nodes, low_width + 512 + 64]: the first products of x */
    const void* queries;   /* [shards, nodes, shard_heads, nope_width + 64]: the second products, of `low` */
    const float* rotation; /* [nodes, 32, 2]: cos and sin of a pair's angle */
    const int64_t* slots;  /* [nodes] */
    void* nope;            /* out [shards, nodes, shard_heads, nope_width] */
    void* q;               /* out [nodes, shards * shard_heads, 576]: the last 64 are written */
    void* pool;            /* out [slots, 576]: rows `slots` */
    int64_t q_stride_node, q_stride_head, pool_stride_slot; /* in elements, multiples of 8 */
    int32_t nodes, hidden, low_width, nope_width;           /* nodes 1..65535, nope_width at most 2^19 */
    int32_t shards, shard_heads;
    float eps, norm_eps;
} tpv_rope_cache_params;

TPV_API tpv_status tpv_rope_cache(const tpv_rope_cache_params* params);

#ifdef __cplusplus
}
#endif

#endif
