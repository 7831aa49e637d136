// Attention for tiles of few query rows (decode, small shared nodes): bound by memory, so built to
// keep bytes in flight.
//
// One warp is one worker: it owns a contiguous list of work items for one kv head, a private ring of
// kStages tiles of 16 tokens (K and V) in shared memory, and never meets a barrier. Loads run
// kStages - 1 tiles ahead of the arithmetic and straight across the ends of items, so the ring is
// full from a worker's first item to its last. Worker w of head h is warp w * num_kv_heads + h of the
// grid: neighbouring warps read the neighbouring heads of the same tokens, and the same page ids.
// kM * 16 packed rows ride on each tile; 8 warps of 3 stages keep 128 KB in flight per multiprocessor.
#include "tile.cuh"

constexpr int kM = ROW_TILES;
constexpr int kWarps = WARPS;
constexpr int kStages = STAGES;
constexpr int kThreads = kWarps * 32;
constexpr bool kQueryInShared = kM > 1 || kHeadDim > 128;  // else in registers
constexpr int kTile = 16;
constexpr int kTileBytes = kTile * kRowStride;
constexpr int kStageBytes = 2 * kTileBytes;
constexpr int kQueryBytes = kQueryInShared ? kM * 16 * kQueryStride : 0;
constexpr int kWarpBytes = kStages * kStageBytes + kQueryBytes;

__device__ __forceinline__ WorkItem read_item(const WorkItem* items, int index) {
  const int4* at = reinterpret_cast<const int4*>(items + index);
  const int4 a = at[0], b = at[1];
  return WorkItem{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    attend_narrow(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int unit = blockIdx.x * kWarps + warp;
  const int worker = unit / p.num_kv_heads, head = unit - worker * p.num_kv_heads;
  if (worker >= p.num_workers) return;
  const int begin = p.worker_begin[worker], end = p.worker_begin[worker + 1];
  if (begin == end) return;

  char* own = shared + warp * kWarpBytes;
  const uint32 ring = shared_address(own);
  const uint32 query_at = ring + kStages * kStageBytes;

  // the loading side: where the next tile to look up is
  int load_item = begin, load_first = 0;
  int4 ahead = reinterpret_cast<const int4*>(p.items + begin)[0];  // layer, .., kv_begin
  int load_begin = ahead.w, load_keys = p.items[begin].num_keys;
  int ahead_keys = 0;
  TokenLoader loader;
  loader.start(p, ahead.x, head);
  if (begin + 1 < end) {
    ahead = reinterpret_cast<const int4*>(p.items + begin + 1)[0];
    ahead_keys = p.items[begin + 1].num_keys;
  }
  const auto look_up_next = [&]() {
    if (load_first >= load_keys) {
      ++load_item;
      load_first = 0;
      load_keys = load_item < end ? ahead_keys : 0;
      load_begin = ahead.w;
      loader.start(p, ahead.x, head);
      if (load_item + 1 < end) {
        ahead = reinterpret_cast<const int4*>(p.items + load_item + 1)[0];
        ahead_keys = p.items[load_item + 1].num_keys;
      }
    }
    loader.look_up(p, load_begin, load_keys, load_first);
    load_first += kTile;
  };
  const auto copy_next = [&](int stage) {
    if (load_item < end) {
      const uint32 at = ring + stage * kStageBytes;
      loader.copy(p, at, at + kTileBytes);
    }
    copy_async_commit();
  };

  // fill the ring
  loader.look_up(p, load_begin, load_keys, 0);
  load_first = kTile;
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    copy_next(stage);
    look_up_next();
  }

  const float c = kRare ? 1.0f : p.scale2;
  int stage = 0;
  for (int index = begin; index < end; ++index) {
    // rows and queries of the item
    const WorkItem item = read_item(p.items, index);
    Rows<kM> rows;
    find_rows(rows, p, item, 0, head);
    uint32 q[kQueryInShared ? 1 : kSteps][kM][4];
    if constexpr (kQueryInShared) {
      __syncwarp();
      stage_queries(own + kStages * kStageBytes, p, item, 0, kM * 16, head, lane, 32);
      __syncwarp();
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        load_query(q[step][0], p, rows.query[0], rows.query[1], step);
    }
    Accumulator<kM> acc;
    clear(acc);

    for (int first = 0; first < item.num_keys; first += kTile) {
      copy_async_wait<kStages - 2>();
      __syncwarp();
      copy_next(stage == 0 ? kStages - 1 : stage - 1);
      look_up_next();

      // scores
      const uint32 keys = ring + stage * kStageBytes;
      float s[kM][kTile / 8][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if constexpr (kQueryInShared) {
          uint32 a[kM][4];
#pragma unroll
          for (int m = 0; m < kM; ++m)
            load_matrix_x4(a[m], query_at + (m * 16 + (lane & 15)) * kQueryStride + step * 32 +
                                     (lane >> 4) * 16);
          score_step<kM, kTile>(s, a, keys, step);
        } else {
          score_step<kM, kTile>(s, q[step], keys, step);
        }
      }
      if constexpr (kRare) cap_scores<kM, kTile>(s, p);
      if (first + kTile > item.num_keys || item.causal != 0 || kRare)
        hide_scores<kM, kTile>(s, rows, item, first, p);

      // softmax and values
      soften<kM, kTile>(s, acc, c);
      weigh_values<kM, kTile>(acc, s, keys + kTileBytes);
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    write_state(acc, rows, p, item, 0, head, c);
  }
  copy_async_wait<0>();
}
