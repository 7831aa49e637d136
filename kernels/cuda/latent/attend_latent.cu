// Attention over latent keys (absorbed MLA) for Hopper: 64 packed rows of 576 values against pages whose rows are K, and
// whose first 512 values are V. wgmma products, TMA loads.
//
// A CTA takes units (work items) one after another; the first warpgroup only moves data (movers.cuh). Two warpgroups
// share the unit's 64 rows: each owns one of the two tiles of 64 keys of a pair, and half of O's columns. It makes the
// weights of its own keys, and passes them to the other through shared memory:
//
//   first:   S0, weights 0,             O left  += P0 V0, (P1) O left  += P1 V1
//   second:  S1, (P0) O right += P0 V0, weights 1,             O right += P1 V1
//
// The second runs half a pair behind, so that one's softmax falls under the other's products. Limits are shared: who
// raises one notes the pair's number, and the other brings its sums and outputs to it. Memory traffic: each row of a run
// once per 64 packed rows, through L2; q once, o or partial states once. Scores and sums are float32.
//
// Specialised by -D: BF16, PAGE_SIZE (8, 16, 32, 64), HAS_MASK, HAS_SOFT_CAP. README.md has the design.
#include "common/overlap.cuh"
#include "latent/movers.cuh"
#include "latent/products.cuh"
#include "latent/rows.cuh"
#include "latent/shared.cuh"

constexpr int kThreads = 384;

// Named barriers of both consumer warpgroups.
constexpr int kFirstWeights = 1, kSecondWeights = 2, kSums = 3, kFirstMultiplied = 4, kSecondScores = 5, kUnitBegins = 6;

// This warp no longer needs what a barrier guards.
__device__ __forceinline__ void release(uint32 barrier) {
  if (fresh_lane() == 0) barrier_arrive(barrier);
}

// Gathers a unit's packed query rows, and what each sees, with the 256 threads of both warpgroups. Rows that are not there
// become zeros.
__device__ __forceinline__ void gather_rows(const Shared& shared, const WorkItem& item, const WideParams& params) {
  constexpr int kChunks = kRowBytes / 16, kRowsPerWarp = kTileRows / 8;
  const int lane = fresh_lane(), first = (fresh_thread() / 32 - 4) * kRowsPerWarp;
  int source = -1;
  if (lane < kRowsPerWarp) {
    const int read = min(first + lane, item.num_rows - 1);
    const PackedRow packed(item.row_begin + read, params.group_size);
    if (read == first + lane) source = packed.query(params, 0);
    const KeyRange all{0, item.num_keys - 1};
    const KeyRange seen = visible_keys(all, item, params.positions[packed.plan_row], params.window_left);
    RowRange& range = shared.range(first + lane);
    range.low = seen.low;
    range.high = seen.high;
#if HAS_MASK
    range.mask_bit = params.mask_row_offsets[packed.plan_row] + item.kv_start;
#endif
  }
#pragma unroll 2
  for (int i = lane; i < kRowsPerWarp * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks, from = __shfl_sync(kAllLanes, source, row);
    copy_chunk(shared.address + chunk / 8 * kQueryBlock + (first + row) * 128 + ((chunk ^ row) % 8) * 16,
               static_cast<const char*>(params.q) + static_cast<int64>(max(from, 0)) * kRowBytes + chunk * 16, from >= 0);
  }
}

// The scores of the own tile of a pair; of the second warpgroup they are under way. The second begins as the first ends,
// else both would make weights at a time.
template <int kSelf>
__device__ __forceinline__ void begin_scores(float (&s)[kScores], const Queries& q, const Shared& shared, uint32 parity) {
  barrier_wait(shared.full(kSelf, 0), parity);
  if (kSelf) named_barrier_sync(kSecondScores, 256);
  issue_scores<0, false>(s, q, shared, kSelf);
  barrier_wait(shared.full(kSelf, 1), parity);
  issue_scores<1, !kSelf>(s, q, shared, kSelf);
  if (kSelf) return;
  products_wait<1>();
  named_barrier_arrive(kSecondScores, 256);
  products_wait<0>();
  pin(s);
}

// Waits for the products, and gives back the half of a tile that they have read.
__device__ __forceinline__ void finish_values(float (&o)[kOutputs], uint32 empty) {
  products_wait<0>();
  release(empty);
  pin(o);
}

