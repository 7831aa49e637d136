// The data movers of the wide kernel: the first warpgroup, which multiplies nothing. Warp 0 streams the K
// tiles and warp 1 the V tiles of every unit; warp 2 takes the units, and gathers their query rows with
// warp 3. What each of them writes is waited for, and its place given back, through the barriers of `Shared`.
#pragma once

#include "common/rows.cuh"
#include "wide/params.cuh"
#include "wide/hopper.cuh"
#include "wide/ring.cuh"
#include "wide/shared.cuh"
#include "wide/walk.cuh"

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
      const uint32 target = tiles + ring.stage() * kTileBytes;
      const uint32 barrier = full + ring.stage() * 8;
#if PAGE_SIZE > 0
      const int first_page = tile * kPagesPerTile;
      const int num_pages = min(kPagesPerTile, ceil_div(item.num_keys, kPageSize) - first_page);
      const int* ids = params.kv_indices + item.kv_begin + first_page;
      const int mine = lane < num_pages ? ids[lane] : 0;
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
            barrier_arrive_expect(barrier, num_pages * kPageBytes);
          }
#pragma unroll
          for (int i = 0; i < kPagesAtOnce; ++i) {
            if (first + i < num_pages) {
              copy_box(target + (first + i) * kPageBytes, map, barrier, 0, 0,
                       unit.head * params.head_blocks, unit.head * params.head_groups,
                       item.layer * params.num_pages + pages[i]);
            }
          }
        }
      }
#else
      barrier_wait(empty + ring.stage() * 8, ring.parity() ^ 1);
      if (elect_lane()) {
        if (kOfKeys) publish_visit(shared, ring.stage(), cursor);
        barrier_arrive_expect(barrier, kTileBytes);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          copy_box(target + block * kBlockStride, map, barrier, 0, item.kv_begin + tile * kTileKeys,
                   unit.head * kBlocks + block);
        }
      }
#endif
      ring.advance();
    }
  }
}

// Publishes unit `number` of the list and returns the number of the next: the CTA's first is its own
// number, the rest come from the launch's counter. The list goes through all items for the first
// `head_block` kv heads, then for the next ones: what is read together then fits the L2 cache. The last
// CTA to finish puts the counter back to 0 for the next launch.
__device__ __forceinline__ int publish_unit(const Shared& shared, const Ring<kUnitSlots>& ring,
                                            int number, const WideParams& params) {
  barrier_wait(shared.unit_empty(ring.stage()), ring.parity() ^ 1);
  int next = 0;
  if (threadIdx.x % 32 == 0) {
    Unit& unit = shared.unit(ring.stage());
    if (number < params.num_items * params.num_kv_heads) {
      const int turn = number / (params.num_items * params.head_block);
      const int inner = number % (params.num_items * params.head_block);
      unit.index = inner / params.head_block;
      unit.item = params.items[unit.index];
      unit.head = turn * params.head_block + inner % params.head_block;
      next = gridDim.x + atomicAdd(params.schedule, 1u);
    } else {
      unit.head = -1;
      const uint32 last = gridDim.x - 1;
      if (atomicInc(params.schedule + 1, last) == last) atomicExch(params.schedule, 0u);
    }
    barrier_arrive(shared.unit_full(ring.stage()));
  }
  return __shfl_sync(kAllLanes, next, 0);
}

// Two warps gather the packed query rows of every unit; the first of them also takes the units.
__device__ __forceinline__ void stream_queries(const Shared& shared, const WideParams& params) {
  constexpr int kRowsPerWarp = kTileRows / 2;
  const int lane = threadIdx.x % 32;
  const int first_row = (threadIdx.x / 32 - 2) * kRowsPerWarp;
  const Element* q = static_cast<const Element*>(params.q);
  const int group = params.group_size;
  int number = blockIdx.x;
  Ring<kUnitSlots> units;
  Ring<kQueryStages> ring;
  Ring<kRowSlots> slots;
  Unit unit;
  for (;;) {
    if (first_row == 0) number = publish_unit(shared, units, number, params);
    if (!next_unit(shared, units, unit)) return;
    const WorkItem& item = unit.item;
    barrier_wait(shared.query_empty(ring.stage()), ring.parity() ^ 1);
    // where each row comes from and goes, and its position
#pragma unroll 1
    for (int row = first_row + lane; row < first_row + kRowsPerWarp; row += 32) {
      UnitRow described = {-1, -1, 0};
      if (row < item.num_rows) {
        const int packed = item.row_begin + row;
        const int plan_row = packed / group;
        const int head = unit.head * group + packed % group;
        described.source = params.order[plan_row] * (params.num_kv_heads * group) + head;
        described.target =
            item.partial == kFinal
                ? described.source
                : partial_place<int>(item.partial + row, params.num_kv_heads, unit.head);
        described.position = params.positions[plan_row];
#if HAS_MASK
        described.mask_bit = params.mask_row_offsets[plan_row] + item.kv_start;
#endif
      }
      shared.row(slots.stage(), row) = described;
    }
    __syncwarp();
    // load q
    constexpr int kChunks = kHeadDim / 8;
    const uint32 target = shared.queries(ring.stage());
#pragma unroll 2
    for (int i = lane; i < kRowsPerWarp * kChunks; i += 32) {
      const int row = first_row + i / kChunks;
      const int chunk = i % kChunks;
      const int source = shared.row(slots.stage(), row).source;
      copy_chunk(target + query_offset(row, chunk),
                 q + static_cast<int64>(max(source, 0)) * kHeadDim + chunk * 8, source >= 0);
    }
    copy_chunks_wait();
    fence_async_proxy();
    barrier_arrive(shared.query_full(ring.stage()));
    ring.advance();
    slots.advance();
  }
}
