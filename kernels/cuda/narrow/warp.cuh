// One warp's arithmetic in the narrow kernel: kN * 8 packed query rows against kTile tokens whose K and
// V lie in its registers, loaded there straight from memory in the shape the products want:
//
//   S [16 rows x 8 tokens] = Q [16 x dims] K^T,   O^T [16 dims x 8 rows] += V^T [16 x 16 tokens] P^T
//
// Fragment geometry (mma m16n8k16), lane = 4 * g + j: A holds rows g, g + 8 and columns 2j, 2j + 1,
// 2j + 8, 2j + 9; B column g and the same for rows; C rows g, g + 8 and columns 2j, 2j + 1. So S in C
// is P^T in B as it stands.
//
// Which dims a step of K's fragment stands for is free as long as Q agrees, and which dims a row of
// V^T's stands for as long as the output is written alike. So lane j loads whole units of up to 16
// bytes of K's token g, lane g the same of V's tokens 2j, 2j + 1, 2j + 8, 2j + 9, and every load of
// the warp covers 64 or 128 neighbouring bytes of each row it touches. What a load of K brings is
// operand B without a move; V^T wants two tokens of one dim in a register, a byte permute each.
#pragma once

#include "common/convert.cuh"
#include "common/mma.cuh"
#include "common/params.cuh"
#include "common/shape.cuh"
#include "common/state.cuh"

constexpr int unit_bytes(int share) {
  return share % 16 == 0 ? 16 : share % 8 == 0 ? 8 : share % 4 == 0 ? 4 : 2;
}
constexpr int kKeyUnit = unit_bytes(kRowBytes / 4);    // 4 lanes share a token of K
constexpr int kValueUnit = unit_bytes(kRowBytes / 8);  // 8 lanes share a token of V
constexpr int kKeyWords = kRowBytes / 16;
constexpr int kValueWords = kValueUnit == 2 ? kRowBytes / 16 : kRowBytes / 32;
constexpr int kTokenTiles = kRowBytes <= 128 && kRowBytes % 32 == 0 ? 2 : 1;
constexpr int kTile = 16 * kTokenTiles;
// Long rows: K and V take turns in the same registers, 8 KB each is enough under way.
constexpr bool kTakeTurns = kRowBytes > 256;

using Keys = uint32[kTokenTiles][2][kKeyWords];
using Values = uint32[kTokenTiles][4][kValueWords];
using Scores = float[kTokenTiles * 2][4];  // by tiles of 8 tokens

// Running state: maxima and sums of rows g and g + 8, outputs of rows 2j and 2j + 1 of each row tile.
template <int kN>
struct Accumulator {
  float o[kN][kSteps][4];
  float max[kN];  // of raw scores, or, where scoring is general, of base-2 scores
  float sum[kN];  // this lane's tokens only until the end
};

template <int kN>
__device__ __forceinline__ void clear(Accumulator<kN>& acc) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int t = 0; t < kSteps; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc.o[n][t][i] = 0.0f;
    acc.max[n] = minus_infinity();
    acc.sum[n] = 0.0f;
  }
}

// Loads of K and V, which are read once: streaming. Where `wanted` is 0 the registers keep what they
// hold: a branch around the load would cost copies of them, made where the load is waited for.
template <int kBytes>
__device__ __forceinline__ void load_unit(uint32* to, const char* from, int wanted) {
  if constexpr (kBytes == 16) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n"
        "@p ld.global.cs.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
        : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
        : "l"(from), "r"(wanted));
  } else if constexpr (kBytes == 8) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.s32 p, %3, 0;\n@p ld.global.cs.v2.u32 {%0,%1}, [%2];\n}"
        : "+r"(to[0]), "+r"(to[1])
        : "l"(from), "r"(wanted));
  } else if constexpr (kBytes == 4) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p ld.global.cs.u32 %0, [%1];\n}"
                 : "+r"(to[0])
                 : "l"(from), "r"(wanted));
  } else {
    asm volatile(
        "{\n.reg .pred p;\n.reg .u16 x;\nsetp.ne.s32 p, %2, 0;\n"
        "@p ld.global.cs.u16 x, [%1];\n@p cvt.u32.u16 %0, x;\n}"
        : "+r"(to[0])
        : "l"(from), "r"(wanted));
  }
}

// `row`: lane l holds where token l (modulo kTile) lies, in rows of kHeadDim stored elements.
__device__ __forceinline__ void load_keys(Keys& k, const AttendParams& p, uint32 row, int wanted) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32 mine = __shfl_sync(kAllLanes, row, tile * 16 + half * 8 + g);
      const char* at = static_cast<const char*>(p.k) + static_cast<uint64>(mine) * kRowBytes +
                       j * kKeyUnit;
#pragma unroll
      for (int unit = 0; unit < kRowBytes / 4 / kKeyUnit; ++unit)
        load_unit<kKeyUnit>(&k[tile][half][unit * kKeyUnit / 4], at + unit * 4 * kKeyUnit,
                            wanted);
    }
}

__device__ __forceinline__ void load_values(Values& v, const AttendParams& p, uint32 row,
                                            int wanted) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
  constexpr int kUnits = kRowBytes / 8 / kValueUnit;
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = tile * 16 + (i >> 1) * 8 + j * 2 + (i & 1);
      const uint32 mine = __shfl_sync(kAllLanes, row, token);
      const char* at = static_cast<const char*>(p.v) + static_cast<uint64>(mine) * kRowBytes +
                       g * kValueUnit;
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit)
        load_unit<kValueUnit>(&v[tile][i][unit * kValueWords / kUnits], at + unit * 8 * kValueUnit,
                              wanted);
    }
}

