// Many calls made by one: for the Python package, whose own share of a call costs more than most of them compute.
#pragma once

#include "../tpverify.h"

extern "C" {

// y[at[row]] = x[row] * scale, or y[row] where at is NULL.
struct tpv_place_params {
    uint64_t struct_size;
    int64_t rows;  // 0 or more
    int32_t columns;
    float scale;
    int64_t places;                      // rows of y
    int64_t x_stride_row, y_stride_row;  // in floats
    const float* x;                      // [rows, columns]
    const int64_t* at;                   // [rows], distinct
    float* y;                            // out [places, columns]
};

TPV_API tpv_status tpv_place(const tpv_place_params* params);

// A function of the C ABI by its address, and the struct that it takes.
struct tpv_call {
    tpv_status (*function)(const void* params);
    const void* params;
};

// Up to the first that fails.
struct tpv_replay_params {
    uint64_t struct_size;
    int64_t count;
    const tpv_call* calls;  // [count]
};

TPV_API tpv_status tpv_replay(const tpv_replay_params* params);
}
