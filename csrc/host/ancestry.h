// Ancestor words of a tree, for whoever has its parents.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tpv {

// words[n, ceil(n / 64)]: bit j of row i says that node i is j or descends from it. Parents come first; node 0 is the root.
inline void write_ancestors(const int32_t* parents, int32_t n, uint64_t* words) {
    const int64_t width = (int64_t{n} + 63) / 64;
    std::fill_n(words, width, uint64_t{0});
    for (int32_t i = 0; i < n; ++i) {
        uint64_t* row = words + i * width;
        if (i > 0) std::copy_n(words + parents[i] * width, width, row);
        row[i / 64] |= uint64_t{1} << (i % 64);
    }
}

}  // namespace tpv
