// One warp's share of attention: kM * 16 packed query rows against a tile of kTokens keys in shared
// memory. Scores, masking, the online softmax and P.V all stay in registers: the accumulator layout
// of S is the operand layout of P.
//
// Fragment geometry (mma m16n8k16): lane = 4 * g + j holds rows g and g + 8 and columns 2j, 2j + 1.
// fp8 tiles use the freedom that only the pairing matters: within 16 dims of K, lane j takes dims
// 4j .. 4j + 3 (Q is permuted alike), and within 16 dims of V the even dims form one column tile and
// the odd dims the next, so that lane j of the output owns dims 4j .. 4j + 3.
#pragma once

#include "common/convert.cuh"
#include "common/mma.cuh"
#include "common/params.cuh"
#include "common/shape.cuh"
#include "common/state.cuh"
#include "tile/shared.cuh"

template <int kM>
struct Accumulator {
  float o[kM][kSteps * 2][4];
  float max[kM * 2];  // `lowered`, of raw scores, or, where scoring is general, of base-2 scores
  float sum[kM * 2];  // this lane's columns only until the end
};

template <int kM>
__device__ __forceinline__ void clear(Accumulator<kM>& acc) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kSteps * 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc.o[m][n][i] = 0.0f;
#pragma unroll
  for (int r = 0; r < kM * 2; ++r) {
    acc.max[r] = minus_infinity();
    acc.sum[r] = 0.0f;
  }
}

// s = Q K^T for one k step: a holds Q of every row tile, `keys` the tile in shared memory.
template <int kM, int kTokens>
__device__ __forceinline__ void score_step(float (&s)[kM][kTokens / 8][4],
                                           const uint32 (&a)[kM][4], uint32 keys, int step) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int t = 0; t < kTokens / 16; ++t) {
    uint32 b[4];
    if constexpr (kIsFp8) {
      uint32 raw[2];
      load_matrix_x2(raw, keys + (t * 16 + (lane & 15)) * kRowStride + step * 16);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        b[n * 2] = fp8_unpack<kFp8, kBf16>(raw[n]);
        b[n * 2 + 1] = fp8_unpack<kFp8, kBf16>(raw[n] >> 16);
      }
    } else {
      load_matrix_x4(b, keys + (t * 16 + (lane & 7) + ((lane >> 4) << 3)) * kRowStride +
                            step * 32 + ((lane >> 3) & 1) * 16);
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      multiply_add<kBf16>(s[m][t * 2], a[m], b[0], b[1]);
      multiply_add<kBf16>(s[m][t * 2 + 1], a[m], b[2], b[3]);
    }
  }
}

// Soft cap and scale; leaves base-2 scores. General scoring only.
template <int kM, int kTokens>
__device__ __forceinline__ void cap_scores(float (&s)[kM][kTokens / 8][4], const AttendParams& p) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[m][n][i] = capped_score(s[m][n][i], p.scale, p.soft_cap);
      }
}

// Online softmax: raise the running maximum, rescale what it changes, s becomes p = 2^(s c - max c).
template <int kM, int kTokens>
__device__ __forceinline__ void online_softmax(float (&s)[kM][kTokens / 8][4], Accumulator<kM>& acc,
                                       float c, float headroom) {
  float next[kM * 2];
  bool raised = false;
#pragma unroll
  for (int r = 0; r < kM * 2; ++r) {
    const auto score = [&](int i) { return s[r / 2][i / 2][(r & 1) * 2 + i % 2]; };
    const float highest = quad_max(highest_score<kTokens / 4>(minus_infinity(), score));
    next[r] = fmaxf(acc.max[r], lowered(highest, headroom));
    raised |= next[r] > acc.max[r];
  }
  if (__any_sync(kAllLanes, raised)) {
#pragma unroll
    for (int r = 0; r < kM * 2; ++r) {
      const float factor = state_rescale(acc.max[r], next[r], c);
      acc.max[r] = next[r];
      acc.sum[r] *= factor;
#pragma unroll
      for (int n = 0; n < kSteps * 2; ++n) {
        acc.o[r / 2][n][(r & 1) * 2] *= factor;
        acc.o[r / 2][n][(r & 1) * 2 + 1] *= factor;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kM * 2; ++r) {
    const auto score = [&](int i) -> float& { return s[r / 2][i / 2][(r & 1) * 2 + i % 2]; };
    acc.sum[r] += weigh_scores<kTokens / 4>(0.0f, acc.max[r], c, score);
  }
}

// acc.o += P V, V of the tile in shared memory.
template <int kM, int kTokens>
__device__ __forceinline__ void weigh_values(Accumulator<kM>& acc,
                                             const float (&s)[kM][kTokens / 8][4], uint32 values) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int t = 0; t < kTokens / 16; ++t) {
    uint32 a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      a[m][0] = pack<kBf16>(s[m][t * 2][0], s[m][t * 2][1]);
      a[m][1] = pack<kBf16>(s[m][t * 2][2], s[m][t * 2][3]);
      a[m][2] = pack<kBf16>(s[m][t * 2 + 1][0], s[m][t * 2 + 1][1]);
      a[m][3] = pack<kBf16>(s[m][t * 2 + 1][2], s[m][t * 2 + 1][3]);
    }
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      uint32 b[4];
      const uint32 row = values + (t * 16 + (lane & 15)) * kRowStride;
      if constexpr (kIsFp8) {
        uint32 raw[2];
        load_matrix_x2_transposed(raw, row + n * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // bytes: token 2j dim even, odd; token 2j + 1 dim even, odd -> evens low, odds high
          const uint32 sorted = __byte_perm(raw[i], 0, 0x3120);
          b[i] = fp8_unpack<kFp8, kBf16>(sorted);
          b[2 + i] = fp8_unpack<kFp8, kBf16>(sorted >> 16);
        }
      } else {
        load_matrix_x4_transposed(b, row + n * 32 + (lane >> 4) * 16);
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        multiply_add<kBf16>(acc.o[m][n * 2], a[m], b[0], b[1]);
        multiply_add<kBf16>(acc.o[m][n * 2 + 1], a[m], b[2], b[3]);
      }
    }
  }
}
