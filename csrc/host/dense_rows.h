// Dense layers on a CPU core: included by one source file per instruction set (TPV_ISA).
//
// A row's bits are a function of that row and of the weights alone. An element of a product is one chain of sums over the
// inputs in their order; tiles only choose which rows and columns share a load. Every other sum runs over a row in eight
// lanes, whose last vector is filled up with zeros.
#pragma once

#include "dense.h"
#include "lanes.h"

namespace tpv::TPV_ISA {
namespace {

constexpr int64_t PANEL = TPV_PANEL;  // columns of a panel of weights
constexpr int64_t GROUP = 6;          // panels that stay in L2 while all rows meet them
constexpr int LINEAR_ROWS = 6;
constexpr int VECTORS = PANEL / LANES;

// Panels of a tile: 12 accumulators at least where there are fewer than four rows, for a chain of sums waits for itself.
template <int ROWS>
constexpr int PANELS = ROWS < 4 ? 6 / ROWS : 1;

inline Lanes load_part(const float* p, int64_t count) {
    if (count >= LANES) return load(p);
    float filled[LANES] = {};
    std::memcpy(filled, p, count * sizeof(float));
    return load(filled);
}

inline void store_part(float* p, Lanes x, int64_t count) {
    std::memcpy(p, &x, (count < LANES ? count : LANES) * sizeof(float));
}

// One head's product for ROWS rows and PANELS panels, `columns` of which are wanted.
template <int ROWS, int PANELS>
void linear_tile(const tpv_linear_params& p, const float* x, const float* weight, const float* add, float* y, int64_t columns) {
    Lanes sum[ROWS][PANELS][VECTORS] = {};
    for (int64_t k = 0; k < p.inputs; ++k)
        for (int n = 0; n < PANELS; ++n) {
            Lanes w[VECTORS];
            for (int v = 0; v < VECTORS; ++v) w[v] = load(weight + (n * p.inputs + k) * PANEL + v * LANES);
            for (int r = 0; r < ROWS; ++r) {
                const Lanes value = all_lanes(x[r * p.x_stride_row + k]);
                for (int v = 0; v < VECTORS; ++v) sum[r][n][v] += value * w[v];
            }
        }
    for (int r = 0; r < ROWS; ++r)
        for (int64_t c = 0; c < PANELS * PANEL && c < columns; c += LANES) {
            const int64_t at = r * p.y_stride_row + c;
            Lanes value = sum[r][c / PANEL][c % PANEL / LANES];
            if (add != nullptr) value += load_part(add + at, columns - c);
            store_part(y + at, value, columns - c);
        }
}

// Panels first..last-1 of one head for ROWS rows.
template <int ROWS>
void linear_panels(const tpv_linear_params& p, int64_t head, int64_t row, int64_t first, int64_t last) {
    const int64_t all = (p.outputs + PANEL - 1) / PANEL;
    const float* x = p.x + head * p.x_stride_head + row * p.x_stride_row;
    const int64_t to = head * p.y_stride_head + row * p.y_stride_row;
    const auto tile = [&](auto* run, int64_t panel) {
        const int64_t at = to + panel * PANEL;
        run(p, x, p.weight + (head * all + panel) * p.inputs * PANEL, p.add != nullptr ? p.add + at : nullptr, p.y + at,
            p.outputs - panel * PANEL);
    };
    for (; first + PANELS<ROWS> <= last; first += PANELS<ROWS>) tile(linear_tile<ROWS, PANELS<ROWS>>, first);
    for (; first < last; ++first) tile(linear_tile<ROWS, 1>, first);
}

template <int ROWS>
void linear_rows(const tpv_linear_params& p, int64_t head, int64_t row, int64_t first, int64_t last) {
    for (; row + ROWS <= p.rows; row += ROWS) linear_panels<ROWS>(p, head, row, first, last);
    if constexpr (ROWS > 1) linear_rows<ROWS - 1>(p, head, row, first, last);
}

// exp(-|x|) has no overflow, and the two halves of the curve meet in it.
inline Lanes sigmoid(Lanes x) {
    const Lanes e = exp_lanes(x < 0.0f ? x : -x);
    return (x < 0.0f ? e : all_lanes(1.0f)) / (e + 1.0f);
}

}  // namespace

void linear(const tpv_linear_params& p) {
    const int64_t all = (p.outputs + PANEL - 1) / PANEL;
    for (int64_t head = 0; head < p.heads; ++head)
        for (int64_t first = 0; first < all; first += GROUP)
            linear_rows<LINEAR_ROWS>(p, head, 0, first, first + GROUP < all ? first + GROUP : all);
}

void rms_norm(const tpv_rms_norm_params& p) {
    for (int64_t row = 0; row < p.rows; ++row) {
        const float* x = p.x + row * p.x_stride_row;
        float* y = p.y + row * p.y_stride_row;
        Lanes squares = {};
        for (int64_t c = 0; c < p.columns; c += LANES) {
            const Lanes value = load_part(x + c, p.columns - c);
            squares += value * value;
        }
        const float scale = 1.0f / __builtin_sqrtf(sum_lanes(squares) / static_cast<float>(p.columns) + p.eps);
        for (int64_t c = 0; c < p.columns; c += LANES) {
            const int64_t count = p.columns - c;
            store_part(y + c, load_part(p.weight + c, count) * (load_part(x + c, count) * scale), count);
        }
    }
}

void rope(const tpv_rope_params& p) {
    const int64_t half = p.dim / 2;
    const int64_t step = p.interleaved ? 2 : 1, second = p.interleaved ? 1 : half;
    for (int64_t row = 0; row < p.rows; ++row)
        for (int64_t head = 0; head < p.heads; ++head) {
            const float* x = p.x + row * p.x_stride_row + head * p.x_stride_head;
            float* y = p.y + row * p.y_stride_row + head * p.y_stride_head;
            for (int64_t c = 0; c < half; c += LANES) {
                const int64_t count = half - c < LANES ? half - c : LANES;
                Lanes a = {}, b = {};
                for (int64_t i = 0; i < count; ++i) a[i] = x[(c + i) * step], b[i] = x[(c + i) * step + second];
                const Lanes cos = load_part(p.cos + row * half + c, count), sin = load_part(p.sin + row * half + c, count);
                store_part(y + c, a * cos - b * sin, count);
                store_part(y + half + c, b * cos + a * sin, count);
            }
        }
}

void silu_mul(const tpv_silu_mul_params& p) {
    for (int64_t row = 0; row < p.rows; ++row) {
        const float* gate = p.x + row * 2 * p.columns;
        const float* up = gate + p.columns;
        float* y = p.y + row * p.columns;
        for (int64_t c = 0; c < p.columns; c += LANES) {
            const int64_t count = p.columns - c;
            const Lanes value = load_part(gate + c, count);
            store_part(y + c, value * sigmoid(value) * load_part(up + c, count), count);
        }
    }
}

}  // namespace tpv::TPV_ISA
