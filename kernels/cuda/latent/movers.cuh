// The data movers of the latent kernel: four warps, of which each streams one half of one of the two tiles of a pair.
// The first one takes the units as well.
#pragma once

#include "latent/shared.cuh"

// A box of a page; read once, the first to leave the L2 cache.
__device__ __forceinline__ void copy_latents(uint32 target, const TensorMap* map, uint32 barrier, int block, int page) {
  uint64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %3, %4, %3, %5}], [%2], %6;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(0), "r"(block), "r"(page), "l"(policy)
      : "memory");
}

// Publishes the CTA's next unit: the first has its number, later ones come from a counter as late as loads allow, as a
// CTA with a long unit would keep another from the rest. No rows: there is none. The last CTA to finish puts the counter
// back to 0 for the next launch.
__device__ __forceinline__ void publish_unit(const Shared& shared, const WideParams& params, uint32 count) {
  barrier_wait(shared.unit_empty(count), parity_of(count) ^ 1);
  const int number = count == 0 ? blockIdx.x : params.own_units + atomicAdd(params.schedule, 1u);
  if (number < params.num_items) {
    shared.unit(count) = params.items[number];
  } else {
    shared.unit(count).num_rows = 0;
    const uint32 last = gridDim.x - 1;
    if (atomicInc(params.schedule + 1, last) == last) atomicExch(params.schedule, 0u);
  }
  barrier_arrive(shared.unit_full(count));
}

// Warp: 0 left of the first tile, 1 right of it, 2 right of the second, 3 left of it. A lane a page; last pair first.
// Pages past the run's end are outside the map: zeros.
__device__ __forceinline__ void stream_latents(const Shared& shared, const WideParams& params, const TensorMap* left,
                                               const TensorMap* right) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane >= kPagesPerTile) return;
  const int stage = warp / 2, half = warp == 1 || warp == 2;
  const uint32 full = shared.full(stage, half), empty = shared.empty(stage, half);
  const int bytes = half_bytes(half);
  const uint32 target = shared.tile(stage, half) + lane * (bytes / kPagesPerTile);
  const TensorMap* map = half ? right : left;
  if (lane == 0) prefetch_map(map);
  uint32 uses = 0;
  for (uint32 count = 0;; ++count) {
    if (threadIdx.x == 0) publish_unit(shared, params, count);
    barrier_wait(shared.unit_full(count), parity_of(count));
    const WorkItem& item = shared.unit(count);
    if (item.num_rows == 0) return;
    const int num_keys = item.num_keys, held = (num_keys + kPageSize - 1) / kPageSize;
    const int* ids = params.kv_indices + item.kv_begin;
    const int first = item.layer * params.num_pages;
    int at = ((max(num_keys, 1) - 1) / kPairKeys * 2 + stage) * kPagesPerTile + lane;
    int page = at < held ? first + ids[at] : -1;
    for (; at >= 0; at -= 2 * kPagesPerTile, ++uses) {
      const int before = at - 2 * kPagesPerTile;
      const int next = before >= 0 ? first + ids[before] : 0;
      barrier_wait(empty, uses & 1 ^ 1);
      if (lane == 0) barrier_arrive_expect(full, bytes);
      copy_latents(target, map, full, half * kLeftBlocks, page);
      page = next;
    }
    if (lane == 0) barrier_arrive(shared.unit_empty(count));
  }
}
