// What one thread computes of one request's verify attention.
#pragma once

#include <cstdint>

namespace tpv {

// A block of query rows of one request, row = node * heads + head, from `first_row` on. Pointers to the block's own rows:
// q [rows, dim] scaled, out [rows, rank], lse [rows]; scratch: scores [rows, stride] (stride a multiple of 8 that takes all
// keys), partial [rows, rank].
// keys: all rows that a query may see, prefix first, then the tree's. visible: ancestor words of all nodes [nodes, words].
struct AttentionRows {
    const float* q;
    const float* const* keys;
    const uint64_t* visible;
    const int32_t* depths;
    float *out, *lse, *scores, *partial;
    int64_t dim, rank, heads, prefix, words, stride;
};

using Attend = void(const AttentionRows&, int64_t first_row, int64_t rows);
namespace base { Attend attend; }
namespace avx2 { Attend attend; }

}  // namespace tpv
