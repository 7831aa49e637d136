// Matrix instructions of a warp, and asynchronous copies into the shared memory that feeds them. Written as PTX
// so that no toolkit header is needed. Two 16-bit values travel in one 32-bit register.
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ uint32 shared_address(const void* p) {
  return static_cast<uint32>(__cvta_generic_to_shared(p));
}

// 16 bytes global -> shared, past L1; zeros are written when `valid` is false (nothing is read).
__device__ __forceinline__ void copy_async_16(uint32 dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "r"(valid ? 16 : 0)
               : "memory");
}
// 4 bytes; no group of them is waited for.
__device__ __forceinline__ void copy_async_4(void* dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(dst)), "l"(src)
               : "memory");
}
__device__ __forceinline__ void copy_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void load_matrix_x2(uint32 (&r)[2], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrix_x4(uint32 (&r)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrix_x2_transposed(uint32 (&r)[2], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrix_x4_transposed(uint32 (&r)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// c += a [16 x 16] * b [16 x 8], float32 accumulation.
template <bool kBrain>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32 (&a)[4], uint32 b0,
                                             uint32 b1) {
  if constexpr (kBrain) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Each thread of a quad holds word `lane % 4` of four 16-byte chunks; after it, all of chunk `lane % 4`.
__device__ __forceinline__ uint4 transpose_quad(uint32 a, uint32 b, uint32 c, uint32 d,
                                                int lane) {
  const bool odd = lane & 1, high = lane & 2;
  const uint32 ab = __shfl_xor_sync(kAllLanes, odd ? a : b, 1);
  const uint32 cd = __shfl_xor_sync(kAllLanes, odd ? c : d, 1);
  a = odd ? ab : a;
  b = odd ? b : ab;
  c = odd ? cd : c;
  d = odd ? d : cd;
  const uint32 ac = __shfl_xor_sync(kAllLanes, high ? a : c, 2);
  const uint32 bd = __shfl_xor_sync(kAllLanes, high ? b : d, 2);
  return make_uint4(high ? ac : a, high ? bd : b, high ? c : ac, high ? d : bd);
}
