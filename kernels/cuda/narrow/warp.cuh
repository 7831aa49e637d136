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
//
// Eight lanes' 16 bytes leave the L1 cache together if they lie in different banks, which is to say at
// different places of a line of 128 bytes; else one after the other, and that, not the memory, is
// then what a tile takes. Where rows are few, fragments have room to see to it:
//
// - kHalves: a token of K has two columns, its even blocks of 64 bytes and its odd ones, and Q's rows
//   come twice, above for the even blocks and below for the odd ones. Lanes 8q to 8q + 7 then read a
//   line of one token; the score is the sum of one element of the upper rows and one of the lower.
// - kParts > 1: only kTileRows query rows come in a tile, kParts times over. Each part of the columns of
//   P^T is 0 but for its share of the lanes j, so these may have dims of their own: they read other
//   places of the line than their neighbours. The parts of O^T are added where states meet.
#pragma once

#include "common/convert.cuh"
#include "common/mma.cuh"
#include "common/params.cuh"
#include "common/shape.cuh"
#include "common/state.cuh"

constexpr int unit_bytes(int share) {
  return share % 16 == 0 ? 16 : share % 8 == 0 ? 8 : share % 4 == 0 ? 4 : 2;
}
// Whether teams go through all items of a head before they come to the next.
constexpr bool kHeadsFirst = HEADS_FIRST != 0;

constexpr int kLine = 128;  // bytes
// There are no registers for it in general scoring of 32 tokens at a time, nor in converting long rows.
constexpr bool kHalves = ROW_TILES == 1 && kRowBytes % kLine == 0 &&
                         !(kGeneral && kRowBytes == kLine) && !(kIsFp8 && kRowBytes > kLine);
constexpr int kParts = PARTS;
constexpr int kTileRows = 8 / kParts;  // query rows of a tile
static_assert(kParts == 1 || kHalves, "parts read whole lines");
constexpr int kKeyTokens = kHalves ? 4 : 8;       // of K's columns
constexpr int kColumnTiles = 16 / kKeyTokens;     // of 16 tokens
constexpr int kKeyLanes = kHalves ? 8 : 4;        // that share a token of K
constexpr int kKeySteps = kHalves ? kSteps / 2 : kSteps;
constexpr int kKeyUnit = unit_bytes(kRowBytes / kKeyLanes);
constexpr int kValueUnit = unit_bytes(kRowBytes / 8);  // 8 lanes share a token of V
constexpr int kKeyWords = kRowBytes / 4 / kKeyLanes;
constexpr int kValueWords = kValueUnit == 2 ? kRowBytes / 16 : kRowBytes / 32;
constexpr int kTokenTiles = kRowBytes <= 128 && kRowBytes % 32 == 0 ? 2 : 1;
constexpr int kTile = 16 * kTokenTiles;
// Long rows: K and V take turns in the same registers, 8 KB each is enough under way.
constexpr bool kTakeTurns = kRowBytes > 256;

using Keys = uint32[kTokenTiles][kColumnTiles][kKeyWords];
using Values = uint32[kTokenTiles][4][kValueWords];
using Scores = float[kTokenTiles * 2][4];  // score i of row tile n is s[i / 2][n * 2 + i % 2]

// The token of a tile that a lane's score i is of: those that the lane weighs.
__device__ __forceinline__ int token_of(int i) {
  const int j = threadIdx.x & 3;
  return kHalves ? i * 4 + j : i / 2 * 8 + j * 2 + i % 2;
}

// Running state: maxima and sums of rows g and g + 8, outputs of columns 2j and 2j + 1 of each row tile.
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

// Loads of K and V: streaming, since they are read once, unless teams beside each other read the same.
// Where `wanted` is 0 the registers keep what they hold: a branch around the load would cost copies of
// them, made where the load is waited for.
#if HEADS_FIRST
#define LOAD "ld.global"
#else
#define LOAD "ld.global.cs"
#endif
template <int kBytes>
__device__ __forceinline__ void load_unit(uint32* to, const char* from, int wanted) {
  if constexpr (kBytes == 16) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n"
        "@p " LOAD ".v4.u32 {%0,%1,%2,%3}, [%4];\n}"
        : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
        : "l"(from), "r"(wanted));
  } else if constexpr (kBytes == 8) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.s32 p, %3, 0;\n@p " LOAD ".v2.u32 {%0,%1}, [%2];\n}"
        : "+r"(to[0]), "+r"(to[1])
        : "l"(from), "r"(wanted));
  } else if constexpr (kBytes == 4) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p " LOAD ".u32 %0, [%1];\n}"
                 : "+r"(to[0])
                 : "l"(from), "r"(wanted));
  } else {
    asm volatile(
        "{\n.reg .pred p;\n.reg .u16 x;\nsetp.ne.s32 p, %2, 0;\n"
        "@p " LOAD ".u16 x, [%1];\n@p cvt.u32.u16 %0, x;\n}"
        : "+r"(to[0])
        : "l"(from), "r"(wanted));
  }
}
#undef LOAD

