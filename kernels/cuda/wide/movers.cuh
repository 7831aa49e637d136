// The data movers of the wide kernel: the first warpgroup, which multiplies nothing. Warp 0 streams the K
// tiles and warp 1 the V tiles of every unit; warp 2 takes the units, and gathers their query rows with
// warp 3. What each of them writes is waited for, and its place given back, through the barriers of `Shared`.
#pragma once

#include "common/overlap.cuh"
#include "common/rows.cuh"
#include "wide/params.cuh"
#include "wide/hopper.cuh"
#include "wide/ring.cuh"
#include "wide/shared.cuh"
#include "wide/walk.cuh"

// Waits until what this launch reads has been written, and what it writes read: all but the plan. A launch beside
// another begins after that, and waits for the other at its end.
__device__ __forceinline__ void wait_to_begin(const WideParams& params) {
  if (params.own_units > 0) wait_for_predecessor();
}

// Where units are taken late, lets the next one be taken: the last tile of this one's keys is about to be asked for.
template <bool kOfKeys>
__device__ __forceinline__ void announce_end(const Shared& shared, const WorkItem& item,
                                             const TileCursor& cursor, const WideParams& params) {
  if (kMayBeLate && kOfKeys && params.late && cursor.next < 0 && !(item.rules & kFollowed) && elect_lane())
    barrier_arrive(shared.unit_ending());
}

// One warp streams the K (or V) tiles of every unit, last tile first.
template <bool kOfKeys>
__device__ __forceinline__ void stream_tiles(const Shared& shared, const TensorMap* map,
                                             const WideParams& params) {
  const uint32 tiles = kOfKeys ? shared.keys(0) : shared.values(0);
  const uint32 full = kOfKeys ? shared.keys_full(0) : shared.values_full(0);
  const uint32 empty = kOfKeys ? shared.keys_empty(0) : shared.values_empty(0);
  const int lane = threadIdx.x % 32;
  if (lane == 0) prefetch_map(map);
  Ring<kUnitSlots> units;
  Ring<kStages> ring;
  Unit unit;
  while (next_unit(shared, units, unit)) {
    const WorkItem& item = unit.item;
    for (TileCursor cursor(unit, params); cursor.tile >= 0; cursor.advance()) {
      const int tile = cursor.tile;
      const uint32 target = tiles + ring.stage() * (kOfKeys ? kTileBytes : kValueTileBytes);
      const uint32 barrier = full + ring.stage() * 8;
#if PAGE_SIZE > 0
      constexpr int kBytes = kOfKeys ? kPageBytes : kValuePageBytes;
      const int first_page = tile * kPagesPerTile;
      const int num_pages = min(kPagesPerTile, ceil_div(item.num_keys, kPageSize) - first_page);
      const int* ids = params.kv_indices + item.kv_begin + first_page;
      const int mine = lane < num_pages ? ids[lane] : 0;
      wait_to_begin(params);
      announce_end<kOfKeys>(shared, item, cursor, params);
#pragma unroll
      for (int first = 0; first < kPagesPerTile; first += kPagesAtOnce) {
        int pages[kPagesAtOnce];
#pragma unroll
        for (int i = 0; i < kPagesAtOnce; ++i) {
          pages[i] = __shfl_sync(kAllLanes, mine, first + i);
        }
        if (first == 0) barrier_wait(empty + ring.stage() * 8, ring.parity() ^ 1);
        if (elect_lane()) {
          if (first == 0) {
            if (kOfKeys) publish_visit(shared, ring.stage(), cursor);
            barrier_arrive_expect(barrier, num_pages * kBytes);
          }
#pragma unroll
          for (int i = 0; i < kPagesAtOnce; ++i) {
            if (first + i < num_pages) {
              const int blocks = kOfKeys ? params.head_blocks : value_blocks(params.head_blocks);
              copy_box(target + (first + i) * kBytes, map, barrier, 0, 0, unit.head * blocks,
                       unit.head * params.head_groups, item.layer * params.num_pages + pages[i]);
            }
          }
        }
      }
#else
      wait_to_begin(params);
      announce_end<kOfKeys>(shared, item, cursor, params);
      barrier_wait(empty + ring.stage() * 8, ring.parity() ^ 1);
      if (elect_lane()) {
        if (kOfKeys) publish_visit(shared, ring.stage(), cursor);
        barrier_arrive_expect(barrier, kOfKeys ? kTileBytes : kValueTileBytes);
#pragma unroll
        for (int block = 0; block < (kOfKeys ? kBlocks : kValueBlocks); ++block) {
          copy_box(target + block * kBlockStride, map, barrier, 0, item.kv_begin + tile * kTileKeys,
                   unit.head * (kOfKeys ? kBlocks : kValueBlocks) + block);
        }
      }
#endif
      ring.advance();
    }
  }
}

