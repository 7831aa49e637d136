// The packed rows of a run in the narrow kernel: where they are, which keys they must not see, and their
// queries on the way to shared memory. ROW_TILES and PARTS say how many rows there may be.
#pragma once

#include "common/mma.cuh"
#include "common/params.cuh"
#include "common/rows.cuh"
#include "common/shape.cuh"
#include "common/state.cuh"
#include "common/work.cuh"
#include "narrow/warp.cuh"

constexpr int kN = ROW_TILES;
constexpr int kRows = kN * kTileRows;  // packed
static_assert(kN == 1 || kN == 2, "one fragment of Q");

// Item `index` of this worker's, or nothing to do past its last.
__device__ __forceinline__ WorkItem read_item(const AttendParams& p, int index, int end) {
  WorkItem item = {};
  if (index < end) {
    const int4* at = reinterpret_cast<const int4*>(p.items + index);
    const int4 a = at[0], b = at[1];
    item = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  }
  return item;
}

// The packed row that a lane has scores of, in row tile n.
__device__ __forceinline__ int my_row(int n) {
  return n * 8 + (threadIdx.x & 31) / 4 % kTileRows;
}

// Whether a row's query head is worked out with its place, while reads are under way: the division is too slow to be on
// the way of the queries. There are no registers for it heads first.
constexpr bool kKeepsHead = !kHeadsFirst;

// Where packed row `lane` of an item is, and by what rules it sees keys.
struct RowPlace {
  int query;     // row of q and o, in heads; -1: no such row
  int position;
  int head;      // query head, if kKeepsHead
};

__device__ __forceinline__ RowPlace find_row(const AttendParams& p, const WorkItem& item, int head) {
  const int lane = threadIdx.x & 31;
  RowPlace place = {-1, 0, 0};
  if (lane < item.num_rows) {
    const PackedRow row(item.row_begin + lane, p.group_size);
    place.query = row.query(p, head);
    place.head = row.query_head(p, head);
    place.position = p.positions[row.plan_row];
  }
  return place;
}

// Hide a row's invisible keys: past the run's end, in the future, outside the window, or masked.
struct RowRules {
  int position[kN];  // of rows my_row(0) and my_row(1)

  __device__ __forceinline__ void hide(Scores& s, const WorkItem& item, int first,
                                       const AttendParams& p) const {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const KeyRange keys =
          visible_keys({0, item.num_keys - 1}, item, position[n], p.window_left);
#pragma unroll
      for (int i = 0; i < kTokenTiles * 4; ++i) {
        const int key = first + token_of(i);
        bool visible = keys.has(key);
        if constexpr (kGeneral) {
          if (p.mask_bits != nullptr && visible && my_row(n) < item.num_rows) {
            const PackedRow row(item.row_begin + my_row(n), p.group_size);  // kept, it costs registers
            const int64 first_bit = p.mask_row_offsets[row.plan_row] + item.kv_start;
            visible = unmasked(p.mask_bits, first_bit + key);
          }
        }
        if (!visible) s[i / 2][n * 2 + i % 2] = minus_infinity();
      }
    }
  }
};

// A run's queries on their way from memory to shared memory.
struct Queries {
  static constexpr int kChunks = kHeadDim / 8;  // of a row, 16 bytes each
  static constexpr int kAll = kRows * kChunks;
  static constexpr int kLoads = (kAll + 31) / 32;
  uint4 x[kLoads];

  // `query`: lane r's row r; rows that are not there are zeros.
  __device__ __forceinline__ void load(const AttendParams& p, int query) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int chunk = i * 32 + (threadIdx.x & 31);
      const int from = __shfl_sync(kAllLanes, query, chunk / kChunks);
      x[i] = make_uint4(0, 0, 0, 0);
      if (from >= 0 && chunk < kAll)
        x[i] = *reinterpret_cast<const uint4*>(
            static_cast<const char*>(p.q) +
            (static_cast<int64>(from) * kHeadDim + chunk % kChunks * 8) * 2);
    }
  }
  __device__ __forceinline__ void store(char* fragments) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int chunk = i * 32 + (threadIdx.x & 31);
      if (chunk >= kAll) break;
      const int row = chunk / kChunks, dim = chunk % kChunks * 8;
      const uint32 words[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const int group = row % 8 + part * kTileRows;
          uint32* fragment =
              reinterpret_cast<uint32*>(fragments + query_place(row, group, dim + half * 4));
          fragment[0] = words[half * 2];
          fragment[2] = words[half * 2 + 1];
        }
    }
  }
};
