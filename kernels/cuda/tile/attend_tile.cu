// Attention for tiles of many query rows with mma.sync: prefill and shared prefixes on devices without
// wgmma, and wherever the Hopper kernel does not apply.
//
// One block owns one work item of one kv head: kWarps * kM * 16 packed rows in shared memory, and a
// ring of kStages tiles of 64 keys that all its warps share, each warp loading a quarter. One barrier
// per tile: passing it means that everybody has finished the tile before, whose slot is refilled.
// Tiles that a custom mask hides from all of the item's rows are neither loaded nor looked at.
#include "tile/rows.cuh"
#include "tile/shared.cuh"
#include "tile/warp.cuh"
#include "visible/visible.cuh"

constexpr int kM = ROW_TILES;
constexpr int kWarps = WARPS;
constexpr int kStages = STAGES;
constexpr int kThreads = kWarps * 32;
constexpr int kTile = kWarps * 16;
constexpr int kRows = kWarps * kM * 16;
constexpr int kTileBytes = kTile * kRowStride;
constexpr int kStageBytes = 2 * kTileBytes;
constexpr int kQueryBytes = kRows * kQueryStride;

struct TileParams {
  AttendParams attend;
  VisibleTable visible;
};

// The block's number, read again at each use: values derived from it occupy no register in between.
__device__ __forceinline__ int fresh_block() {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

// The item's row of the table, computed at each use, because registers are short.
__device__ __forceinline__ const VisibleTiles* visible_tiles(const VisibleTable& table,
                                                             const AttendParams& p) {
  return table.tiles + static_cast<int64>(fresh_block() / p.num_kv_heads) * table.words;
}

// The first tile to visit from `tile` on; num_tiles: none.
__device__ __forceinline__ int first_seen(const VisibleTiles* visible, int tile, int num_tiles) {
#pragma unroll 1
  for (int word = tile >> 5; word * 32 < num_tiles; ++word) {
    unsigned seen = visible[word].seen;
    if (word == tile >> 5) seen &= 0xffffffffu << (tile & 31);
    if (seen != 0) return word * 32 + __ffs(seen) - 1;
  }
  return num_tiles;
}

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    attend_tile(const __grid_constant__ TileParams params) {
  const AttendParams& p = params.attend;
  const VisibleTable& table = params.visible;
  extern __shared__ __align__(128) char shared[];
  __shared__ int tile_in[kStages];  // GENERAL: which tile a stage holds, times 2, plus 1 if the mask cuts it
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int index = blockIdx.x / p.num_kv_heads, head = blockIdx.x - index * p.num_kv_heads;
  const WorkItem item = p.items[index];
  const int own_row = warp * kM * 16;
  const uint32 query_at = shared_address(shared) + own_row * kQueryStride;
  const uint32 ring = shared_address(shared) + kQueryBytes;

  TokenLoader loader;
  loader.start(p, item.layer, head);
  const int num_tiles = (item.num_keys + kTile - 1) / kTile;
  const auto masked = [&]() { return kGeneral && table.tiles != nullptr; };  // kept, it costs a register
  int load_tile = 0;
  const auto look_up_next = [&]() {
    if (masked()) load_tile = first_seen(visible_tiles(table, p), load_tile, num_tiles);
    loader.look_up(p, item.kv_begin, item.num_keys, load_tile * kTile + warp * 16);
    ++load_tile;
  };
  const auto copy_next = [&](int stage) {
    if (load_tile <= num_tiles) {
      const uint32 at = ring + stage * kStageBytes + warp * 16 * kRowStride;
      loader.copy(p, at, at + kTileBytes);
    }
    copy_async_commit();
    if (kGeneral && threadIdx.x == 0) {
      const int tile = load_tile - 1;
      const bool cut = masked() && tile < num_tiles &&
                       (visible_tiles(table, p)[tile >> 5].cut >> (tile & 31) & 1);
      tile_in[stage] = tile << 1 | cut;
    }
  };
  look_up_next();
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    copy_next(stage);
    look_up_next();
  }

  // rows and queries
  stage_queries(shared, p, item, 0, kRows, head, threadIdx.x, kThreads);
  Rows<kM> rows;
  find_rows(rows, p, item, own_row, head);
  int first_position = 0x7fffffff, last_position = -1;  // there is none before that
#pragma unroll
  for (int r = 0; r < kM * 2; ++r)
    if (rows.query[r] >= 0) {
      first_position = min(first_position, rows.position[r]);
      last_position = max(last_position, rows.position[r]);
    }
  first_position = __reduce_min_sync(kAllLanes, first_position);
  last_position = __reduce_max_sync(kAllLanes, last_position);
  const bool idle = own_row >= item.num_rows;
  Accumulator<kM> acc;
  clear(acc);

  const float c = kGeneral ? 1.0f : p.scale2;
  int stage = 0;
  for (int tile = 0; kGeneral || tile < num_tiles; ++tile) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    bool hide = false;
    if (kGeneral) {
      tile = tile_in[stage] >> 1;
      hide = tile_in[stage] & 1;
      if (tile >= num_tiles) break;
    }
    copy_next(stage == 0 ? kStages - 1 : stage - 1);
    look_up_next();
    const uint32 keys = ring + stage * kStageBytes;
    stage = stage == kStages - 1 ? 0 : stage + 1;

    // what of this tile this warp's rows can see
    const int first = tile * kTile;
    const int first_key = item.kv_start + first;
    const int last_key = item.kv_start + (min(first + kTile, item.num_keys) - 1);
    hide |= first + kTile > item.num_keys;
    bool skip = idle;
    if (item.rules & kHideFuture) {
      hide |= last_key > first_position;
      skip |= first_key > last_position;
    }
    if (item.rules & kHideWindow) {
      hide |= first_key < last_position - p.window_left;
      skip |= last_key < first_position - p.window_left;
    }
    if (skip) continue;

    // scores
    float s[kM][kTile / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32 a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m)
        load_matrix_x4(a[m], query_at + (m * 16 + (lane & 15)) * kQueryStride + step * 32 +
                                 (lane >> 4) * 16);
      score_step<kM, kTile>(s, a, keys, step);
    }
    if constexpr (kGeneral) cap_scores<kM, kTile>(s, p);
    if (hide) hide_scores<kM, kTile>(s, rows, item, first, p);

    // softmax and values
    online_softmax<kM, kTile>(s, acc, c, p.headroom);
    weigh_values<kM, kTile>(acc, s, keys + kTileBytes);
  }
  copy_async_wait<0>();
  const int last = fresh_block();  // the item is read again: nothing of it waits in registers
  write_state(acc, rows, p, p.items[last / p.num_kv_heads], own_row, last % p.num_kv_heads, c);
}
