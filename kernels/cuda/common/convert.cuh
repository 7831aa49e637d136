// Conversions between element types, two values at a time in a 32-bit register, the lower index in the lower
// half. kBrain selects bfloat16, else fp16; kFormat 4 is e4m3, 5 is e5m2. Written as PTX so that no toolkit
// header is needed: a specialisation compiles in about a second.
#pragma once

#include "common/types.cuh"

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
