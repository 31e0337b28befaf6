// How a partial result lies in memory: as the lanes of the flash kernel hold it, for the combine kernel.
#pragma once
#include "../params.h"

namespace tpv {

constexpr int kSlice = 128, kSlices = kLatent / kSlice;  // dims of a PV warp
constexpr int kSliceSteps = kSlice / 16;

// Where, in float4, four values of a row lie: dims 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of the 16 from 16 * step on of a slice.
// Lane 4 * (row % 8) + q of a warp has them, so that each of its stores writes 512 bytes without a gap.
__device__ constexpr int partial_offset(int row, int slice, int step, int q) {
  return (((row / 16 * kSlices + slice) * 2 + row / 8 % 2) * kSliceSteps + step) * 32 + row % 8 * 4 + q;
}

}  // namespace tpv
