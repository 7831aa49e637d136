// Eight values at a time between memory formats: 0 fp16, 1 bf16, 2 fp32, 4 fp8 e4m3, 5 fp8 e5m2.
#pragma once

#include "common/convert.cuh"

constexpr int kFp16 = 0, kBfloat16 = 1, kFp32 = 2, kE4m3 = 4, kE5m2 = 5;

template <int kFormat>
constexpr int format_bytes() {
  return kFormat == kFp32 ? 4 : kFormat >= kE4m3 ? 1 : 2;
}

template <int kFormat>
__device__ __forceinline__ void read_8(float (&x)[8], const void* at) {
  if constexpr (kFormat == kFp32) {
    const float4 a = static_cast<const float4*>(at)[0], b = static_cast<const float4*>(at)[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  } else if constexpr (kFormat >= kE4m3) {
    const uint2 a = *static_cast<const uint2*>(at);
    unpack<false>(fp8_to_half<kFormat>(a.x), x[0], x[1]);
    unpack<false>(fp8_to_half<kFormat>(a.x >> 16), x[2], x[3]);
    unpack<false>(fp8_to_half<kFormat>(a.y), x[4], x[5]);
    unpack<false>(fp8_to_half<kFormat>(a.y >> 16), x[6], x[7]);
  } else {
    const uint4 a = *static_cast<const uint4*>(at);
    unpack<kFormat == kBfloat16>(a.x, x[0], x[1]);
    unpack<kFormat == kBfloat16>(a.y, x[2], x[3]);
    unpack<kFormat == kBfloat16>(a.z, x[4], x[5]);
    unpack<kFormat == kBfloat16>(a.w, x[6], x[7]);
  }
}

// One float -> fp8 bits, round to nearest even, saturating; for devices without the instruction.
template <int kFormat>
__device__ __forceinline__ uint32 quantise_one(float x) {
  constexpr bool kFour = kFormat == kE4m3;
  constexpr float kLargest = kFour ? 448.0f : 57344.0f;
  constexpr float kLeastNormal = kFour ? 0.015625f : 6.103515625e-05f;  // 2^-6, 2^-14
  constexpr float kSubnormals = kFour ? 512.0f : 65536.0f;              // 1 / smallest subnormal
  constexpr int kMantissa = kFour ? 3 : 2, kBias = kFour ? 7 : 15, kDropped = 23 - kMantissa;
  const uint32 sign = (__float_as_uint(x) >> 24) & 0x80u;
  if (x != x) return sign | 0x7fu;
  const float a = fminf(fabsf(x), kLargest);
  if (a < kLeastNormal) return sign | static_cast<uint32>(__float2int_rn(a * kSubnormals));
  uint32 bits = __float_as_uint(a);
  bits += (1u << (kDropped - 1)) - 1 + ((bits >> kDropped) & 1);
  return sign | ((bits >> kDropped) - ((127 - kBias) << kMantissa));
}

template <int kFormat>
__device__ __forceinline__ uint32 quantise_two(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16 r;
  if constexpr (kFormat == kE4m3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  }
  return r;
#else
  return quantise_one<kFormat>(low) | (quantise_one<kFormat>(high) << 8);
#endif
}

template <int kFormat>
__device__ __forceinline__ void write_8(void* at, const float (&x)[8]) {
  if constexpr (kFormat == kFp32) {
    static_cast<float4*>(at)[0] = make_float4(x[0], x[1], x[2], x[3]);
    static_cast<float4*>(at)[1] = make_float4(x[4], x[5], x[6], x[7]);
  } else if constexpr (kFormat >= kE4m3) {
    *static_cast<uint2*>(at) =
        make_uint2(quantise_two<kFormat>(x[0], x[1]) | (quantise_two<kFormat>(x[2], x[3]) << 16),
                   quantise_two<kFormat>(x[4], x[5]) | (quantise_two<kFormat>(x[6], x[7]) << 16));
  } else {
    constexpr bool kBrain = kFormat == kBfloat16;
    *static_cast<uint4*>(at) =
        make_uint4(pack<kBrain>(x[0], x[1]), pack<kBrain>(x[2], x[3]), pack<kBrain>(x[4], x[5]),
                   pack<kBrain>(x[6], x[7]));
  }
}
