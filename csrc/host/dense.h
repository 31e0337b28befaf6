// The layers between attention, row by row: the parameters are those of the C ABI, checked.
#pragma once

#include "../tpverify.h"

namespace tpv {

using Linear = void(const tpv_linear_params&);
using RmsNorm = void(const tpv_rms_norm_params&);
using Rope = void(const tpv_rope_params&);
using SiluMul = void(const tpv_silu_mul_params&);

namespace base {
Linear linear;
RmsNorm rms_norm;
Rope rope;
SiluMul silu_mul;
}  // namespace base
namespace avx2 {
Linear linear;
RmsNorm rms_norm;
Rope rope;
SiluMul silu_mul;
}  // namespace avx2

}  // namespace tpv
