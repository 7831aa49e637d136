// Attention for tiles of few query rows (decode, small shared nodes): bound by memory, so built to
// keep bytes in flight, and these in registers: a warp loads the next tile's K as soon as the scores
// of the present one have taken the last, and V likewise, so one of the two is always under way. No
// shared memory, no barrier and no wait separate a load from its product.
//
// A team of `team` warps owns a contiguous list of work items for one kv head and shares each of them:
// warp r takes the tiles r, r + team, ... Loads run ahead straight across the ends of items. At an
// item's end the warps' states meet in shared memory and become the item's. Teams beside each other
// work on the neighbouring heads of the same tokens; or, heads first, on one head of many sequences, whose
// pages are in part the same: read at the same time, these come out of the caches.
//
// What comes before an item's first product is fetched ahead as well: the places of the next item's
// rows while the present one is worked on, its queries while the present one's state is written.
#include "common/overlap.cuh"
#include "narrow/rows.cuh"
#include "narrow/team.cuh"
#include "narrow/warp.cuh"

// Walks this warp's tiles of all items, one tile ahead of the arithmetic; lane l looks after token l.
// A page's id is read one tile ahead of that. Tokens past a run's end are its last one again: their
// scores are hidden, and values weighted by 0 are of the same run, never unwritten memory.
struct TileCursor {
  int item, end;     // of the tile looked up
  int first, keys;   // its first token, and the run's length
  int kv_begin;
  uint32 base;       // row of layer and head
  int page, offset;  // of this lane's token; the id is in flight

  __device__ __forceinline__ void enter(const AttendParams& p, int head, int start) {
    if (item < end) {
      const int4 a = reinterpret_cast<const int4*>(p.items + item)[0];
      first = start;
      keys = p.items[item].num_keys;
      kv_begin = a.w;
      base = a.x * p.layer_rows + head * p.head_rows;
    }
  }
  __device__ __forceinline__ bool more() const { return item < end; }
  // Go to the first tile at or after `first`, and start looking it up.
  __device__ __forceinline__ void settle(const AttendParams& p, int head, int start) {
    while (item < end && first >= keys) {
      ++item;
      enter(p, head, start);
    }
    if (item < end) {
      const int token = min(first + static_cast<int>(threadIdx.x & (kTile - 1)), keys - 1);
      const int index = static_cast<uint32>(token) / static_cast<uint32>(p.page_size);
      offset = token - index * p.page_size;
      page = kv_begin + index;
      if (p.kv_indices != nullptr) page = p.kv_indices[page];
    }
  }
  __device__ __forceinline__ uint32 row(const AttendParams& p) const {
    return base + page * p.page_rows + offset * p.token_rows;
  }
};

// Whether new tokens can be stored here: not what has to be converted, nor in pages that teams share, nor where there
// are no registers for it.
constexpr bool kAppends = !kIsFp8 && !kHeadsFirst && !kGeneral && kWarps <= 8;