// K's fragment of one k step: four dims of token g.
__device__ __forceinline__ void key_fragment(uint32 (&b)[2], const uint32 (&k)[kKeyWords], int step) {
  if constexpr (kIsFp8) {
    b[0] = fp8_unpack<kFp8, kBf16>(k[step]);
    b[1] = fp8_unpack<kFp8, kBf16>(k[step] >> 16);
  } else {
    b[0] = k[step * 2];
    b[1] = k[step * 2 + 1];
  }
}

// V^T's fragment of row tile `t`: two dims of four tokens.
__device__ __forceinline__ void value_fragment(uint32 (&a)[4], const uint32 (&v)[4][kValueWords],
                                               int t) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (kIsFp8) {
      const int word = kValueUnit == 2 ? t : t / 2;
      const bool low = kValueUnit == 2 || t % 2 == 0;
      const uint32 x = __byte_perm(v[half * 2][word], v[half * 2 + 1][word], low ? 0x5140 : 0x7362);
      a[half * 2] = fp8_unpack<kFp8, kBf16>(x);
      a[half * 2 + 1] = fp8_unpack<kFp8, kBf16>(x >> 16);
    } else {
      a[half * 2] = __byte_perm(v[half * 2][t], v[half * 2 + 1][t], 0x5410);
      a[half * 2 + 1] = __byte_perm(v[half * 2][t], v[half * 2 + 1][t], 0x7632);
    }
  }
}

// First of the two dims that row tile `t` of the output holds in lane group g.
__device__ __forceinline__ int output_dim(int t, int g) {
  const int byte = t * 2 * kElementBytes;
  return (byte / kValueUnit * 8 * kValueUnit + g * kValueUnit + byte % kValueUnit) / kElementBytes;
}

// Q lies in shared memory as fragments, [kSteps][32 lanes] of 16 bytes: what a lane's unit of K meets.
// The lane and step of four dims that begin at `dim`.
__device__ __forceinline__ int query_lane(int row, int dim) {
  return (row & 7) * 4 + dim / (kKeyUnit / kElementBytes) % 4;
}
__device__ __forceinline__ int query_step(int dim) {
  constexpr int kDims = kKeyUnit / kElementBytes;  // of a unit
  return dim / (4 * kDims) * (kDims / 4) + dim % kDims / 4;
}

// S = Q K^T.
__device__ __forceinline__ void score(Scores& s, const Keys& k, const char* queries) {
#pragma unroll
  for (int tile = 0; tile < kTokenTiles * 2; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[tile][i] = 0.0f;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const uint4 q =
        *reinterpret_cast<const uint4*>(queries + (step * 32 + (threadIdx.x & 31)) * 16);
    const uint32 a[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int tile = 0; tile < kTokenTiles * 2; ++tile) {
      uint32 b[2];
      key_fragment(b, k[tile / 2][tile % 2], step);
      multiply_add<kBf16>(s[tile], a, b[0], b[1]);
    }
  }
}

// Soft cap and scale; leaves base-2 scores. General scoring only.
__device__ __forceinline__ void cap(Scores& s, const AttendParams& p) {
#pragma unroll
  for (int tile = 0; tile < kTokenTiles * 2; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[tile][i] = capped_score(s[tile][i], p.scale, p.soft_cap);
    }
}

// Online softmax: raise the running maxima, rescale what that changes; s becomes p = 2^(s c - max c).
template <int kN>
__device__ __forceinline__ void online_softmax(Scores& s, Accumulator<kN>& acc, float c) {
  const int j = threadIdx.x & 3;
  float next[kN];
  bool raised = false;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const auto score = [&](int i) { return s[i / 2 + 1][n * 2 + i % 2]; };
    const float first = fmaxf(s[0][n * 2], s[0][n * 2 + 1]);
    next[n] = fmaxf(acc.max[n], quad_max(highest_score<kTokenTiles * 4 - 2>(first, score)));
    raised |= next[n] > acc.max[n];
  }
  if (__any_sync(kAllLanes, raised)) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float factor = state_rescale(acc.max[n] * c, next[n] * c);
      acc.max[n] = next[n];
      acc.sum[n] *= factor;
      const float first = __shfl_sync(kAllLanes, factor, j * 8);
      const float second = __shfl_sync(kAllLanes, factor, j * 8 + 4);
#pragma unroll
      for (int t = 0; t < kSteps; ++t) {
        acc.o[n][t][0] *= first, acc.o[n][t][1] *= second;
        acc.o[n][t][2] *= first, acc.o[n][t][3] *= second;
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float reference = state_reference(acc.max[n]) * c;
    const auto score = [&](int i) -> float& { return s[i / 2][n * 2 + i % 2]; };
    acc.sum[n] = weigh_scores<kTokenTiles * 4>(acc.sum[n], reference, c, score);
  }
}

// O^T += V^T P^T.
template <int kN>
__device__ __forceinline__ void weigh(Accumulator<kN>& acc, const Scores& s, const Values& v) {
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
    uint32 b[kN][2];
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        b[n][half] = pack<kBf16>(s[tile * 2 + half][n * 2], s[tile * 2 + half][n * 2 + 1]);
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
      uint32 a[4];
      value_fragment(a, v[tile], t);
#pragma unroll
      for (int n = 0; n < kN; ++n) multiply_add<kBf16>(acc.o[n][t], a, b[n][0], b[n][1]);
    }
  }
}
