// Attention for tiles of few query rows (decode, small shared nodes): bound by memory, so built to
// keep bytes in flight.
//
// One warp is one worker: it takes chunks (runs of work items) of one kv head, has a private ring of
// kStages tiles of 16 tokens (K and V) in shared memory, and never meets a barrier. Loads run
// kStages - 1 tiles ahead of the arithmetic and straight across the ends of items and chunks, so the
// ring is full from a worker's first tile to its last. Worker w of head h is warp
// w * num_kv_heads + h of the grid: neighbouring warps read the neighbouring heads of the same tokens,
// and the same page ids. kM * 16 packed rows ride on each tile; 8 warps of 3 stages keep 128 KB in
// flight per multiprocessor.
//
// Chunk w, the largest, is worker w's own; the rest is handed out, because multiprocessors differ in
// speed by a quarter. A worker asks until it is refused once, so a head's counter is asked exactly
// num_chunks times and atomicInc brings it back to 0.
#include "tile.cuh"

constexpr int kM = ROW_TILES;
constexpr int kWarps = WARPS;
constexpr int kStages = STAGES;
constexpr int kThreads = kWarps * 32;
constexpr bool kQueryInShared = kM > 1 || (kRare && kHeadDim == 256);  // else in registers
constexpr int kTile = 16;
constexpr int kTileBytes = kTile * kRowStride;
constexpr int kStageBytes = 2 * kTileBytes;
constexpr int kQueryBytes = kQueryInShared ? kM * 16 * kQueryStride : 0;
constexpr int kWarpBytes = kStages * kStageBytes + kQueryBytes;
constexpr int kQueue = 16;  // items between the loading side and the arithmetic: at most kStages + 1
static_assert(kStages + 2 <= kQueue, "an item has at least one tile");

constexpr int kNoItem = -1;

__device__ __forceinline__ WorkItem read_item(const WorkItem* items, int index) {
  const int4* at = reinterpret_cast<const int4*>(items + index);
  const int4 a = at[0], b = at[1];
  return WorkItem{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

// Walks a worker's items ahead of the loads. What the next item needs is fetched in steps, one per
// tile, so that each step's latency passes while tiles are computed.
struct ItemWalker {
  enum Step { kTicket, kFields, kReady };

  int item, stop;        // current item, end of its chunk
  int next, next_stop;   // the same of the next item; next is kNoItem when there is none
  Step step;             // what of the next item is to be fetched
  uint32 ticket;
  int4 head;             // first half of the next item: layer, .., .., kv_begin
  int keys;

  __device__ __forceinline__ void start(const AttendParams& p, int worker) {
    item = kNoItem;
    next = p.chunk_begin[worker];
    next_stop = p.chunk_begin[worker + 1];
    step = kFields;
  }

  __device__ __forceinline__ void prepare(const AttendParams& p) {
    if (step == kTicket) {
      ticket = __shfl_sync(kAllLanes, ticket, 0) + p.num_workers;
      next = kNoItem;
      step = kReady;
      if (ticket < p.num_chunks) {
        next = p.chunk_begin[ticket];
        next_stop = p.chunk_begin[ticket + 1];
        step = kFields;
      }
    } else if (step == kFields) {
      head = reinterpret_cast<const int4*>(p.items + next)[0];
      keys = p.items[next].num_keys;
      step = kReady;
    }
  }

  // Make the next item the current one (kNoItem: there is none) and begin to look for its successor.
  __device__ __forceinline__ void advance(const AttendParams& p, int kv_head) {
    while (step != kReady) prepare(p);
    item = next;
    stop = next_stop;
    if (item == kNoItem) return;
    if (item + 1 < stop) {
      next = item + 1;
      step = kFields;
    } else {
      step = kTicket;
      ticket = 0;
      if ((threadIdx.x & 31) == 0) ticket = atomicInc(p.schedule + kv_head, p.num_chunks - 1);
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    attend_narrow(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(128) char shared[];
  __shared__ int queues[kWarps][kQueue];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int unit = blockIdx.x * kWarps + warp;
  const int worker = unit / p.num_kv_heads, head = unit - worker * p.num_kv_heads;
  if (worker >= p.num_workers) return;

  char* own = shared + warp * kWarpBytes;
  const uint32 ring = shared_address(own);
  const uint32 query_at = ring + kStages * kStageBytes;
  int* queue = queues[warp];

  // the loading side: which tile to look up next
  ItemWalker walker;
  walker.start(p, worker);
  TokenLoader loader;
  int load_begin = 0, load_keys = 0, load_first = 0, pushed = 0;
  const auto look_up_next = [&]() {
    if (load_first >= load_keys && (pushed == 0 || walker.item != kNoItem)) {
      while (walker.step != ItemWalker::kReady) walker.prepare(p);
      load_begin = walker.head.w;
      load_keys = walker.next == kNoItem ? 0 : walker.keys;
      load_first = 0;
      loader.start(p, walker.head.x, head);
      walker.advance(p, head);
      if (lane == 0) queue[pushed % kQueue] = walker.item;
      ++pushed;
    } else {
      walker.prepare(p);
    }
    loader.look_up(p, load_begin, load_keys, load_first);
    load_first += kTile;
  };
  const auto copy_next = [&](int stage) {
    if (walker.item != kNoItem) {
      const uint32 at = ring + stage * kStageBytes;
      loader.copy(p, at, at + kTileBytes);
    }
    copy_async_commit();
  };

  // fill the ring
  look_up_next();
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    copy_next(stage);
    look_up_next();
  }

  const float c = kRare ? 1.0f : p.scale2;
  int stage = 0;
  for (int popped = 0;; ++popped) {
    // the next item, its rows and queries
    __syncwarp();
    const int index = queue[popped % kQueue];
    if (index == kNoItem) break;
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
