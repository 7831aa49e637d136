// K and V of 16-bit pools whose pages the copy engine does not take: of sizes that are no whole groups of 8 slots, or
// above 64. The warps that would ask for pages copy tokens, 16 bytes a lane, to where it leaves ragged tiles.
//
// A lane looks up one token of each 32. Copies of a whole ring are under way, and page ids a tile at a time: any page
// size costs the same. Tokens past a run's end are zeros, and nothing is read for them.
#pragma once

#include "wide/hopper.cuh"
#include "wide/movers.cuh"
#include "wide/params.cuh"
#include "wide/ring.cuh"
#include "wide/shared.cuh"
#include "wide/walk.cuh"

// One warp copies the K (or V) tiles of every unit, last tile first.
template <bool kOfKeys>
__device__ __forceinline__ void stream_tokens(const Shared& shared, const StoredKv& kv,
                                              const WideParams& params) {
  constexpr int kLookups = kTileKeys / 32, kAtOnce = 2;
  constexpr uint32 kNoRow = 0xffffffffu;
  static_assert(kTileKeys % 32 == 0, "a lane looks up one token of each 32");
  const uint32 tiles = kOfKeys ? shared.keys(0) : shared.values(0);
  const uint32 full = kOfKeys ? shared.keys_full(0) : shared.values_full(0);
  const uint32 empty = kOfKeys ? shared.keys_empty(0) : shared.values_empty(0);
  // at a time eight lanes take 64 dims of a token each, of four tokens
  const int lane = threadIdx.x % 32, chunk = lane % 8, quarter = lane / 8;
  const int even = quarter * 128 + (chunk ^ quarter) * 16;
  const int odd = (quarter + 4) * 128 + (chunk ^ (quarter + 4)) * 16;
  const char* base = static_cast<const char*>(kOfKeys ? kv.k : kv.v) + chunk * 16;
  Ring<kUnitSlots> units;
  Ring<kStages> ring;
  Unit unit;
  while (next_unit(shared, units, unit)) {
    const WorkItem& item = unit.item;
    const uint32 first = item.layer * kv.layer_rows + unit.head * kv.head_rows;
    for (TileCursor cursor(unit, params); cursor.tile >= 0; cursor.advance()) {
      uint32 rows[kLookups];
#pragma unroll
      for (int i = 0; i < kLookups; ++i) {
        const int token = cursor.tile * kTileKeys + i * 32 + lane;
        rows[i] = kNoRow;
        if (token < item.num_keys) {
          const int page = static_cast<uint32>(token) / static_cast<uint32>(kv.page_size);
          rows[i] = first + (token - page * kv.page_size) * kv.token_rows +
                    params.kv_indices[item.kv_begin + page] * kv.page_rows;
        }
      }
      wait_to_begin(params);
      announce_end<kOfKeys>(shared, item, cursor, params);
      barrier_wait(empty + ring.stage() * 8, ring.parity() ^ 1);
      const uint32 target = tiles + ring.stage() * kTileBytes, barrier = full + ring.stage() * 8;
#pragma unroll
      for (int i = 0; i < kLookups; ++i) {
#pragma unroll
        for (int first = 0; first < 8; first += kAtOnce) {
          uint32 row[kAtOnce];  // all before the first copy, which none of them passes
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j)
            row[j] = __shfl_sync(kAllLanes, rows[i], (first + j) * 4 + quarter);
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) {
            const bool there = row[j] != kNoRow;
            const char* from = base + static_cast<uint64>(there ? row[j] : 0) * (kHeadDim * 2);
            const uint32 to = target + (j % 2 ? odd : even) + (i * 4 + (first + j) / 2) * kGroupStride;
#pragma unroll
            for (int block = 0; block < kBlocks; ++block)
              copy_chunk(to + block * kBlockStride, from + block * 128, there);
          }
        }
      }
      barrier_arrive_copied(barrier);
      if (elect_lane()) {
        if (kOfKeys) publish_visit(shared, ring.stage(), cursor);
        barrier_arrive(barrier);
      }
      ring.advance();
    }
  }
}
