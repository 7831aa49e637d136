// Attention of many query rows over long runs of keys, for Hopper: wgmma products, TMA loads.
//
// A CTA, one or two on a multiprocessor, takes units (work item x kv head) from a counter until none is left. Its
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
// Specialised by -D: HEAD_DIM (64, 128, 192, 256), VALUE_DIM (of V and O, where it is not HEAD_DIM), BF16, TILE_KEYS, STAGES, QUERY_STAGES, PAGE_SIZE (a multiple
// of 8 that divides TILE_KEYS; 0: ragged keys), HAS_MASK, HAS_SOFT_CAP, QUERIES_IN_REGISTERS (the scores'
// products take Q from there; shared memory only passes it on), CONSUMERS (1, 2, 3 warpgroups that multiply),
// CTAS (1, 2 on a multiprocessor), MOVERS (warps that move data), STAGED (fp8: tiles as stored, 2 to 4),
// BY_TOKEN (1: pages of any size, of 16 bits, with PAGE_SIZE 0), SPLITS (1: items are split at fixed positions, and
// the splits' states joined in order; RUNNING_HERE of a running state's vectors stay in shared memory).

#include "common/overlap.cuh"
#include "wide/params.cuh"
#include "wide/hopper.cuh"
#include "wide/movers.cuh"
#include "wide/products.cuh"
#include "wide/ring.cuh"
#include "wide/rows.cuh"
#include "wide/shared.cuh"
#include "wide/walk.cuh"
#include "wide/wgmma.cuh"
#if FP8
#include "wide/stored.cuh"
#elif BY_TOKEN
#include "wide/tokens.cuh"
#endif

// The tensor cores go round two warpgroups: each waits for its turn, issues, and passes the turn on. One alone has no
// other to pass it to, and three are as fast without.
constexpr bool kTurns = kConsumers == 2;
__device__ __forceinline__ void take_turn(int consumer) {
  if (kTurns) named_barrier_sync(1 + consumer, 256);
}

__device__ __forceinline__ void pass_turn(int consumer) {
  if (kTurns) named_barrier_arrive(1 + (consumer + 1) % kConsumers, 256);
}

