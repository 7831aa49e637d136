// Attention of many query rows over long runs of keys, for Hopper: wgmma products, TMA loads.
//
// One CTA per multiprocessor takes units (work item x kv head) from a counter until none is left. Its
// first warpgroup only moves data: warp 0 streams K tiles and warp 1 V tiles through two rings of
// kStages tiles, one whole page (or, for ragged keys, half a tile) per TMA instruction; warps 2 and 3
// take the units and gather their packed query rows through `order`. Each further warpgroup owns 64
// packed rows. It walks the run's key tiles from the last to the first:
//
//   S = Q K^T of the next tile is issued, then O += P V of the present one; while the tensor cores do
//   the second, the softmax of the first runs in registers; P never leaves them.
//
// Named barriers hand the tensor cores from one warpgroup to the next, so that one's softmax falls under
// the other's products. Memory traffic: each K and V byte of a run once per 64 * kConsumers rows, through
// L2; q once, o or partial states once. Scores and sums are float32, P is rounded to the element type.
//
// Specialised by -D: kHeadDim (64, 128, 192, 256), kTileKeys, kStages, kQueryStages, kConsumers, kPageSize
// (a multiple of 8 that divides kTileKeys; 0: ragged keys), kBf16, kHasMask, kHasSoftCap,
// kQueriesInRegisters (the scores' products take Q from there; shared memory only passes it on).

#include "hopper.cuh"
#include "state.cuh"
#include "wgmma.cuh"
#include "wide_rows.cuh"
#include "wide_tile.cuh"
#include "work.cuh"

// --- moving data -----------------------------------------------------------------------------------------

// A place in a ring of kSize stages: one counter of uses, so that it costs one register.
template <int kSize>
struct Ring {
  unsigned uses = 0;
  __device__ __forceinline__ int stage() const { return uses % kSize; }
  __device__ __forceinline__ unsigned parity() const { return uses / kSize & 1; }
  __device__ __forceinline__ void advance() { ++uses; }
};

// Takes the next unit's description out of its slot; false when there is no further unit.
__device__ __forceinline__ bool next_unit(const Shared& shared, Ring<kUnitSlots>& ring,
                                          Unit& unit) {
  barrier_wait(shared.unit_full(ring.stage()), ring.parity());
  unit = shared.unit(ring.stage());
  barrier_arrive(shared.unit_empty(ring.stage()));
  ring.advance();
  return unit.head >= 0;
}

// Tells the consumers which tile comes in a stage of keys; its barrier hands it over.
__device__ __forceinline__ void publish_visit(const Shared& shared, int stage, const Way& way) {
#if kHasMask
  shared.visit(stage) = KeyTile::pack(way);
#endif
}

// The tile whose keys have arrived in a stage.
__device__ __forceinline__ void visit_next(KeyTile& tile, const Shared& shared, int stage) {
  tile.advance(kHasMask ? shared.visit(stage) : 0);
}