// Pair number `pair` of the CTA, tiles `2 * index` and the next of the unit's keys, after `begin_scores`.
__device__ __forceinline__ void attend_first(float (&o)[kOutputs], float (&s)[kScores], Rows& rows, const Shared& shared,
                                             const WideParams& params, const WorkItem& item, uint32 pair, int index) {
  float factor[2] = {1.0f, 1.0f};
  uint32 w[kScores / 2];
  finish_scores(s, rows, shared, params, item, 2 * index, 0);
  if (rows.raise(s, factor, shared, params.scale, 0, pair)) rescale(o, factor);
  rows.weigh(s, w, params.scale);
  store_weights(shared.weights(0), w);
  named_barrier_arrive(kFirstWeights, 256);
  pin(o);
  issue_own_values<0>(o, w, shared.tile(0, 0));
  finish_values(o, shared.empty(0, 0));
  pin(w);
  named_barrier_sync(kSecondWeights, 256);
  if (shared.moved(1) == pair) {
    rows.adopt(factor, shared, params.scale);
    rescale(o, factor);
  }
  pin(o);
  issue_other_values<0>(o, shared.weights(1), shared.tile(1, 0));
  named_barrier_arrive(kFirstMultiplied, 256);
  finish_values(o, shared.empty(1, 0));
}

__device__ __forceinline__ void attend_second(float (&o)[kOutputs], float (&s)[kScores], Rows& rows, const Shared& shared,
                                              const WideParams& params, const WorkItem& item, uint32 pair, int index) {
  float factor[2] = {1.0f, 1.0f};
  uint32 w[kScores / 2];
  named_barrier_sync(kFirstWeights, 256);
  if (shared.moved(0) == pair) {
    rows.adopt(factor, shared, params.scale);
    products_wait<0>();
    pin(s);
    rescale(o, factor);
    factor[0] = factor[1] = 1.0f;
  }
  pin(o);
  issue_other_values<1>(o, shared.weights(0), shared.tile(0, 1));
  products_wait<1>();
  pin(s);
  finish_scores(s, rows, shared, params, item, 2 * index + 1, 1);
  if (rows.raise(s, factor, shared, params.scale, 1, pair)) {
    products_wait<0>();
    pin(o);
    rescale(o, factor);
    pin(o);
  }
  rows.weigh(s, w, params.scale);
  store_weights(shared.weights(1), w);
  named_barrier_arrive(kSecondWeights, 256);
  finish_values(o, shared.empty(0, 1));
  // the first's product comes first: it then begins the next scores beside this one
  named_barrier_sync(kFirstMultiplied, 256);
  issue_own_values<1>(o, w, shared.tile(1, 1));
  finish_values(o, shared.empty(1, 1));
  pin(w);
}

// A consumer warpgroup's way through all units.
template <int kSelf>
__device__ __forceinline__ void attend_units(const Shared& shared, const WideParams& params) {
  float o[kOutputs], s[kScores];
  Queries q;
  uint32 pair = 0;
  barrier_wait(shared.unit_full(0), 0);
  if (shared.unit(0).num_rows == 0) return;
  gather_rows(shared, shared.unit(0), params);
  for (uint32 count = 0;; ++count) {
    const WorkItem& item = shared.unit(count);
    copy_async_wait_all();
    fence_async_proxy();
    named_barrier_sync(kUnitBegins, 256);
    load_queries(q, shared);
    Rows rows(shared, item);
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] = 0.0f;
    named_barrier_sync(kUnitBegins, 256);  // weights take the place of what has been loaded
    for (int index = (max(item.num_keys, 1) - 1) / kPairKeys; index >= 0; --index) {
      begin_scores<kSelf>(s, q, shared, pair & 1);
      ++pair;
      if (kSelf) {
        attend_second(o, s, rows, shared, params, item, pair, index);
      } else {
        attend_first(o, s, rows, shared, params, item, pair, index);
      }
    }
    const Targets targets(item, params);
    float sum[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = quad_sum(rows.sum[r]);
      if (fresh_lane() % 4 == 0) shared.sums(kSelf)[my_row() + 8 * r] = sum[r];
    }
    named_barrier_sync(kSums, 256);
#pragma unroll
    for (int r = 0; r < 2; ++r) {  // in one order: both warpgroups have the same
      const float other = shared.sums(1 - kSelf)[my_row() + 8 * r];
      sum[r] = kSelf ? other + sum[r] : sum[r] + other;
    }
    release(shared.unit_empty(count));
    barrier_wait(shared.unit_full(count + 1), parity_of(count + 1));
    const bool more = shared.unit(count + 1).num_rows != 0;
    if (more) gather_rows(shared, shared.unit(count + 1), params);  // under the writes
    write_rows(o, rows, sum, targets, params, kSelf);
    if (!more) return;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attend_latent(const __grid_constant__ TensorMap left_map, const __grid_constant__ TensorMap right_map,
                  const __grid_constant__ WideParams params) {
  extern __shared__ __align__(1024) uint8 storage[];
  const Shared shared{storage, shared_address(storage)};
  if (shared.address % 1024 != 0) __trap();  // swizzled groups repeat with the address
  if (threadIdx.x == 0) shared.init();
  launch_dependents();
  wait_for_predecessor();
  __syncthreads();
  if (threadIdx.x < 128) {
    give_registers<40>();
    stream_latents(shared, params, &left_map, &right_map);
  } else {
    take_registers<232>();
    if (threadIdx.x < 256) {
      attend_units<0>(shared, params);
    } else {
      attend_units<1>(shared, params);
    }
  }
}
