// A request's rows are numbered node * heads + head.
#pragma once
#include "../params.h"

namespace tpv {

// By a multiplication: a division takes some 35 instructions, in the way of a block's first queries. Exact for
// row * heads < 2^31, as for TPV_MAX_NODES x TPV_MAX_HEADS rows.
inline uint32_t heads_reciprocal(int heads) { return (1u << 31) / heads + 1; }
__device__ inline int node_of(const VerifyParams& p, int row) { return __umulhi(2 * row, p.heads_reciprocal); }

}  // namespace tpv
