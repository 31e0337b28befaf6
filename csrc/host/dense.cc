// Dense layers on the CPU: parameters checked, then run by the best instruction set that there is.

#include "dense.h"
#include "error.h"
#include "isa.h"
#include "replay.h"

namespace {

// What each of these calls does. Without rows there is nothing to read or write, and arrays may be NULL.
template <class Params>
tpv_status call(const Params* params, tpv_status (*check)(const Params&), tpv_status (*check_arrays)(const Params&),
                void (*run)(const Params&)) {
    return tpv::guarded([&]() -> tpv_status {
        if (tpv_status status = tpv::check_struct(params); status != TPV_OK) return status;
        if (tpv_status status = check(*params); status != TPV_OK) return status;
        if (params->rows == 0) return TPV_OK;
        if (tpv_status status = check_arrays(*params); status != TPV_OK) return status;
        run(*params);
        return TPV_OK;
    });
}

tpv_status check(const tpv_linear_params& p) {
    return tpv::check_at_least({{"rows", p.rows, 0},
                                {"inputs", p.inputs, 1},
                                {"outputs", p.outputs, 1},
                                {"heads", p.heads, 1},
                                {"x_stride_row", p.x_stride_row, 0},
                                {"x_stride_head", p.x_stride_head, 0},
                                {"y_stride_row", p.y_stride_row, p.outputs},
                                {"y_stride_head", p.y_stride_head, p.heads > 1 ? p.outputs : 0}});
}

tpv_status check_arrays(const tpv_linear_params& p) { return tpv::check_pointers({{"x", p.x}, {"weight", p.weight}, {"y", p.y}}); }

tpv_status check(const tpv_rms_norm_params& p) {
    return tpv::check_at_least({{"rows", p.rows, 0},
                                {"columns", p.columns, 1},
                                {"x_stride_row", p.x_stride_row, 0},
                                {"y_stride_row", p.y_stride_row, p.columns}});
}

tpv_status check_arrays(const tpv_rms_norm_params& p) {
    return tpv::check_pointers({{"x", p.x}, {"weight", p.weight}, {"y", p.y}});
}

tpv_status check(const tpv_rope_params& p) {
    if (p.dim % 2 != 0) return tpv::fail(TPV_INVALID_ARGUMENT, "dim: expected an even number, got %d", p.dim);
    return tpv::check_at_least({{"rows", p.rows, 0},
                                {"heads", p.heads, 1},
                                {"dim", p.dim, 2},
                                {"x_stride_row", p.x_stride_row, 0},
                                {"x_stride_head", p.x_stride_head, 0},
                                {"y_stride_row", p.y_stride_row, p.dim},
                                {"y_stride_head", p.y_stride_head, p.heads > 1 ? p.dim : 0}});
}

tpv_status check_arrays(const tpv_rope_params& p) {
    return tpv::check_pointers({{"x", p.x}, {"cos", p.cos}, {"sin", p.sin}, {"y", p.y}});
}

tpv_status check(const tpv_silu_mul_params& p) { return tpv::check_at_least({{"rows", p.rows, 0}, {"columns", p.columns, 1}}); }

tpv_status check_arrays(const tpv_silu_mul_params& p) { return tpv::check_pointers({{"x", p.x}, {"y", p.y}}); }

tpv_status check(const tpv_place_params& p) {
    return tpv::check_at_least({{"rows", p.rows, 0},
                                {"columns", p.columns, 1},
                                {"places", p.places, p.at == nullptr ? p.rows : 1},
                                {"x_stride_row", p.x_stride_row, 0},
                                {"y_stride_row", p.y_stride_row, p.columns}});
}

tpv_status check_arrays(const tpv_place_params& p) {
    for (int64_t row = 0; p.at != nullptr && row < p.rows; ++row)
        if (p.at[row] < 0 || p.at[row] >= p.places)
            return tpv::fail(TPV_INVALID_ARGUMENT, "at: expected places below %lld, got %lld", static_cast<long long>(p.places),
                             static_cast<long long>(p.at[row]));
    return tpv::check_pointers({{"x", p.x}, {"y", p.y}});
}

void place(const tpv_place_params& p) {
    for (int64_t row = 0; row < p.rows; ++row) {
        const float* x = p.x + row * p.x_stride_row;
        float* y = p.y + (p.at != nullptr ? p.at[row] : row) * p.y_stride_row;
        for (int32_t c = 0; c < p.columns; ++c) y[c] = x[c] * p.scale;
    }
}

}  // namespace

extern "C" tpv_status tpv_linear(const tpv_linear_params* params) {
    return call(params, check, check_arrays, TPV_BEST(linear));
}

extern "C" tpv_status tpv_rms_norm(const tpv_rms_norm_params* params) {
    return call(params, check, check_arrays, TPV_BEST(rms_norm));
}

extern "C" tpv_status tpv_rope(const tpv_rope_params* params) {
    return call(params, check, check_arrays, TPV_BEST(rope));
}

extern "C" tpv_status tpv_silu_mul(const tpv_silu_mul_params* params) {
    return call(params, check, check_arrays, TPV_BEST(silu_mul));
}

extern "C" tpv_status tpv_place(const tpv_place_params* params) { return call(params, check, check_arrays, place); }

extern "C" tpv_status tpv_replay(const tpv_replay_params* params) {
    if (tpv_status status = tpv::check_struct(params); status != TPV_OK) return status;
    for (int64_t i = 0; i < params->count; ++i)
        if (tpv_status status = params->calls[i].function(params->calls[i].params); status != TPV_OK) return status;
    return TPV_OK;
}