// The number of the CTA's first unit, in lane 0: its own number where all CTAs begin together. Others begin
// when the kernel beside them ends, and would find their own units, the dearest, left for the end: there all units
// come from the counter.
__device__ __forceinline__ int first_unit(const WideParams& params) {
  if (params.own_units > 0) return blockIdx.x;
  return threadIdx.x % 32 == 0 ? atomicAdd(params.schedule, 1u) : 0;
}

// Leaves in `item` its split after `done` keys, and in `done` where the next one begins; false: it was the last.
__device__ __forceinline__ bool take_split(WorkItem& item, int& done, const WideParams& params) {
  const int first = item.kv_start + done;
  const int begun = first < params.first_split ? params.split_keys - params.first_split + first : first;
  const int keys = ceil_div(params.split_keys - begun % params.split_keys, params.page_size) * params.page_size;
  const int rest = item.num_keys - done;
  const bool more = keys < rest;
  item.rules |= (done > 0 ? kFollows : 0) | (more ? kFollowed : 0);
  item.kv_begin += done / params.page_size;
  item.num_keys = min(keys, rest);
  item.kv_start = first;
  done = more ? done + keys : 0;
  return more;
}

constexpr int kNotTaken = -1;

// Publishes unit `number` of the list and returns the number of the next, which is in flight: lane 0 has both. Where
// units are taken late, the next has no number yet: a CTA with a long unit would keep another from the rest.
// The list goes through all items for the first
// `head_block` kv heads, then for the next ones: bytes read together then fit the L2 cache. The last
// CTA to finish puts the counter back to 0 for the next launch. Of fixed splits a unit is one of its item's, after
// `done` keys; the number stays until the last of them.
__device__ __forceinline__ int publish_unit(const Shared& shared, const Ring<kUnitSlots>& ring,
                                            int number, int& done, uint32& taken,
                                            const WideParams& params) {
  barrier_wait(shared.unit_empty(ring.stage()), ring.parity() ^ 1);
  int next = 0;
  if (threadIdx.x % 32 == 0) {
    if (kMayBeLate && number == kNotTaken) {
      barrier_wait(shared.unit_ending(), taken++ & 1);
      number = params.own_units + atomicAdd(params.schedule, 1u);
    }
    Unit& unit = shared.unit(ring.stage());
    if (number < params.num_items * params.num_kv_heads) {
      const int turn = number / (params.num_items * params.head_block);
      const int inner = number % (params.num_items * params.head_block);
      unit.index = inner / params.head_block;
      WorkItem item = params.items[unit.index];
      const bool more = SPLITS && take_split(item, done, params);
      unit.item = item;
      unit.head = turn * params.head_block + inner % params.head_block;
      barrier_arrive(shared.unit_full(ring.stage()));
      wait_to_begin(params);  // the counters are the predecessor's, too
      const bool late = kMayBeLate && params.late;
      next = more ? number : late ? kNotTaken : params.own_units + atomicAdd(params.schedule, 1u);
    } else {
      unit.head = -1;
      barrier_arrive(shared.unit_full(ring.stage()));
      const uint32 last = gridDim.x - 1;
      if (atomicInc(params.schedule + 1, last) == last) atomicExch(params.schedule, 0u);
    }
  }
  return next;
}

// Brings this warp's rows of q, one copy each, to where the consumers take them into registers. Rows that are not
// there keep what is there: no row's scores move another's. The barrier of a unit's queries hears of each thread once.
template <int kRowsPerLane>
__device__ __forceinline__ void copy_rows(const Shared& shared, const WideParams& params,
                                          const UnitRow (&rows)[kRowsPerLane], int first_row, int stage) {
  const uint32 barrier = shared.query_full(stage);
  int count = 0;
#pragma unroll
  for (int i = 0; i < kRowsPerLane; ++i) count += rows[i].source >= 0;
  barrier_arrive_expect(barrier, count * kQueryRowBytes);
#pragma unroll
  for (int i = 0; i < kRowsPerLane; ++i) {
    if (rows[i].source < 0) continue;
    const int row = first_row + i * 32 + threadIdx.x % 32;
    copy_bytes(shared.queries(stage) + query_offset(row, 0),
               static_cast<const char*>(params.q) + static_cast<int64>(rows[i].source) * kQueryRowBytes,
               kQueryRowBytes, barrier);
  }
}

