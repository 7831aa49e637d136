// Instructions the attention kernels are made of: asynchronous copies, matrix fragments, conversions.
//
// Written as PTX so that no toolkit header is needed: a specialisation compiles in about a second.
// Compute type: kBrain selects bfloat16, else fp16. Storage: kFormat 0 = the compute type, 4 = e4m3,
// 5 = e5m2. Two 16-bit values travel in one 32-bit register, the lower index in the lower half.
#pragma once

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

constexpr uint32 kAllLanes = 0xffffffffu;

__device__ __forceinline__ uint32 shared_address(const void* p) {
  return static_cast<uint32>(__cvta_generic_to_shared(p));
}

// A kernel launched to overlap its predecessor: the next one may start its prologue; what earlier
// kernels wrote may be read and overwritten. Elsewhere these do nothing.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// 16 bytes global -> shared, past L1; zeros are written when `valid` is false (nothing is read).
__device__ __forceinline__ void copy_async_16(uint32 dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "r"(valid ? 16 : 0)
               : "memory");
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

template <bool kBrain>
__device__ __forceinline__ uint32 pack(float low, float high) {
  uint32 r;
  if constexpr (kBrain) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  }
  return r;
}

__device__ __forceinline__ float half_to_float(uint16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

template <bool kBrain>
__device__ __forceinline__ void unpack(uint32 x, float& low, float& high) {
  if constexpr (kBrain) {
    low = __uint_as_float(x << 16);
    high = __uint_as_float(x & 0xffff0000u);
  } else {
    low = half_to_float(static_cast<uint16>(x));
    high = half_to_float(static_cast<uint16>(x >> 16));
  }
}

// Two fp8 values in the low 16 bits -> two fp16 values. Exact, subnormals included.
template <int kFormat>
__device__ __forceinline__ uint32 fp8_to_half(uint32 x) {
  static_assert(kFormat == 4 || kFormat == 5, "e4m3 or e5m2");
  uint32 y;
#if __CUDA_ARCH__ >= 890
  if constexpr (kFormat == 4) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(static_cast<uint16>(x)));
  } else {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(y) : "h"(static_cast<uint16>(x)));
  }
#else
  const uint32 spread = __byte_perm(x, 0, 0x1404);  // byte 0 -> bits 8..15, byte 1 -> bits 24..31
  if constexpr (kFormat == 5) {
    y = spread;
  } else {
    // Exponent and mantissa move right by one; 2^8 mends the bias; 0x7f is e4m3's NaN.
    y = (spread & 0x80008000u) | ((spread & 0x7f007f00u) >> 1);
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(y) : "r"(0x5c005c00u));
    if ((spread & 0x7f00u) == 0x7f00u) y |= 0x7e00u;
    if ((spread & 0x7f000000u) == 0x7f000000u) y |= 0x7e000000u;
  }
#endif
  return y;
}

// Two fp8 values in the low 16 bits -> two values of the compute type.
template <int kFormat, bool kBrain>
__device__ __forceinline__ uint32 fp8_unpack(uint32 x) {
  const uint32 halves = fp8_to_half<kFormat>(x);
  if constexpr (kBrain) {
    return pack<true>(half_to_float(static_cast<uint16>(halves)),
                      half_to_float(static_cast<uint16>(halves >> 16)));
  } else {
    return halves;
  }
}
