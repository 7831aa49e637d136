// Which key tiles a custom mask leaves something of, for each work item: the first launch of a masked batch.
//
// A block takes 32 consecutive key tiles of one item, a warp each; a warp's lanes take plan rows (the
// heads of a row share its mask). A warp stops as soon as it knows both answers, so that a dense random
// mask costs a look at 32 rows per tile; at worst every bit is read once, and once per kernel, not per
// kv head. The causal rule and the window are taken into account: a tile is seen only where all agree.
#include "common/rows.cuh"
#include "common/work.cuh"
#include "visible/visible.cuh"

struct VisibleParams {
  const WorkItem* items;
  const int* positions;               // by plan row
  const uint32* mask_bits;          // readable to the next whole word
  const int64* mask_row_offsets;  // by plan row
  VisibleTiles* tiles;                // [num_items, words]
  int words;
  int tile_keys;
  int group_size;
  int window_left;
};

// Of the keys `keys` of a row whose bit of the run's first key is `bit`.
struct RowAnswer {
  bool seen, cut;
};

__device__ __forceinline__ RowAnswer look(const uint32* bits, int64 bit, KeyRange keys) {
  RowAnswer answer = {false, false};
  if (keys.low > keys.high) return answer;
  const int64 first = bit + keys.low, last = bit + keys.high;
  const uint32* word = bits + (first >> 5);
  const int num_words = static_cast<int>((last >> 5) - (first >> 5)) + 1;
#pragma unroll 5
  for (int i = 0; i < num_words; ++i) {
    uint32 mine = 0xffffffffu;
    if (i == 0) mine &= 0xffffffffu << (first & 31);
    if (i == num_words - 1) mine &= 0xffffffffu >> (31 - (last & 31));
    const uint32 visible = word[i] & mine;
    answer.seen |= visible != 0;
    answer.cut |= visible != mine;
  }
  return answer;
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    find_visible(const __grid_constant__ VisibleParams p) {
  __shared__ bool seen_tiles[32], cut_tiles[32];
  const int index = blockIdx.x / p.words, word = blockIdx.x - index * p.words;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const WorkItem item = p.items[index];
  const int begin = (word * 32 + warp) * p.tile_keys;
  const int end = min(begin + p.tile_keys, item.num_keys);
  bool seen = false, cut = false;
  if (begin < end) {
    const int last_row = (item.row_begin + item.num_rows - 1) / p.group_size;
    for (int first = item.row_begin / p.group_size; first <= last_row; first += 32) {
      const int row = first + lane;
      RowAnswer answer = {false, false};
      if (row <= last_row) {
        const KeyRange keys =
            visible_keys({begin, end - 1}, item, p.positions[row], p.window_left);
        answer = look(p.mask_bits, p.mask_row_offsets[row] + item.kv_start, keys);
      }
      seen |= __any_sync(kAllLanes, answer.seen);
      cut |= __any_sync(kAllLanes, answer.cut);
      if (seen && cut) break;
    }
  }
  if (lane == 0) {
    seen_tiles[warp] = seen;
    cut_tiles[warp] = cut;
  }
  __syncthreads();
  if (warp == 0) {
    const VisibleTiles found = {__ballot_sync(kAllLanes, seen_tiles[lane]),
                                __ballot_sync(kAllLanes, cut_tiles[lane])};
    if (lane == 0) p.tiles[blockIdx.x] = found;
  }
}
