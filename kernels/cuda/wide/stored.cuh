// The data movers of the wide kernel for fp8 pools: all four warps of the first warpgroup copy stored K and V into
// shared memory and leave them, converted to the 16 bits that the products take, where the copy engine leaves the
// tiles of other pools. They take the units and gather the query rows as well.
//
// With eight warps, where there is a warpgroup for them, four have the keys and four the values.
//
// A warp has a quarter of a tile's tokens, and each lane converts what it has copied itself, so that nothing but its
// own copies is waited for: the staging memory is as good as more registers. Copies are up to two tiles ahead of the
// conversion, and page ids a tile ahead of the copies, one per lane: any page size costs the same.
// Tokens past a run's end are zeros, and nothing is read for them.
//
// Memory traffic: each stored byte of a run once per 64 * kConsumers rows, through L2: half of what 16 bits take.
#pragma once

#include "common/convert.cuh"
#include "wide/hopper.cuh"
#include "wide/movers.cuh"
#include "wide/params.cuh"
#include "wide/ring.cuh"
#include "wide/shared.cuh"
#include "wide/walk.cuh"

constexpr bool kApart = kMovers == 8;  // four warps have K, four V: else each warp has both, in turn
constexpr int kMoverTokens = kTileKeys / 4;  // of a tile, per warp
constexpr int kMoverGroups = kMoverTokens / 8;
constexpr int kMoverChunks = kMoverGroups * kBlocks;  // of 16 bytes, per lane
constexpr int kChunksAtOnce = kApart ? kMoverChunks : kMoverChunks % 4 == 0 ? 4 : 2;
static_assert(kMoverChunks % kChunksAtOnce == 0, "whole turns");
constexpr uint32 kNoRow = 0xffffffffu;
constexpr int kAhead = kApart ? kStaged / 2 : kStaged;  // copies under way, per warp
static_assert(kMoverTokens <= 32, "a lane looks up one token");
static_assert(kMoverTokens % 8 == 0, "eight quads of lanes, a token each");

// This lane's part of a tile in the staging memory: 16 bytes of each 512.
__device__ __forceinline__ uint32 staged_place(uint32 staging) {
  return staging + threadIdx.x / 32 % 4 * (kStagedBytes / 4) + threadIdx.x % 32 * 16;
}

// Copies this warp's tokens of a tile; lane t has in `rows` the row of the warp's token t. At a time its eight quads
// take 64 neighbouring values of eight neighbouring tokens, 16 a lane.
__device__ __forceinline__ void copy_stored(uint32 staging, const void* base, uint32 rows) {
  const int quad = threadIdx.x % 32 / 4, part = threadIdx.x % 4;
  const uint32 to = staged_place(staging);
#pragma unroll
  for (int group = 0; group < kMoverGroups; ++group) {
    const uint32 row = __shfl_sync(kAllLanes, rows, group * 8 + quad);
    const bool there = row != kNoRow;
    const char* from = static_cast<const char*>(base) +
                       static_cast<uint64>(there ? row : 0) * kRowBytes + part * 16;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
      copy_chunk(to + (group * kBlocks + block) * 512, from + block * 64, there);
  }
  copy_async_commit();
}

__device__ __forceinline__ void write_converted(uint32 at, uint32 low, uint32 high) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at),
               "r"(fp8_unpack<kFp8, kBf16>(low)), "r"(fp8_unpack<kFp8, kBf16>(low >> 16)),
               "r"(fp8_unpack<kFp8, kBf16>(high)), "r"(fp8_unpack<kFp8, kBf16>(high >> 16))
               : "memory");
}

__device__ __forceinline__ uint4 read_chunk(uint32 at) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(at)
               : "memory");
  return x;
}

// Leaves the tile that this warp copied first of those not converted, converted, at `tile`.
__device__ __forceinline__ void convert_stored(uint32 tile, uint32 staging) {
  // a token's two chunks of 16 bytes, swizzled: quads beside each other reach different banks
  const int key = threadIdx.x % 32 / 4, chunk = threadIdx.x % 4 * 2;
  const uint32 from = staged_place(staging);
  const uint32 mine = tile + threadIdx.x / 32 % 4 * (kMoverGroups * kGroupStride) + key * 128;
  const uint32 low = mine + (chunk ^ key) * 16, high = mine + ((chunk + 1) ^ key) * 16;
  copy_async_wait<kAhead - 1>();
#pragma unroll
  for (int first = 0; first < kMoverChunks; first += kChunksAtOnce) {
    uint4 x[kChunksAtOnce];  // all are asked for before the first is converted
#pragma unroll
    for (int i = 0; i < kChunksAtOnce; ++i) x[i] = read_chunk(from + (first + i) * 512);
#pragma unroll
    for (int i = 0; i < kChunksAtOnce; ++i) {
      const int group = (first + i) / kBlocks, block = (first + i) % kBlocks;
      const uint32 at = group * kGroupStride + block * kBlockStride;
      write_converted(low + at, x[i].x, x[i].y);
      write_converted(high + at, x[i].z, x[i].w);
    }
  }
}

