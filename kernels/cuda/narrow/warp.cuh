// One warp's arithmetic in the narrow kernel: kN * 8 packed query rows against kTile tokens whose K and
// V are in its registers, loaded straight from memory in the shape that the products need:
//
//   S [16 rows x 8 tokens] = Q [16 x dims] K^T,   O^T [16 dims x 8 rows] += V^T [16 x 16 tokens] P^T
//
// Fragment geometry (mma m16n8k16), lane = 4 * g + j: A holds rows g, g + 8 and columns 2j, 2j + 1,
// 2j + 8, 2j + 9; B column g and the same for rows; C rows g, g + 8 and columns 2j, 2j + 1. So S in C
// is P^T in B unchanged.
//
// Which dims a step of K's fragment has is free as long as Q agrees, and which dims a row of
// V^T's has, as long as the output is written alike. So lane j loads whole units of up to 16
// bytes of K's token g, lane g the same of V's tokens 2j, 2j + 1, 2j + 8, 2j + 9, and every load of
// the warp covers 64 or 128 neighbouring bytes of each row it touches. What a load of K brings is
// operand B without a move; V^T wants two tokens of one dim in a register, a byte permute each.
#pragma once

#include "common/convert.cuh"
#include "common/mma.cuh"
#include "common/params.cuh"
#include "common/shape.cuh"
#include "common/state.cuh"
#include "narrow/loads.cuh"

using Scores = float[kTokenTiles * 2][4];  // score i of row tile n is s[i / 2][n * 2 + i % 2]

// Running state: maxima and sums of rows g and g + 8, outputs of columns 2j and 2j + 1 of each row tile.
template <int kN>
struct Accumulator {
  float o[kN][kSteps][4];
  float max[kN];  // `lowered`, of raw scores, or, where scoring is general, of base-2 scores
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

// Q is in shared memory as fragments, [kKeySteps][32 lanes] of 16 bytes: the factors of a lane's unit of K.
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
__device__ __forceinline__ void online_softmax(Scores& s, Accumulator<kN>& acc, float c, float headroom) {
  const int j = threadIdx.x & 3;
  float next[kN];
  bool raised = false;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const auto score = [&](int i) { return s[i / 2 + 1][n * 2 + i % 2]; };
    const float first = fmaxf(s[0][n * 2], s[0][n * 2 + 1]);
    const float highest = quad_max(highest_score<kTokenTiles * 4 - 2>(first, score));
    next[n] = fmaxf(acc.max[n], lowered(highest, headroom));
    raised |= next[n] > acc.max[n];
  }
  if (__any_sync(kAllLanes, raised)) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float factor = state_rescale(acc.max[n], next[n], c);
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
    const auto score = [&](int i) -> float& { return s[i / 2][n * 2 + i % 2]; };
    acc.sum[n] = weigh_scores<kTokenTiles * 4>(acc.sum[n], acc.max[n], c, score);
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
