// Verify attention of some query rows on a CPU core: included by one source file per instruction set (TPV_ISA).
//
// A row's bits are a function of its own token sequence alone. A score is one dot product with a fixed order of sums; the
// maximum over all keys comes first, so that weights need no rescaling; P @ V adds row after row within a chunk of
// positions (absolute multiples of CHUNK) and then chunk after chunk. Tiles only choose which rows share a load.
#pragma once

#include "attention.h"
#include "lanes.h"

namespace tpv::TPV_ISA {
namespace {

constexpr int64_t CHUNK = 64;    // positions whose values are added up before they join the sum
constexpr int64_t SCORED = 48;   // keys that stay in L2 while all rows meet them
constexpr int TILE_ROWS = 4;     // by 12 / TILE_ROWS keys: 12 accumulators, 3 keys and a query are the 16 registers of AVX2
constexpr int64_t LINE = 16;     // floats of a cache line
constexpr int VALUE_ROWS = 6;    // by two vectors of a value row

// What the next keys need is fetched while these are met: a few lines with every tile, for many at once would wait.
class Ahead {
public:
    Ahead(const AttentionRows& a, int64_t first, int64_t last, int64_t tiles)
        : keys_(a.keys), key_(first), last_(last), dim_(a.dim), lines_((last - first) * (a.dim / LINE + 1) / tiles + 1) {}
    void fetch() {
        for (int64_t i = 0; i < lines_ && key_ < last_; ++i) {
            __builtin_prefetch(keys_[key_] + column_);
            column_ += LINE;
            if (column_ >= dim_) column_ = 0, ++key_;
        }
    }

private:
    const float* const* keys_;
    int64_t key_, last_, dim_, lines_, column_ = 0;
};

// scores[r][c] = q[r] . keys[c]
template <int ROWS, int KEYS>
void score_tile(const float* q, int64_t dim, const float* const* keys, float* scores, int64_t stride) {
    Lanes sum[ROWS][KEYS] = {};
    for (int64_t d = 0; d < dim; d += LANES) {
        Lanes k[KEYS];
        for (int c = 0; c < KEYS; ++c) k[c] = load(keys[c] + d);
        for (int r = 0; r < ROWS; ++r) {
            const Lanes x = load(q + r * dim + d);
            for (int c = 0; c < KEYS; ++c) sum[r][c] += x * k[c];
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < KEYS; ++c) scores[r * stride + c] = sum_lanes(sum[r][c]);
}

template <int ROWS>
void score_rows(const AttentionRows& a, int64_t row, int64_t rows, int64_t first, int64_t last, Ahead& ahead) {
    constexpr int KEYS = 12 / ROWS;
    for (; rows >= ROWS; row += ROWS, rows -= ROWS) {
        const float* q = a.q + row * a.dim;
        float* scores = a.scores + row * a.stride;
        int64_t c = first;
        for (; c + KEYS <= last; c += KEYS) {
            ahead.fetch();
            score_tile<ROWS, KEYS>(q, a.dim, a.keys + c, scores + c, a.stride);
        }
        for (; c < last; ++c) score_tile<ROWS, 1>(q, a.dim, a.keys + c, scores + c, a.stride);
    }
    if constexpr (ROWS > 1) score_rows<ROWS - 1>(a, row, rows, first, last, ahead);
}

// scores[r][c] of all rows and the first `columns` keys
void score(const AttentionRows& a, int64_t rows, int64_t columns) {
    const auto end = [&](int64_t c) { return c + SCORED < columns ? c + SCORED : columns; };
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS * (SCORED * TILE_ROWS / 12);
    for (int64_t c = 0; c < columns; c = end(c)) {
        Ahead ahead(a, end(c), end(end(c)), tiles);
        score_rows<TILE_ROWS>(a, 0, rows, c, end(c), ahead);
    }
}

// out[r][0..2 LANES) += the sum over j of weights[r][j] * values[j][column..)
template <int ROWS>
void value_tile(const float* weights, int64_t stride, const float* const* values, int64_t column, int64_t count, float* out,
                int64_t rank) {
    Lanes sum[ROWS][2] = {};
    for (int64_t j = 0; j < count; ++j) {
        const Lanes left = load(values[j] + column), right = load(values[j] + column + LANES);
        __builtin_prefetch(values[j] + column + 2 * LANES);  // what the next columns' tiles read
        for (int r = 0; r < ROWS; ++r) {
            sum[r][0] += weights[r * stride + j] * left;
            sum[r][1] += weights[r * stride + j] * right;
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int half = 0; half < 2; ++half) {
            float* to = out + r * rank + column + half * LANES;
            store(to, load(to) + sum[r][half]);
        }
}

template <int ROWS>
void value_rows(const AttentionRows& a, int64_t row, int64_t rows, int64_t column, int64_t first, int64_t count, float* out) {
    for (; rows >= ROWS; row += ROWS, rows -= ROWS)
        value_tile<ROWS>(a.scores + row * a.stride + first, a.stride, a.keys + first, column, count, out + row * a.rank, a.rank);
    if constexpr (ROWS > 1) value_rows<ROWS - 1>(a, row, rows, column, first, count, out);
}

// out[r] += P @ V over `count` keys of one chunk, all rows
void add_values(const AttentionRows& a, int64_t rows, int64_t first, int64_t count, float* out) {
    for (int64_t column = 0; column < a.rank; column += 2 * LANES) value_rows<VALUE_ROWS>(a, 0, rows, column, first, count, out);
}

inline bool sees(const uint64_t* visible, int64_t node) { return visible[node / 64] >> (node % 64) & 1; }

// Scores of one row -> weights relative to the row's maximum, which it returns; keys that the row does not see get 0.
// Not-a-number passes through exp and spoils the row, whatever the maximum.
float weigh(const AttentionRows& a, float* row, int64_t columns, const uint64_t* visible) {
    constexpr float LOWEST = -__builtin_inff();
    for (int64_t j = a.prefix; j < columns; ++j)
        if (!sees(visible, j - a.prefix)) row[j] = LOWEST;
    for (; columns % LANES != 0; ++columns) row[columns] = LOWEST;
    Lanes tops = load(row);
    for (int64_t j = LANES; j < columns; j += LANES) tops = load(row + j) > tops ? load(row + j) : tops;
    float top = tops[0];
    for (int64_t lane = 1; lane < LANES; ++lane) top = tops[lane] > top ? tops[lane] : top;
    for (int64_t j = 0; j < columns; j += LANES) store(row + j, exp_lanes(load(row + j) - top));
    return top;
}

// The sum of a row's weights, chunk after chunk; within a chunk a position p adds to lane p % LANES.
class Total {
public:
    void add_chunk(const float* weights) {
        for (int64_t j = 0; j < CHUNK; j += LANES) lanes_ += load(weights + j);
        flush();
    }
    void add(int64_t position, float weight) { lanes_[position % LANES] += weight; }
    void flush() {
        sum_ += sum_lanes(lanes_);
        lanes_ = Lanes{};
    }
    double sum() const { return sum_; }

private:
    double sum_ = 0.0;
    Lanes lanes_ = {};
};

// What is left of one row after the prefix's whole chunks: the open chunk, of whose committed rows `partial` has the
// values, and the nodes that the row sees. Leaves the row's final out and lse.
void finish(const AttentionRows& a, const float* weights, int64_t columns, const uint64_t* visible, float top, float* partial,
            float* out, float* lse) {
    Total total;
    int64_t chunk = a.prefix / CHUNK;
    for (int64_t c = 0; c < chunk; ++c) total.add_chunk(weights + c * CHUNK);
    for (int64_t j = chunk * CHUNK; j < a.prefix; ++j) total.add(j, weights[j]);
    const auto flush = [&] {
        total.flush();
        for (int64_t c = 0; c < a.rank; c += LANES) {
            store(out + c, load(out + c) + load(partial + c));
            store(partial + c, Lanes{});
        }
    };
    for (int64_t j = a.prefix; j < columns; ++j) {
        if (!sees(visible, j - a.prefix)) continue;
        const int64_t position = a.prefix + a.depths[j - a.prefix];
        if (position / CHUNK != chunk) flush();
        chunk = position / CHUNK;
        total.add(position, weights[j]);
        for (int64_t c = 0; c < a.rank; c += LANES) store(partial + c, load(partial + c) + weights[j] * load(a.keys[j] + c));
    }
    flush();
    const float sum = static_cast<float>(total.sum());
    for (int64_t c = 0; c < a.rank; c += LANES) store(out + c, load(out + c) / sum);
    *lse = top + static_cast<float>(__builtin_log(total.sum()));
}

}  // namespace

void attend(const AttentionRows& a, int64_t first_row, int64_t rows) {
    // A node's ancestors come before it: whatever a mask says, no row reads a node after its own.
    const auto node = [&](int64_t r) { return (first_row + r) / a.heads; };
    const auto visible = [&](int64_t r) { return a.visible + node(r) * a.words; };
    score(a, rows, a.prefix + node(rows - 1) + 1);
    for (int64_t r = 0; r < rows; ++r) a.lse[r] = weigh(a, a.scores + r * a.stride, a.prefix + node(r) + 1, visible(r));

    std::memset(a.out, 0, rows * a.rank * sizeof(float));
    std::memset(a.partial, 0, rows * a.rank * sizeof(float));
    const int64_t whole = a.prefix / CHUNK * CHUNK;
    for (int64_t j = 0; j < whole; j += CHUNK) add_values(a, rows, j, CHUNK, a.out);
    add_values(a, rows, whole, a.prefix - whole, a.partial);
    for (int64_t r = 0; r < rows; ++r)
        finish(a, a.scores + r * a.stride, a.prefix + node(r) + 1, visible(r), a.lse[r], a.partial + r * a.rank,
               a.out + r * a.rank, a.lse + r);
}

}  // namespace tpv::TPV_ISA
