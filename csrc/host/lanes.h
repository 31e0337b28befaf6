// Eight floats at a time: included by one source file per instruction set (TPV_ISA), as what stands on it is.
//
// No standard containers in any of these files: their code would be compiled for an instruction set that another machine
// lacks.
#pragma once

#include <cstdint>
#include <cstring>

namespace tpv::TPV_ISA {
namespace {

constexpr int64_t LANES = 8;
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t IntLanes __attribute__((vector_size(LANES * sizeof(int32_t))));

inline Lanes load(const float* p) {
    Lanes x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

inline void store(float* p, Lanes x) { std::memcpy(p, &x, sizeof x); }

inline Lanes all_lanes(float x) { return Lanes{x, x, x, x, x, x, x, x}; }

inline float sum_lanes(Lanes x) {
    typedef float Half __attribute__((vector_size(sizeof(Lanes) / 2)));
    Half low, high;
    std::memcpy(&low, &x, sizeof low);
    std::memcpy(&high, reinterpret_cast<const char*>(&x) + sizeof low, sizeof high);
    low += high;
    return (low[0] + low[2]) + (low[1] + low[3]);
}

// exp(x) for x <= 0, to about one unit in the last place; 0 below the smallest normal number.
inline Lanes exp_lanes(Lanes x) {
    constexpr float LOG2_E = 1.44269504f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer that sits in the low bits
    const Lanes shifted = x * LOG2_E + ROUND;
    const Lanes n = shifted - ROUND;
    const Lanes r = x - n * LN2_HIGH - n * LN2_LOW;
    Lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    IntLanes bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23;
    Lanes scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return x < -87.0f ? Lanes{} : p * scale;
}

}  // namespace
}  // namespace tpv::TPV_ISA
