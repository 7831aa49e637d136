// The packed rows of one warp's tile: where their queries are, which keys they must not see, and where their
// results go. Fragment geometry as in warp.cuh.
#pragma once

#include "common/mma.cuh"
#include "common/params.cuh"
#include "common/rows.cuh"
#include "common/shape.cuh"
#include "common/state.cuh"
#include "common/work.cuh"
#include "tile/warp.cuh"

// What one warp knows about the rows of its tile. Index m * 2 + half is row m * 16 + half * 8 + g.
template <int kM>
struct Rows {
  int query[kM * 2];     // row of q and o (in heads), or -1 past the tile's rows
  int position[kM * 2];
  int64 mask[kM * 2];    // bit of key position 0; used with a custom mask only
};

template <int kM>
__device__ __forceinline__ void find_rows(Rows<kM>& rows, const AttendParams& p,
                                          const WorkItem& item, int first_row, int head) {
  const int g = (threadIdx.x & 31) >> 2;
#pragma unroll
  for (int r = 0; r < kM * 2; ++r) {
    const int in_tile = first_row + r * 8 + g;
    rows.query[r] = -1;
    rows.position[r] = 0;
    rows.mask[r] = 0;
    if (in_tile < item.num_rows) {
      const PackedRow row(item.row_begin + in_tile, p.group_size);
      rows.query[r] = row.query(p, head);
      rows.position[r] = p.positions[row.plan_row];
      if (kGeneral && p.mask_bits != nullptr) rows.mask[r] = p.mask_row_offsets[row.plan_row];
    }
  }
}

// Hide a row's invisible keys: past the run's end, in the future, outside the window, or masked.
// `first` is the index in the run of the tile's first key.
template <int kM, int kTokens>
__device__ __forceinline__ void hide_scores(float (&s)[kM][kTokens / 8][4], const Rows<kM>& rows,
                                            const WorkItem& item, int first,
                                            const AttendParams& p) {
  const int j = threadIdx.x & 3;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = m * 2 + half;
      const KeyRange keys =
          visible_keys({0, item.num_keys - 1}, item, rows.position[r], p.window_left);
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = first + n * 8 + j * 2 + i;
          bool visible = keys.has(key);
          if constexpr (kGeneral) {
            if (p.mask_bits != nullptr && visible && rows.query[r] >= 0)
              visible = unmasked(p.mask_bits, rows.mask[r] + item.kv_start + key);
          }
          if (!visible) s[m][n][half * 2 + i] = minus_infinity();
        }
    }
}

// Normalise and write: the final rows of o and lse, or partial rows for the merge.
template <int kM>
__device__ __forceinline__ void write_state(Accumulator<kM>& acc, const Rows<kM>& rows,
                                            const AttendParams& p, const WorkItem& item,
                                            int first_row, int head, float c) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
#pragma unroll
  for (int r = 0; r < kM * 2; ++r) {
    const float sum = quad_sum(acc.sum[r]);
    if (rows.query[r] < 0) continue;
    const float inverse = state_inverse(sum) * p.v_scale;
    float lse = state_lse(acc.max[r] * c, sum);
    const bool final = item.partial == kFinal;
    const int64 row =
        final ? rows.query[r]
              : partial_place(item.partial + first_row + r * 8 + g, p.num_kv_heads, head);
    const int query_head = PackedRow(item.row_begin + first_row + r * 8 + g, p.group_size).query_head(p, head);
    const float kept = final ? add_sink(lse, sink_of(p, query_head, row)) : 1.0f;
    if (j == 0) (final ? p.lse : p.partial_lse)[row] = lse;
    uint32* o = static_cast<uint32*>(p.o) + row * (kHeadDim / 2);
    float* partial = p.partial_o + row * kHeadDim;
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      const int i = (r & 1) * 2;
      const float a0 = state_output(acc.o[r / 2][n * 2][i], inverse) * kept,
                  a1 = state_output(acc.o[r / 2][n * 2][i + 1], inverse) * kept;
      const float b0 = state_output(acc.o[r / 2][n * 2 + 1][i], inverse) * kept,
                  b1 = state_output(acc.o[r / 2][n * 2 + 1][i + 1], inverse) * kept;
      if constexpr (kIsFp8) {
        if (final) {
          *reinterpret_cast<uint2*>(o + n * 8 + j * 2) =
              make_uint2(pack<kBf16>(a0, b0), pack<kBf16>(a1, b1));
        } else {
          *reinterpret_cast<float4*>(partial + n * 16 + j * 4) = make_float4(a0, b0, a1, b1);
        }
      } else if (final) {
        o[n * 8 + j] = pack<kBf16>(a0, a1);
        o[n * 8 + 4 + j] = pack<kBf16>(b0, b1);
      } else {
        *reinterpret_cast<float2*>(partial + n * 16 + j * 2) = make_float2(a0, a1);
        *reinterpret_cast<float2*>(partial + n * 16 + 8 + j * 2) = make_float2(b0, b1);
      }
    }
  }
}