// Finds the rows of one tile after the other, of all units; the first warp also takes the units.
struct RowLookup {
  Ring<kUnitSlots> units;  // whose tile was looked up
  TileCursor cursor;
  int number;     // of the next unit to publish
  int done = 0;   // keys of its item
  uint32 taken = 0;
  int page;       // of this lane's token of the tile looked up; the id is in flight
  uint32 within;  // its row but for the page; kNoRow: no such token

  __device__ __forceinline__ RowLookup(const Shared& shared, const WideParams& params,
                                       const StoredKv& kv)
      : number(threadIdx.x < 32 ? first_unit(params) : 0) {
    enter(shared, params);
    look_up(shared, params, kv);
  }

  // The rows of the tile looked up; looks up the next one.
  __device__ __forceinline__ uint32 next(const Shared& shared, const WideParams& params,
                                         const StoredKv& kv) {
    const uint32 rows = within == kNoRow ? kNoRow : within + page * kv.page_rows;
    if (cursor.tile >= 0) {
      cursor.advance();
      if (cursor.tile < 0) {
        units.advance();
        enter(shared, params);
      }
      look_up(shared, params, kv);
    }
    return rows;
  }

 private:
  // A unit stays where it was published until its last tile has been converted.
  __device__ __forceinline__ void enter(const Shared& shared, const WideParams& params) {
    if (threadIdx.x < 32) number = publish_unit(shared, units, number, done, taken, params);
    barrier_wait(shared.unit_full(units.stage()), units.parity());
    const Unit& unit = shared.unit(units.stage());
    cursor.tile = -1;  // no further unit
    if (unit.head >= 0) cursor = TileCursor(unit, params);
  }

  __device__ __forceinline__ void look_up(const Shared& shared, const WideParams& params,
                                          const StoredKv& kv) {
    const Unit& unit = shared.unit(units.stage());
    const int lane = threadIdx.x % 32;
    const int token = cursor.tile * kTileKeys + threadIdx.x / 32 % 4 * kMoverTokens + lane;
    within = kNoRow;
    if (lane < kMoverTokens && cursor.tile >= 0 && token < unit.item.num_keys) {
      const int index = static_cast<uint32>(token) / static_cast<uint32>(kv.page_size);
      within = unit.item.layer * kv.layer_rows + unit.head * kv.head_rows +
               (token - index * kv.page_size) * kv.token_rows;
      page = params.kv_indices[unit.item.kv_begin + index];
    }
  }
};

// A tile of this warp is complete: the tensor cores can read it.
__device__ __forceinline__ void hand_over(uint32 barrier) {
  fence_async_proxy();
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// A warp's way through all units.
__device__ __forceinline__ void stream_stored(const Shared& shared, const WideParams& params,
                                              const StoredKv& kv) {
  constexpr int kRowsPerWarp = kTileRows / kGatherers;
  RowLookup lookup(shared, params, kv);
  Ring<kUnitSlots> units;
  Ring<kStages> ring;
  // copies go round the staging memory: K of a tile, its V, K of the next one; or those of one of them
  const bool has_keys = !kApart || threadIdx.x < 128, has_values = !kApart || !has_keys;
  const int own = kApart && has_values ? kAhead : 0;
  uint32 rows, copied = 0;
  const auto copy_next = [&](bool of_keys) {
    if (of_keys || kApart) rows = lookup.next(shared, params, kv);
    copy_stored(shared.staged(own + copied % kAhead), of_keys ? kv.k : kv.v, rows);
    ++copied;
  };
  wait_to_begin(params);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) copy_next(kApart ? has_keys : i % 2 == 0);
  for (uint32 gathered = 0;; units.advance()) {
    const Unit& unit = shared.unit(units.stage());
    barrier_wait(shared.unit_full(units.stage()), units.parity());
    if (unit.head < 0) break;
    if (threadIdx.x < kGatherers * 32 && !is_same_rows(unit.item)) {
      const Ring<kQueryStages> queries{gathered};
      const Ring<kRowSlots> slots{gathered};
      ++gathered;
      barrier_wait(shared.query_empty(queries.stage()), queries.parity() ^ 1);
      gather_rows<kRowsPerWarp>(shared, params, unit, threadIdx.x / 32 * kRowsPerWarp,
                                queries.stage(), slots.stage());
    }
    for (TileCursor cursor(unit, params); cursor.tile >= 0; cursor.advance()) {
      if (has_keys) {
        barrier_wait(shared.keys_empty(ring.stage()), ring.parity() ^ 1);
        convert_stored(shared.keys(ring.stage()), shared.staged(own + copied % kAhead));
        if (threadIdx.x == 0) publish_visit(shared, ring.stage(), cursor);
        hand_over(shared.keys_full(ring.stage()));
        copy_next(kApart || kAhead % 2 == 0);
      }
      if (has_values) {
        barrier_wait(shared.values_empty(ring.stage()), ring.parity() ^ 1);
        convert_stored(shared.values(ring.stage()), shared.staged(own + copied % kAhead));
        hand_over(shared.values_full(ring.stage()));
        copy_next(!kApart && kAhead % 2 != 0);
      }
      ring.advance();
    }
    barrier_arrive(shared.unit_empty(units.stage()));
  }
}
