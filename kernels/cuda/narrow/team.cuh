// A block's warps and their teams in the narrow kernel: what of shared memory each warp owns, and how at the
// end of an item its warps' states of it become one and are written.
#pragma once

#include "common/mma.cuh"
#include "common/params.cuh"
#include "common/rows.cuh"
#include "common/shape.cuh"
#include "common/state.cuh"
#include "common/work.cuh"
#include "narrow/rows.cuh"
#include "narrow/warp.cuh"

constexpr int kWarps = WARPS;
constexpr int kThreads = kWarps * 32;
constexpr int kStateStride = kHeadDim + 4;  // floats
constexpr int kQueryBytes = kKeySteps * 32 * 16;
constexpr int kStateBytes = 8 * kStateStride * 4;
constexpr int kRowsAt = kQueryBytes + kStateBytes + 64, kRowsBytes = (kRows * 4 + 15) / 16 * 16;
constexpr int kWarpBytes = kRowsAt + 2 * kRowsBytes;

// A warp's part of shared memory.
struct WarpShared {
  char* at;
  __device__ __forceinline__ char* queries() const { return at; }  // as fragments
  __device__ __forceinline__ float* o(int column) const {  // of O^T, of a row tile
    return reinterpret_cast<float*>(at + kQueryBytes) + column * kStateStride;
  }
  __device__ __forceinline__ float* max_sum(int row) const {
    return reinterpret_cast<float*>(at + kQueryBytes + kStateBytes) + row * 2;
  }
  __device__ __forceinline__ int& query(int row) const {  // row of q and o, in heads
    return reinterpret_cast<int*>(at + kRowsAt)[row];
  }
  __device__ __forceinline__ float& sink(int row) const {
    return reinterpret_cast<float*>(at + kRowsAt + kRowsBytes)[row];
  }
  // Describes row `row` of an item; the sink of a final one is on the way until `write_state`.
  __device__ __forceinline__ void describe(int row, const RowPlace& place, const WorkItem& item, int head,
                                           const AttendParams& p) const {
    query(row) = place.query;
    if (has_sinks(p) && item.partial == kFinal && place.query >= 0) {
      const PackedRow packed(item.row_begin + row, p.group_size);
      const int query_head = kKeepsHead ? place.head : packed.query_head(p, head);
      copy_async_4(&sink(row), p.sinks + (p.sinks_of_rows ? place.query : query_head));
    }
  }
};

// The warps of a team.
struct Team {
  int size, rank, name;
  __device__ __forceinline__ void meet() const {
    if (size == 1) {
      __syncwarp();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(size * 32) : "memory");
    }
  }
};

// Puts the team's states of an item together and writes them: final rows, or partial ones.
__device__ __forceinline__ void write_state(const Accumulator<kN>& acc, const AttendParams& p,
                                            const WorkItem& item, int head, float c, WarpShared own,
                                            const Team& team) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
  const bool final = item.partial == kFinal;
  if (has_sinks(p) && final) copy_async_wait_all();
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    if (n * 8 >= item.num_rows) break;
    const float sum = quad_sum(acc.sum[n]);
    if (j == 0) {
      own.max_sum(g)[0] = acc.max[n] * c;
      own.max_sum(g)[1] = sum;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = j * 2 + i, part = column / kTileRows;
      if (n * 8 + column % kTileRows < item.num_rows) {
#pragma unroll
        for (int t = 0; t < kSteps; ++t)
          *reinterpret_cast<float2*>(own.o(column) + output_dim(t, g, part)) =
              make_float2(acc.o[n][t][i], acc.o[n][t][2 + i]);
      }
    }
    team.meet();
    const int units = min(kTileRows, item.num_rows - n * 8) * (kHeadDim / 4);
    const WarpShared leader{own.at - team.rank * kWarpBytes};
    for (int unit = team.rank * 32 + lane; unit < units; unit += team.size * 32) {
      const int row = unit / (kHeadDim / 4), dim = unit % (kHeadDim / 4) * 4;
      // a sink is the first member, whose o is 0
      const bool sunk = has_sinks(p) && final;
      const float natural = sunk ? own.sink(n * 8 + row) : minus_infinity(), sink = sink_maximum(natural);
      float max = sink;
#pragma unroll 4
      for (int w = 0; w < team.size; ++w)
        max = fmaxf(max, WarpShared{leader.at + w * kWarpBytes}.max_sum(row)[0]);
      float sum = state_rescale(sink, max);
      float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
      for (int w = 0; w < team.size; ++w) {
        const WarpShared member{leader.at + w * kWarpBytes};
        const float2 state = *reinterpret_cast<const float2*>(member.max_sum(row));
        const float weight = state_rescale(state.x, max);
        const bool live = state.y != 0.0f;  // else its o may come from a hidden inf or NaN
        sum = fmaf(state.y, weight, sum);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const float4 x =
              *reinterpret_cast<const float4*>(member.o(row + part * kTileRows) + dim);
          o.x = fmaf(live ? x.x : 0.0f, weight, o.x), o.y = fmaf(live ? x.y : 0.0f, weight, o.y);
          o.z = fmaf(live ? x.z : 0.0f, weight, o.z), o.w = fmaf(live ? x.w : 0.0f, weight, o.w);
        }
      }
      const float inverse = state_inverse(sum) * p.v_scale;
      const float lse = sunk && max == sink ? state_merged_lse(natural, sum) : state_lse(max, sum);
      o.x *= inverse, o.y *= inverse, o.z *= inverse, o.w *= inverse;
      const int64 at = final ? own.query(n * 8 + row)
                             : partial_place(item.partial + n * 8 + row, p.num_kv_heads, head);
      if (dim == 0) (final ? p.lse : p.partial_lse)[at] = lse;
      if (final) {
        *reinterpret_cast<uint2*>(static_cast<uint16*>(p.o) + at * kHeadDim + dim) =
            make_uint2(pack<kBf16>(o.x, o.y), pack<kBf16>(o.z, o.w));
      } else {
        *reinterpret_cast<float4*>(p.partial_o + at * kHeadDim + dim) = o;
      }
    }
    team.meet();
  }
}
