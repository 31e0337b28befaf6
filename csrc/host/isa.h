// Which of a function's builds this machine runs: TPV_BEST(f) is tpv::avx2::f or tpv::base::f.
#pragma once

#if defined(__x86_64__)
namespace tpv {
inline bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
}  // namespace tpv
#define TPV_BEST(f) (tpv::has_avx2() ? tpv::avx2::f : tpv::base::f)
#else
#define TPV_BEST(f) tpv::base::f
#endif
