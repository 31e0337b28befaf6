// Thin names over PTX. Everything here assembles for plain sm_90 and plain sm_120.
#pragma once
#include <cuda_bf16.h>
#include <cstdint>

namespace tpv {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The same value, of which the compiler knows nothing: what is made of it is neither recomputed nor merged with other uses.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
  asm volatile("mov.u32 %0, %0;" : "+r"(value));
  return value;
}

// A value that all lanes hold, in a uniform register: redux writes one, and the compiler keeps it there.
__device__ __forceinline__ int uniform(int value) { return __reduce_max_sync(~0u, value); }

// The same value, which the compiler has to keep: it cannot make it again.
__device__ __forceinline__ uint32_t kept(uint32_t value) { return __shfl_sync(~0u, value, threadIdx.x % 32); }

__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void load_matrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ __forceinline__ void load_matrix_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

// Two matrices: lanes 0-7 address the rows of the first, lanes 8-15 those of the second.
__device__ __forceinline__ void store_matrix(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1,%2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

// Of four matrices, whose rows lanes address as in load_matrix(): here a register is any 4 bytes, and comes back to its lane.
__device__ __forceinline__ void store_matrix(uint32_t address, const float (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(__float_as_uint(r[0])),
               "r"(__float_as_uint(r[1])), "r"(__float_as_uint(r[2])), "r"(__float_as_uint(r[3])) : "memory");
}

__device__ __forceinline__ void load_matrix(float (&r)[4], uint32_t address) {
  uint32_t word[4];
  load_matrix(word, address);
#pragma unroll
  for (int i = 0; i < 4; ++i) r[i] = __uint_as_float(word[i]);
}

__device__ __forceinline__ void load_shared(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ __forceinline__ void load_shared(float (&r)[2], uint32_t address) {
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(r[0]), "=f"(r[1]) : "r"(address));
}

__device__ __forceinline__ float load_shared_float(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// A global load whose place in the program stays: several issued together cost one round trip.
__device__ __forceinline__ void load_global(uint32_t& value, const int32_t* pointer) {
  asm volatile("ld.global.nc.b32 %0, [%1];" : "+r"(value) : "l"(pointer));  // + so that it is loaded where it stays
}

// Unchanged if not `there`. Relaxed, not weak: ptxas moves weak loads behind the first use of earlier ones, where they cost a
// second round trip.
__device__ __forceinline__ void load_global_if(bool there, float& value, const float* pointer) {
  asm volatile("{\n .reg .pred p;\n setp.ne.s32 p, %1, 0;\n @p ld.relaxed.gpu.global.f32 %0, [%2];\n}\n"
               : "+f"(value) : "r"(static_cast<int>(there)), "l"(pointer) : "memory");
}

__device__ __forceinline__ void load_global_if(bool there, float4& value, const float4* pointer) {
  asm volatile("{\n .reg .pred p;\n setp.ne.s32 p, %4, 0;\n @p ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%5];\n}\n"
               : "+f"(value.x), "+f"(value.y), "+f"(value.z), "+f"(value.w) : "r"(static_cast<int>(there)), "l"(pointer) : "memory");
}

__device__ __forceinline__ void prefetch(const void* pointer) { asm volatile("prefetch.global.L1 [%0];" ::"l"(pointer)); }

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred p;\n WAIT:\n mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n @!p bra WAIT;\n}\n" ::"r"(barrier),
      "r"(parity) : "memory");
}

// Whether a wait would return at once, for all lanes; asked early, the answer is there when it is needed.
__device__ __forceinline__ bool barrier_ready(uint32_t barrier, uint32_t parity) {
  uint32_t ready;
  asm volatile("{\n .reg .pred p;\n mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n selp.b32 %0, 1, 0, p;\n}\n"
               : "=r"(ready) : "r"(barrier), "r"(parity) : "memory");
  return ready != 0;
}

__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// One row of them.
__device__ __forceinline__ void copy_row(uint32_t destination, uint64_t source, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n"
      " @p cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n}\n" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier) : "memory");
}

// COUNT rows of q or of the pool into shared memory, PITCH bytes apart; completes on `barrier`. A whole warp calls this, with
// the same arguments in all lanes: branching around it would cost more than the copy.
template <int COUNT, int PITCH>
__device__ __forceinline__ void copy_rows(uint32_t destination, const uint64_t (&source)[COUNT], uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n @p mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;\n}\n" ::"r"(barrier),
      "r"(bytes * COUNT) : "memory");
#pragma unroll
  for (int r = 0; r < COUNT; ++r) copy_row(destination + r * PITCH, source[r], bytes, barrier);
}

__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&pair);
}

__device__ __forceinline__ float low_float(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

}  // namespace tpv