// Brings this warp's rows of q, swizzled as the products read them, 512 bytes of neighbouring rows at a time. The
// barrier hears of each thread twice: of the descriptions that it wrote, and of the copies that it started.
template <int kRowsPerLane>
__device__ __forceinline__ void copy_swizzled(const Shared& shared, const WideParams& params,
                                              const UnitRow (&rows)[kRowsPerLane], int first_row, int stage) {
  constexpr int kChunks = kHeadDim / 8, kAtOnce = kIsFp8 ? 4 : 2;
  constexpr int kAll = kRowsPerLane * 32 * kChunks;
  static_assert(kAll % (32 * kAtOnce) == 0, "whole turns");
  const uint4* q = static_cast<const uint4*>(params.q);
  const uint32 target = shared.queries(stage);
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < kAll; i += 32 * kAtOnce) {
    int source[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int row = (i + j * 32) / kChunks;  // a warp's rows are in one of its registers
      source[j] = __shfl_sync(
          kAllLanes, row < 32 ? rows[0].source : rows[kRowsPerLane - 1].source, row % 32);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int row = (i + j * 32) / kChunks, chunk = (i + j * 32) % kChunks;
      copy_chunk(target + query_offset(first_row + row, chunk),
                 q + static_cast<int64>(max(source[j], 0)) * kChunks + chunk, source[j] >= 0);
    }
  }
  barrier_arrive_copied(shared.query_full(stage));
  barrier_arrive(shared.query_full(stage));
}

// Gathers kRowsPerWarp packed query rows of a unit, from `first_row` on, with one warp. All that is read is asked
// for before any of it is used: short units take no longer than this.
template <int kRowsPerWarp>
__device__ __forceinline__ void gather_rows(const Shared& shared, const WideParams& params,
                                            const Unit& unit, int first_row, int stage, int slot) {
  constexpr int kRowsPerLane = kRowsPerWarp / 32;
  const int lane = threadIdx.x % 32;
  const WorkItem& item = unit.item;
  // where each row comes from, its query head and position; then where it goes
  UnitRow described[kRowsPerLane];
  int heads[kRowsPerLane];
#pragma unroll
  for (int i = 0; i < kRowsPerLane; ++i) {
    const int row = first_row + i * 32 + lane;
    const int read = min(row, item.num_rows - 1);  // always something: no branch comes between the reads
    const PackedRow packed(item.row_begin + read, params.group_size);
    const int source = packed.query(params, unit.head);
    described[i].source = row == read ? source : -1;
    described[i].position = params.positions[packed.plan_row];
#if HAS_MASK
    described[i].mask_bit = params.mask_row_offsets[packed.plan_row] + item.kv_start;
#endif
    heads[i] = packed.query_head(params, unit.head);
  }
  wait_to_begin(params);
#pragma unroll
  for (int i = 0; i < kRowsPerLane; ++i) {
    const int row = first_row + i * 32 + lane, source = described[i].source;
    const bool is_there = row < item.num_rows, final = item.partial == kFinal;
    described[i].target = final || !is_there
                              ? source
                              : partial_place(item.partial + row, params.num_kv_heads, unit.head);
    described[i].sink = final && is_there ? sink_of(params, heads[i], source) : minus_infinity();
    shared.row(slot, row) = described[i];
  }

  if constexpr (kQueriesInRegisters) {
    copy_rows(shared, params, described, first_row, stage);
  } else {
    copy_swizzled(shared, params, described, first_row, stage);
  }
}

// Two warps gather the packed query rows of every unit; the first of them also takes the units.
__device__ __forceinline__ void stream_queries(const Shared& shared, const WideParams& params) {
  constexpr int kRowsPerWarp = kTileRows / kGatherers;
  const int first_row = (threadIdx.x / 32 - 2) * kRowsPerWarp;
  int number = first_row == 0 ? first_unit(params) : 0, done = 0;
  uint32 taken = 0;
  Ring<kUnitSlots> units;
  Ring<kQueryStages> ring;
  Ring<kRowSlots> slots;
  Unit unit;
  for (;;) {
    if (first_row == 0) {
      number = publish_unit(shared, units, number, done, taken, params);
    }
    if (!next_unit(shared, units, unit)) return;
    if (is_same_rows(unit.item)) continue;
    barrier_wait(shared.query_empty(ring.stage()), ring.parity() ^ 1);
    gather_rows<kRowsPerWarp>(shared, params, unit, first_row, ring.stage(), slots.stage());
    ring.advance();
    slots.advance();
  }
}