// One warp streams the K (or V) tiles of every unit, last tile first.
template <bool kOfKeys>
__device__ __forceinline__ void stream_tiles(const Shared& shared, const TensorMap* map,
                                             const WideArguments& arguments) {
  const unsigned tiles = kOfKeys ? shared.keys(0) : shared.values(0);
  const unsigned full = kOfKeys ? shared.keys_full(0) : shared.values_full(0);
  const unsigned empty = kOfKeys ? shared.keys_empty(0) : shared.values_empty(0);
  const int lane = threadIdx.x % 32;
  if (lane == 0) prefetch_map(map);
  Ring<kUnitSlots> units;
  Ring<kStages> ring;
  Unit unit;
  while (next_unit(shared, units, unit)) {
    const WorkItem& item = unit.item;
    for (Way way(unit, arguments); way.tile >= 0; way.advance()) {
      const int tile = way.tile;
      const unsigned target = tiles + ring.stage() * kTileBytes;
      const unsigned barrier = full + ring.stage() * 8;
#if kPageSize > 0
      const int first_page = tile * kPagesPerTile;
      const int num_pages = min(kPagesPerTile, ceil_div(item.num_keys, kPageSize) - first_page);
      const int* ids = arguments.kv_indices + item.kv_begin + first_page;
      const int mine = lane < num_pages ? ids[lane] : 0;
#pragma unroll
      for (int first = 0; first < kPagesPerTile; first += kPagesAtOnce) {
        int pages[kPagesAtOnce];
#pragma unroll
        for (int i = 0; i < kPagesAtOnce; ++i) {
          pages[i] = __shfl_sync(0xffffffffu, mine, first + i);
        }
        if (first == 0) barrier_wait(empty + ring.stage() * 8, ring.parity() ^ 1);
        if (elect_lane()) {
          if (first == 0) {
            if (kOfKeys) publish_visit(shared, ring.stage(), way);
            barrier_arrive_expect(barrier, num_pages * kPageBytes);
          }
#pragma unroll
          for (int i = 0; i < kPagesAtOnce; ++i) {
            if (first + i < num_pages) {
              copy_box(target + (first + i) * kPageBytes, map, barrier, 0, 0,
                       unit.head * arguments.head_blocks, unit.head * arguments.head_groups,
                       item.layer * arguments.num_pages + pages[i]);
            }
          }
        }
      }
#else
      barrier_wait(empty + ring.stage() * 8, ring.parity() ^ 1);
      if (elect_lane()) {
        if (kOfKeys) publish_visit(shared, ring.stage(), way);
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
                                            int number, const WideArguments& arguments) {
  barrier_wait(shared.unit_empty(ring.stage()), ring.parity() ^ 1);
  int next = 0;
  if (threadIdx.x % 32 == 0) {
    Unit& unit = shared.unit(ring.stage());
    if (number < arguments.num_items * arguments.num_kv_heads) {
      const int turn = number / (arguments.num_items * arguments.head_block);
      const int inner = number % (arguments.num_items * arguments.head_block);
      unit.index = inner / arguments.head_block;
      unit.item = arguments.items[unit.index];
      unit.head = turn * arguments.head_block + inner % arguments.head_block;
      next = gridDim.x + atomicAdd(arguments.schedule, 1u);
    } else {
      unit.head = -1;
      const unsigned last = gridDim.x - 1;
      if (atomicInc(arguments.schedule + 1, last) == last) atomicExch(arguments.schedule, 0u);
    }
    barrier_arrive(shared.unit_full(ring.stage()));
  }
  return __shfl_sync(0xffffffffu, next, 0);
}

// Two warps gather the packed query rows of every unit; the first of them also takes the units.
__device__ __forceinline__ void stream_queries(const Shared& shared, const WideArguments& arguments) {
  constexpr int kRowsPerWarp = kTileRows / 2;
  const int lane = threadIdx.x % 32;
  const int first_row = (threadIdx.x / 32 - 2) * kRowsPerWarp;
  const Element* q = static_cast<const Element*>(arguments.q);
  const int group = arguments.group_size;
  int number = blockIdx.x;
  Ring<kUnitSlots> units;
  Ring<kQueryStages> ring;
  Ring<kRowSlots> slots;
  Unit unit;
  for (;;) {
    if (first_row == 0) number = publish_unit(shared, units, number, arguments);
    if (!next_unit(shared, units, unit)) return;
    const WorkItem& item = unit.item;
    barrier_wait(shared.query_empty(ring.stage()), ring.parity() ^ 1);
    // where each row comes from and goes, and its position
#pragma unroll 1
    for (int row = first_row + lane; row < first_row + kRowsPerWarp; row += 32) {
      PackedRow described = {-1, -1, 0};
      if (row < item.num_rows) {
        const int packed = item.row_begin + row;
        const int plan_row = packed / group;
        const int head = unit.head * group + packed % group;
        described.source =
            arguments.order[plan_row] * (arguments.num_kv_heads * group) + head;
        described.target = item.partial == kFinal
                               ? described.source
                               : (item.partial + row) * arguments.num_kv_heads + unit.head;
        described.position = arguments.positions[plan_row];
#if kHasMask
        described.mask_bit = arguments.mask_row_offsets[plan_row] + item.kv_start;
#endif
      }
      shared.row(slots.stage(), row) = described;
    }
    __syncwarp();
    // load q
    constexpr int kChunks = kHeadDim / 8;
    const unsigned target = shared.queries(ring.stage());
#pragma unroll 2
    for (int i = lane; i < kRowsPerWarp * kChunks; i += 32) {
      const int row = first_row + i / kChunks;
      const int chunk = i % kChunks;
      const int source = shared.row(slots.stage(), row).source;
      copy_chunk(target + query_offset(row, chunk),
                 q + static_cast<long long>(max(source, 0)) * kHeadDim + chunk * 8, source >= 0);
    }
    copy_chunks_wait();
    fence_async_proxy();
    barrier_arrive(shared.query_full(ring.stage()));
    ring.advance();
    slots.advance();
  }
}

// --- the consumer warpgroups -------------------------------------------------------------------------------

// The tensor cores go round the warpgroups: each waits for its turn, issues, and passes the turn on.
__device__ __forceinline__ void take_turn(int consumer) {
  named_barrier_sync(1 + consumer, 256);
}

__device__ __forceinline__ void pass_turn(int consumer) {
  named_barrier_arrive(1 + (consumer + 1) % kConsumers, 256);
}

// This warp no longer needs a K or V tile.
__device__ __forceinline__ void release(unsigned barrier) {
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// This thread's first row of the tile (the other is 8 further); computed anew each time where registers
// are short.
__device__ __forceinline__ int my_row() {
  int thread = threadIdx.x;
  if (kQueriesInRegisters) asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return (thread / 128 - 1) * 64 + thread / 32 % 4 * 16 + thread % 32 / 4;
}

using Queries = unsigned[kHeadDim / 16][4];

// A fragments of this warp's 16 rows of q, kept in registers for the whole unit.
__device__ __forceinline__ void load_queries(Queries& q, const Shared& shared,
                                             const Ring<kQueryStages>& queries) {
  const unsigned tile = shared.queries(queries.stage());
  const int lane = fresh_lane();
  const int row = my_row() / 16 * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const unsigned source = tile + query_offset(row, 2 * step + lane / 16);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(q[step][0]), "=r"(q[step][1]), "=r"(q[step][2]), "=r"(q[step][3])
                 : "r"(source)
                 : "memory");
  }
  barrier_arrive(shared.query_empty(queries.stage()));
}

// S = Q K^T: 64 rows by kTileKeys keys; q from registers, or from its tile.
__device__ __forceinline__ void issue_scores(float (&s)[kScores], const Queries& q, unsigned tile,
                                             unsigned keys) {
  const auto a = matrix_descriptor(tile, 16, 1024);
  const auto b = matrix_descriptor(keys, 16, kGroupStride);
  products_begin();
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int block = step / 4, inner = step % 4 * 32;
    const auto a_step = a + (block * kQueryBlockStride + inner) / 16;
    const auto b_step = b + (block * kBlockStride + inner) / 16;
    if constexpr (kQueriesInRegisters) {
      if (step == 0) {
        Wgmma<kTileKeys>::template scores_registers<true>(s, q[step], b_step);
      } else {
        Wgmma<kTileKeys>::template scores_registers<false>(s, q[step], b_step);
      }
    } else if (step == 0) {
      Wgmma<kTileKeys>::scores(s, a_step, b_step);
    } else {
      Wgmma<kTileKeys>::accumulate_scores(s, a_step, b_step);
    }
  }
  products_commit();
}

// O += P V: 64 rows by kHeadDim, over kTileKeys keys.
__device__ __forceinline__ void issue_values(float (&o)[kOutputs], const unsigned (&p)[kScores / 2],
                                             unsigned values) {
  const auto b = matrix_descriptor(values, kBlockStride, kGroupStride);
  products_begin();
#pragma unroll
  for (int step = 0; step < kTileKeys / 16; ++step) {
    Wgmma<kHeadDim>::accumulate_values(o, p[4 * step], p[4 * step + 1], p[4 * step + 2],
                                       p[4 * step + 3], b + step * 2 * kGroupStride / 16);
  }
  products_commit();
}

// Zeroes V rows `valid` and up of the tile to come: slots past the run's end may hold anything, NaN
// included, and 0 * NaN is NaN. Each warpgroup does it for itself, so that it waits for no other.
__device__ __forceinline__ void clear_values(const Shared& shared, const Ring<kStages>& values,
                                             int valid, int consumer) {
  if (valid >= kTileKeys) return;
  barrier_wait(shared.values_full(values.stage()), values.parity());
  clear_rows(shared.values(values.stage()), valid);
  fence_async_proxy();
  named_barrier_sync(4 + consumer, 128);
}

// Scores of a tile to weights.
__device__ __forceinline__ void soften_tile(float (&s)[kScores], Rows& rows, const KeyTile& tile,
                                            float (&factor)[2], const Shared& shared, int stage,
                                            const WideArguments& arguments) {
  rows.cap(s);
  rows.hide(s, tile.index * kTileKeys);
#if kHasMask
  if (tile.cut) {
    hide_masked(s, tile.index * kTileKeys, shared, stage, my_row(), arguments.mask_bits);
  }
#endif
  rows.soften(s, factor);
}

// A consumer warpgroup's way through all units, as one sequence of key tiles: the scores of the next
// tile, be it the next unit's first, are always under way with the values of the present one.
__device__ __forceinline__ void attend_units(const Shared& shared, const WideArguments& arguments) {
  const int consumer = threadIdx.x / 128 - 1;
  const unsigned my_queries = consumer * kConsumerQueryBytes;
  if (consumer == kConsumers - 1) pass_turn(consumer);

  Ring<kUnitSlots> units;
  Ring<kQueryStages> queries;
  Ring<kRowSlots> slots;
  Ring<kStages> keys, values;
  Unit unit;
  if (!next_unit(shared, units, unit)) return;
  float s[kScores], o[kOutputs], factor[2];
  unsigned p[kScores / 2];
  Queries q;
  clear(o);

  // the first unit's first scores, alone
  barrier_wait(shared.query_full(queries.stage()), queries.parity());
  if (kQueriesInRegisters) load_queries(q, shared, queries);
  Rows rows(unit.item, arguments, shared, slots.stage(), my_row());
  bool final = unit.item.partial == kFinal;
  KeyTile tile;
  tile.enter(unit.item);
  barrier_wait(shared.keys_full(keys.stage()), keys.parity());
  visit_next(tile, shared, keys.stage());
  int valid = unit.item.num_keys - tile.index * kTileKeys;  // keys of the tile whose values come next
  take_turn(consumer);
  issue_scores(s, q, shared.queries(queries.stage()) + my_queries, shared.keys(keys.stage()));
  pass_turn(consumer);
  products_wait<0>();
  pin(s);
  release(shared.keys_empty(keys.stage()));
  keys.advance();
  soften_tile(s, rows, tile, factor, shared, slots.stage(), arguments);
  if (tile.is_last() && !kQueriesInRegisters) barrier_arrive(shared.query_empty(queries.stage()));
  pack(s, p);

  for (;;) {
    const bool switching = tile.is_last();
    Finished finished;
    if (switching) {
      finished = rows.finish(slots.stage(), final);
      if (!next_unit(shared, units, unit)) break;
      queries.advance();
      slots.advance();
      barrier_wait(shared.query_full(queries.stage()), queries.parity());
      if (kQueriesInRegisters) load_queries(q, shared, queries);
      rows = Rows(unit.item, arguments, shared, slots.stage(), my_row());
      tile.enter(unit.item);
      final = unit.item.partial == kFinal;
    }
    barrier_wait(shared.keys_full(keys.stage()), keys.parity());
    visit_next(tile, shared, keys.stage());
    clear_values(shared, values, valid, consumer);
    take_turn(consumer);
    issue_scores(s, q, shared.queries(queries.stage()) + my_queries, shared.keys(keys.stage()));
    barrier_wait(shared.values_full(values.stage()), values.parity());
    issue_values(o, p, shared.values(values.stage()));
    valid = switching ? unit.item.num_keys - tile.index * kTileKeys : kTileKeys;
    pass_turn(consumer);
    products_wait<1>();
    pin(s);
    release(shared.keys_empty(keys.stage()));
    keys.advance();
    if (tile.is_last() && !switching && !kQueriesInRegisters) {
      barrier_arrive(shared.query_empty(queries.stage()));
    }
    soften_tile(s, rows, tile, factor, shared, slots.stage(), arguments);
    // A sum is never negative. The branch ends a basic block: without it ptxas moves the wait for P V
    // up over the softmax, and nothing overlaps.
    pin(s);
    if (rows.sum[0] + rows.sum[1] < 0.0f) __trap();
    products_wait<0>();
    pin(o);
    pin(p);
    release(shared.values_empty(values.stage()));
    values.advance();
    if (switching) {
      finished.write(o, arguments, shared, my_row());
      clear(o);
      // only now, because rows of the unit just written are still read above
      if (tile.is_last() && !kQueriesInRegisters) barrier_arrive(shared.query_empty(queries.stage()));
    } else {
      rows.rescale(o, factor);
    }
    pack(s, p);
  }

  // the last unit's last values, alone
  clear_values(shared, values, valid, consumer);
  take_turn(consumer);
  barrier_wait(shared.values_full(values.stage()), values.parity());
  issue_values(o, p, shared.values(values.stage()));
  pass_turn(consumer);
  products_wait<0>();
  pin(o);
  rows.finish(slots.stage(), final).write(o, arguments, shared, my_row());
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attend_wide(const __grid_constant__ TensorMap key_map, const __grid_constant__ TensorMap value_map,
                const __grid_constant__ WideArguments arguments) {
  extern __shared__ __align__(1024) unsigned char storage[];
  const Shared shared(storage);
  if (shared.address % 1024 != 0) __trap();  // swizzled groups repeat with the address
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();

  if (threadIdx.x < 128) {
    give_registers<kProducerRegisters>();
    const int warp = threadIdx.x / 32;
    if (warp == 0) {
      stream_tiles<true>(shared, &key_map, arguments);
    } else if (warp == 1) {
      stream_tiles<false>(shared, &value_map, arguments);
    } else {
      stream_queries(shared, arguments);
    }
  } else {
    take_registers<kConsumerRegisters>();
    attend_units(shared, arguments);
  }
}
