/* tpverify's C ABI (C99).
 *
 * libtpverify_host.so holds the tree functions and needs neither CUDA nor torch. Every library exports
 * tpv_abi_version and tpv_last_error for itself.
 *
 * Calling convention: one parameter struct a call, its first field struct_size = sizeof the struct as the caller
 * compiled it. The caller owns all memory; arrays are dense and row-major. A call returns TPV_OK or another status and
 * leaves a message "argument: expected ..., got ..." in tpv_last_error(), which belongs to the calling thread. Nothing
 * exits the process and no C++ exception crosses the boundary. On failure the outputs are unspecified.
 */
#ifndef TPVERIFY_H
#define TPVERIFY_H

#include <stdint.h>

#define TPV_ABI_VERSION 1

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
    TPV_INTERNAL_ERROR = 3
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

#ifdef __cplusplus
}
#endif

#endif