// `row`: lane l holds where token l (modulo kTile) lies, in rows of kHeadDim stored elements.
__device__ __forceinline__ void load_keys(Keys& k, const AttendParams& p, uint32 row, int wanted) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
  const int first = (kHalves ? g % 2 * 4 + j : j) * kKeyUnit;
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile)
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column) {
      const int token = tile * 16 + column * kKeyTokens + (kHalves ? g / 2 : g);
      const uint32 mine = __shfl_sync(kAllLanes, row, token);
      const char* at =
          static_cast<const char*>(p.k) + static_cast<uint64>(mine) * kRowBytes + first;
#pragma unroll
      for (int unit = 0; unit < kKeyWords * 4 / kKeyUnit; ++unit)
        load_unit<kKeyUnit>(&k[tile][column][unit * kKeyUnit / 4],
                            at + unit * kKeyLanes * kKeyUnit, wanted);
    }
}

// Where in each eight units of V lane group g has its one; lanes of different parts in different places.
__device__ __forceinline__ int value_place(int g, int part) {
  return (g * kValueUnit + part * (kLine / 4)) % (8 * kValueUnit);
}

__device__ __forceinline__ void load_values(Values& v, const AttendParams& p, uint32 row,
                                            int wanted) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
  constexpr int kUnits = kRowBytes / 8 / kValueUnit;
  const int first = value_place(g, j * kParts / 4);
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32 mine = __shfl_sync(kAllLanes, row, token_of(tile * 4 + i));
      const char* at =
          static_cast<const char*>(p.v) + static_cast<uint64>(mine) * kRowBytes + first;
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

// First of the two dims that row tile `t` of the output holds in lane group g, in columns of `part`.
__device__ __forceinline__ int output_dim(int t, int g, int part) {
  const int byte = t * 2 * kElementBytes;
  return (byte / kValueUnit * 8 * kValueUnit + value_place(g, part) + byte % kValueUnit) /
         kElementBytes;
}

// Q lies in shared memory as fragments, [kKeySteps][32 lanes] of 16 bytes: what a lane's unit of K meets.
// Where the fragment of four dims of a row, which begin at `dim`, has its first two; the others are 8 bytes
// on. `group`: lanes that have the row.
__device__ __forceinline__ int query_place(int row, int group, int dim) {
  constexpr int kDims = kKeyUnit / kElementBytes;  // of a unit
  const int unit = dim / kDims, lane = group * 4 + unit % 4;
  const int below = kHalves ? unit / 4 % 2 : row / 8;
  const int step = unit / kKeyLanes * (kDims / 4) + dim % kDims / 4;
  return (step * 32 + lane) * 16 + below * 4;
}

// S = Q K^T.
__device__ __forceinline__ void score(Scores& s, const Keys& k, const char* queries) {
  float sums[kTokenTiles * kColumnTiles][4] = {};
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    const uint4 q =
        *reinterpret_cast<const uint4*>(queries + (step * 32 + (threadIdx.x & 31)) * 16);
    const uint32 a[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int tile = 0; tile < kTokenTiles * kColumnTiles; ++tile) {
      uint32 b[2];
      key_fragment(b, k[tile / kColumnTiles][tile % kColumnTiles], step);
      multiply_add<kBf16>(sums[tile], a, b[0], b[1]);
    }
  }
#pragma unroll
  for (int tile = 0; tile < kTokenTiles * 2; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (!kHalves) {
        s[tile][i] = sums[tile][i];
      } else if (i < 2) {
        s[tile][i] = sums[tile * 2 + i][0] + sums[tile * 2 + i][3];
      }
    }
}

// Soft cap and scale; leaves base-2 scores. General scoring only.
__device__ __forceinline__ void cap(Scores& s, const AttendParams& p) {
#pragma unroll
  for (int tile = 0; tile < kTokenTiles * 2; ++tile)
#pragma unroll
    for (int i = 0; i < ROW_TILES * 2; ++i) {
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

// O^T += V^T P^T. A part's columns have weights from its own lanes only.
template <int kN>
__device__ __forceinline__ void weigh(Accumulator<kN>& acc, const Scores& s, const Values& v) {
  const int lane = threadIdx.x & 31;
  const bool mine = kParts == 1 || lane % 4 * kParts / 4 == lane / 4 / kTileRows;
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
    uint32 b[kN][2];
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        b[n][half] =
            mine ? pack<kBf16>(s[tile * 2 + half][n * 2], s[tile * 2 + half][n * 2 + 1]) : 0;
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
      uint32 a[4];
      value_fragment(a, v[tile], t);
#pragma unroll
      for (int n = 0; n < kN; ++n) multiply_add<kBf16>(acc.o[n][t], a, b[n][0], b[n][1]);
    }
  }
}