// This warp no longer needs a K or V tile.
__device__ __forceinline__ void release(uint32 barrier) {
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Waits for a tile of K or V.
__device__ __forceinline__ void wait_for_tile(uint32 barrier, uint32 parity) {
  barrier_wait(barrier, parity);
  if (kByToken) fence_async_proxy();  // ordinary threads have copied it
}

// Zeroes V rows `valid` and up of the tile to come: slots past the run's end may hold anything, NaN
// included, and 0 * NaN is NaN. Each warpgroup does it for itself, so that it waits for no other.
__device__ __forceinline__ void clear_values(const Shared& shared, const Ring<kStages>& values,
                                             int valid, int consumer) {
  if (kIsFp8 || kByToken || valid >= kTileKeys) return;  // tokens past a run's end are zeros already
  barrier_wait(shared.values_full(values.stage()), values.parity());
  clear_rows(shared.values(values.stage()), valid);
  fence_async_proxy();
  named_barrier_sync(4 + consumer, 128);
}

// Scores of a tile to weights; true if earlier sums must be rescaled.
__device__ __forceinline__ bool softmax_tile(float (&s)[kScores], Rows& rows, const KeyTile& tile,
                                            float (&factor)[2], const Shared& shared, int stage,
                                            const WideParams& params) {
  rows.cap(s, params.cap_scale);
  rows.hide(s, tile.index);
#if HAS_MASK
  if (tile.cut) {
    hide_masked(s, tile.index * kTileKeys, shared, stage, my_row(), params.mask_bits);
  }
#endif
  pin(s);  // else each score takes two registers, as a float and as its bits
  const bool raised = rows.raise(s, factor, params.scale);
  rows.weigh(s, params.scale);
  return raised;
}

// Whether a tile's scores are the last that need queries in shared memory.
__device__ __forceinline__ bool ends_with(const KeyTile& tile, int ends) {
  return !kQueriesInRegisters && tile.is_last() && !(ends & kFollowed);
}

// The state of a unit, to where it goes.
__device__ __forceinline__ void write_unit(Finished& finished, float (&o)[kOutputs],
                                           const WideParams& params, const Shared& shared) {
  if (SPLITS && finished.join(o, params, shared, my_row())) return;
  finished.write(o, params, shared, my_row());
}

// A consumer warpgroup's way through all units, as one sequence of key tiles: the scores of the next
// tile, be it the next unit's first, are always under way with the values of the present one.
__device__ __forceinline__ void attend_units(const Shared& shared, const WideParams& params,
                                             float v_scale) {
  const int consumer = threadIdx.x / 128 - kMovers / 4;
  const uint32 my_queries = consumer * kConsumerQueryBytes;
  if (consumer == kConsumers - 1) pass_turn(consumer);

  Ring<kUnitSlots> units;
  Ring<kQueryStages> queries;
  Ring<kRowSlots> slots;
  Ring<kStages> keys, values;
  Unit unit;
  if (!next_unit(shared, units, unit)) return;
  float s[kScores], o[kOutputs], factor[2];
  uint32 p[kScores / 2];
  Queries q;
  clear(o);

  // the first unit's first scores, alone
  wait_for_queries(shared, queries);
  if (kQueriesInRegisters) load_queries(q, shared, queries);
  Rows rows(unit.item, params, shared, slots.stage(), my_row());
  int ends = ends_of(unit.item);
  KeyTile tile;
  tile.enter(unit.item);
  wait_for_tile(shared.keys_full(keys.stage()), keys.parity());
  visit_next(tile, shared, keys.stage());
  int valid = unit.item.num_keys - tile.index * kTileKeys;  // keys of the tile whose values come next
  take_turn(consumer);
  issue_scores(s, q, shared.queries(queries.stage()) + my_queries, shared.keys(keys.stage()));
  pass_turn(consumer);
  products_wait<0>();
  pin(s);
  release(shared.keys_empty(keys.stage()));
  keys.advance();
  softmax_tile(s, rows, tile, factor, shared, slots.stage(), params);
  if (ends_with(tile, ends)) barrier_arrive(shared.query_empty(queries.stage()));
  pack(s, p);

  for (;;) {
    const bool switching = tile.is_last();
    Finished finished;
    if (switching) {
      finished = rows.finish(slots.stage(), ends, params.scale, v_scale);
      if (!next_unit(shared, units, unit)) break;
      if (!is_same_rows(unit.item)) {
        queries.advance();
        slots.advance();
        wait_for_queries(shared, queries);
        if (kQueriesInRegisters) load_queries(q, shared, queries);
      }
      rows = Rows(unit.item, params, shared, slots.stage(), my_row());
      tile.enter(unit.item);
      ends = ends_of(unit.item);
    }
    wait_for_tile(shared.keys_full(keys.stage()), keys.parity());
    visit_next(tile, shared, keys.stage());
    if (kTurns) clear_values(shared, values, valid, consumer);
    take_turn(consumer);
    issue_scores(s, q, shared.queries(queries.stage()) + my_queries, shared.keys(keys.stage()));
    if (!kTurns) clear_values(shared, values, valid, consumer);  // under the scores, as no turn is held
    wait_for_tile(shared.values_full(values.stage()), values.parity());
    issue_values(o, p, shared.values(values.stage()));
    valid = switching ? unit.item.num_keys - tile.index * kTileKeys : kTileKeys;
    pass_turn(consumer);
    products_wait<1>();
    pin(s);
    release(shared.keys_empty(keys.stage()));
    keys.advance();
    if (ends_with(tile, ends)) barrier_arrive(shared.query_empty(queries.stage()));
    const bool raised = softmax_tile(s, rows, tile, factor, shared, slots.stage(), params);
    // A sum is never negative. The branch ends a basic block: without it ptxas moves the wait for P V
    // up over the softmax, and nothing overlaps.
    pin(s);
    if (rows.sum[0] + rows.sum[1] < 0.0f) __trap();
    products_wait<0>();
    pin(o);
    pin(p);
    release(shared.values_empty(values.stage()));
    values.advance();
    if (SPLITS) pack(s, p);  // its registers are free for a running state
    if (switching) {
      finished.clear_empty(o);
      write_unit(finished, o, params, shared);
      clear(o);
      pin(o);  // not before: the outputs still have their registers
    } else if (raised) {
      rows.rescale(o, factor);
    }
    if (!SPLITS) pack(s, p);
  }

  // the last unit's last values, alone
  clear_values(shared, values, valid, consumer);
  take_turn(consumer);
  wait_for_tile(shared.values_full(values.stage()), values.parity());
  issue_values(o, p, shared.values(values.stage()));
  pass_turn(consumer);
  products_wait<0>();
  pin(o);
  Finished finished = rows.finish(slots.stage(), ends, params.scale, v_scale);
  finished.clear_empty(o);
  write_unit(finished, o, params, shared);
}

#if FP8 || BY_TOKEN
extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
    attend_wide(const __grid_constant__ StoredKv kv, const __grid_constant__ WideParams params) {
#else
extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
    attend_wide(const __grid_constant__ TensorMap key_map, const __grid_constant__ TensorMap value_map,
                const __grid_constant__ WideParams params) {
#endif
  extern __shared__ __align__(1024) uint8 storage[];
  const Shared shared(storage);
  if (shared.address % 1024 != 0) __trap();  // swizzled groups repeat with the address
  if (threadIdx.x == 0) shared.init_barriers();
  if (params.own_units > 0) launch_dependents();
  if (kHasMask) wait_to_begin(params);  // the table of visible tiles is the predecessor's
  __syncthreads();

  if (threadIdx.x < kMovers * 32) {
    if (kSharesRegisters) give_registers<kProducerRegisters>();
#if FP8
    stream_stored(shared, params, kv);
#else
    const int warp = threadIdx.x / 32;
#if BY_TOKEN
    if (warp == 0) {
      stream_tokens<true>(shared, kv, params);
    } else if (warp == 1) {
      stream_tokens<false>(shared, kv, params);
#else
    if (warp == 0) {
      stream_tiles<true>(shared, &key_map, params);
    } else if (warp == 1) {
      stream_tiles<false>(shared, &value_map, params);
#endif
    } else {
      stream_queries(shared, params);
    }
#endif
  } else {
    if (kSharesRegisters) take_registers<kConsumerRegisters>();
#if FP8
    attend_units(shared, params, kv.v_scale);
#else
    attend_units(shared, params, 1.0f);
#endif
  }
  wait_for_predecessor();  // the kernel beside it: who waits for this one waits for both
}