// Store the new tokens, of the call's k and v, that are in tiles of this warp, which alone reads those: so they need no
// launch before this one. A row of q has one, its last key, which one of its items ends with.
__device__ __forceinline__ void append_tokens(const AttendParams& p, int head, int begin, int end, const Team& team) {
  for (int index = begin; index < end; ++index) {
    const WorkItem item = read_item(p, index, end);
    const int last = item.num_keys - 1, plan_row = item.row_begin / p.group_size;
    if (last < 0 || last / kTile % team.size != team.rank) continue;
    if (item.kv_start + last != p.positions[plan_row]) continue;  // an earlier run of the row
    const int slot = last / p.page_size, page = item.kv_begin + slot;
    const uint32 row = item.layer * p.layer_rows + head * p.head_rows +
                       (p.kv_indices == nullptr ? page : p.kv_indices[page]) * p.page_rows +
                       (last - slot * p.page_size) * p.token_rows;
    const int64 from = (static_cast<int64>(p.order[plan_row]) * p.num_kv_heads + head) * kRowBytes;
    for (int at = (threadIdx.x & 31) * 16; at < 2 * kRowBytes; at += 32 * 16) {
      const bool of_k = at < kRowBytes;
      const int64 within = of_k ? at : at - kRowBytes, to = static_cast<int64>(row) * kRowBytes + within;
      *reinterpret_cast<uint4*>(const_cast<char*>(static_cast<const char*>(of_k ? p.k : p.v)) + to) =
          *reinterpret_cast<const uint4*>(static_cast<const char*>(of_k ? p.new_k : p.new_v) + from + within);
    }
  }
  asm volatile("bar.warp.sync 0xffffffff;" ::: "memory");  // before the loads, which are volatile, too
}

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    attend_narrow(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int unit = (blockIdx.x * kWarps + warp) / p.team;
  const Team team{p.team, warp % p.team, 1 + warp / p.team};
  const int major = unit / (kHeadsFirst ? p.num_workers : p.num_kv_heads);
  const int minor = unit - major * (kHeadsFirst ? p.num_workers : p.num_kv_heads);
  const int worker = kHeadsFirst ? minor : major, head = kHeadsFirst ? major : minor;
  if (unit >= p.num_workers * p.num_kv_heads) {
    wait_for_predecessor();
    return;
  }
  int begin = worker, end = worker + 1;  // an item each where there is no list
  if (p.worker_begin != nullptr) {
    begin = p.worker_begin[worker];
    end = p.worker_begin[worker + 1];
  }
  const WarpShared own{shared + warp * kWarpBytes};

  // the order of these matters: each read of a chain goes out before another chain is waited for
  TileCursor next;
  next.item = begin;
  next.end = end;
  const int start = team.rank * kTile, stride = team.size * kTile;
  next.enter(p, head, start);
  next.settle(p, head, start);
  RowPlace place = find_row(p, read_item(p, begin, end), head);
  for (int i = lane; i < kQueryBytes / 16; i += 32)  // rows past kRows stay 0
    reinterpret_cast<uint4*>(own.queries())[i] = make_uint4(0, 0, 0, 0);
  __syncwarp();
  Keys k;
  Values v;
  uint32 row = next.row(p);  // of the tile to load next
  int more = next.more();    // whether there is one
  const auto go_on = [&]() {
    next.first += stride;
    next.settle(p, head, start);
  };
  if (p.alone) launch_dependents();  // who waits for this one, and so for what this one waits for
  if (more) prefetch_tile(p, row);
  wait_for_predecessor();  // up to here, only the plan was read
  launch_dependents();     // the wide kernel, which reads nothing that this one writes
  if (kAppends && p.new_k != nullptr) append_tokens(p, head, begin, end, team);
  load_keys(k, p, row, more);
  if constexpr (!kTakeTurns) load_values(v, p, row, more);
  Queries queries;
  queries.load(p, place.query);
  go_on();

  const float c = kGeneral ? 1.0f : p.scale2;
  for (int index = begin; index < end; ++index) {
    const WorkItem item = read_item(p, index, end);  // in L1, from when `next` came by
    queries.store(own.queries());
    if (lane < kRows) own.describe(lane, place, item, head, p);
    RowRules rules;
#pragma unroll
    for (int n = 0; n < kN; ++n)
      rules.position[n] = __shfl_sync(kAllLanes, place.position, my_row(n));
    __syncwarp();
    Accumulator<kN> acc;
    clear(acc);
    place = find_row(p, read_item(p, index + 1, end), head);

    for (int first = start; first < item.num_keys; first += stride) {
      Scores s;
      score(s, k, own.queries());
      if constexpr (kTakeTurns) load_values(v, p, row, 1);
      more = next.more();
      row = next.row(p);
      asm volatile("" : "+r"(row));  // keep it: working it out again would keep the old page's id
      if constexpr (!kTakeTurns) load_keys(k, p, row, more);
      go_on();
      if constexpr (kGeneral) cap(s, p);
      if (first + kTile > item.num_keys || item.rules != 0 || kGeneral) rules.hide(s, item, first, p);
      online_softmax<kN>(s, acc, c, p.headroom);
      weigh<kN>(acc, s, v);
      if constexpr (kTakeTurns) {
        load_keys(k, p, row, more);
      } else {
        load_values(v, p, row, more);
      }
    }
    if constexpr (!kTakeTurns) queries.load(p, place.query);
    write_state(acc, p, item, head, c, own, team);
    if constexpr (kTakeTurns) queries.load(p, place.query);  // no registers for them before
  }
}
