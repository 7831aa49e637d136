// Attention for tiles of few query rows (decode, small shared nodes): bound by memory, so built to
// keep bytes in flight.
//
// One warp is one worker: it takes chunks (runs of work items) of one kv head, has a private ring of
// kStages tiles of 16 tokens (K and V) in shared memory, and never meets a barrier. A slot is refilled
// as soon as its K, then its V, is used, straight across the ends of items and chunks, so the ring is
// full from a worker's first tile to its last. Worker w of head h is warp
// w * num_kv_heads + h of the grid: neighbouring warps read the neighbouring heads of the same tokens,
// and the same page ids. kM * 16 packed rows ride on each tile; 8 warps of 3 stages keep 170 KB in
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
constexpr bool kQueryInShared = kM > 1 || kHeadDim > 128;  // else in registers
constexpr bool kQueryAhead = !kQueryInShared;               // and the next item's too
constexpr int kRows = kM * 16;
constexpr int kTile = 16;
constexpr int kTileBytes = kTile * kRowStride;
constexpr int kStageBytes = 2 * kTileBytes;
constexpr int kQueryBytes = kQueryInShared ? kRows * kQueryStride : 0;
constexpr int kQueue = kStages <= 5 ? 8 : 16;
static_assert(kStages + 3 <= kQueue, "items have at least one tile; one more is known ahead");
constexpr int kNoItem = -1;

// What the arithmetic needs to know of an item, all of it fetched before its turn comes: at the
// memory limit a dependent read takes microseconds.
struct Entry {
  int item[8];  // the WorkItem; item[0] = kNoItem ends the queue
  int query[kRows];
  int position[kRows];
#if RARE
  int64 mask[kRows];
#endif
};
constexpr int kWarpBytes = kStages * kStageBytes + kQueryBytes + kQueue * sizeof(Entry);

// Walks a worker's items ahead of the loads and queues what it learns. The next item's facts are
// fetched in steps, one per tile, so that each step's latency passes while tiles are computed.
struct ItemWalker {
  enum Step { kTicket, kFields, kRowFacts, kPublish, kReady };

  Entry* queue;
  int head;
  int pushed;           // entries queued
  int next, next_stop;  // the next item, and the end of its chunk; next is kNoItem after the last
  Step step;            // what of the next item is to be fetched
  uint32 ticket;
  int word;             // lane l: word l % 8 of the next item
  int order, position;  // lane l: of row l of the next item
  int64 mask;

  __device__ __forceinline__ int field(int index) const {
    return __shfl_sync(kAllLanes, word, index);
  }

  __device__ __forceinline__ void start(const AttendParams& p, int worker) {
    pushed = 0;
    next = p.chunk_begin[worker];
    next_stop = p.chunk_begin[worker + 1];
    step = kFields;
  }

  // One step towards a queued next item.
  __device__ __forceinline__ void prepare(const AttendParams& p) {
    const int lane = threadIdx.x & 31;
    Entry& entry = queue[pushed % kQueue];
    if (step == kTicket) {
      const uint32 chunk = __shfl_sync(kAllLanes, ticket, 0) + p.num_workers;
      if (chunk < p.num_chunks) {
        next = p.chunk_begin[chunk];
        next_stop = p.chunk_begin[chunk + 1];
        step = kFields;
      } else {
        next = kNoItem;
        if (lane < kRows) entry.query[lane] = -1;
        if (lane == 0) entry.item[0] = kNoItem;
        ++pushed;
        step = kReady;
      }
    } else if (step == kFields) {
      word = reinterpret_cast<const int*>(p.items + next)[lane & 7];
      step = kRowFacts;
    } else if (step == kRowFacts) {
      const int begin = field(1), count = field(2);
      if (lane < count) {
        const int row = (begin + lane) / p.group_size;
        order = p.order[row];
        position = p.positions[row];
        if (kRare && p.mask_bits != nullptr) mask = p.mask_row_offsets[row];
      }
      step = kPublish;
    } else if (step == kPublish) {
      const int packed = field(1) + lane, count = field(2);
      if (lane < 8) entry.item[lane] = word;
      if (lane < kRows) {
        entry.query[lane] = -1;
        entry.position[lane] = 0;
        if (lane < count) {
          entry.query[lane] = query_row(p, packed, packed / p.group_size, order, head);
          entry.position[lane] = position;
#if RARE
          entry.mask[lane] = mask;
#endif
        }
      }
      ++pushed;
      step = kReady;
    }
  }

  // The next item becomes the one that is loaded: begin to look for its successor.
  __device__ __forceinline__ void advance(const AttendParams& p) {
    if (next + 1 < next_stop) {
      ++next;
      step = kFields;
    } else {
      step = kTicket;
      ticket = 0;
      if ((threadIdx.x & 31) == 0 && p.num_chunks > p.num_workers)
        ticket = atomicInc(p.schedule + head, p.num_chunks - 1);
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    attend_narrow(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int unit = blockIdx.x * kWarps + warp;
  const int worker = unit / p.num_kv_heads, head = unit - worker * p.num_kv_heads;
  if (worker >= p.num_workers) return;

  char* own = shared + warp * kWarpBytes;
  const uint32 ring = shared_address(own);
  const uint32 query_at = ring + kStages * kStageBytes;
  Entry* queue = reinterpret_cast<Entry*>(own + kStages * kStageBytes + kQueryBytes);

  // the loading side: which tile to look up next
  ItemWalker walker;
  walker.queue = queue;
  walker.head = head;
  walker.start(p, worker);
  TokenLoader loader;
  int load_begin = 0, load_keys = 0, load_first = 0;
  bool loading = true;
  const auto look_up_next = [&]() {
    if (load_first >= load_keys && loading) {
      while (walker.step != ItemWalker::kReady) walker.prepare(p);
      loading = walker.next != kNoItem;
      load_first = 0;
      load_keys = 0;
      if (loading) {
        load_begin = walker.field(3);
        load_keys = walker.field(4);
        loader.start(p, walker.field(0), head);
        walker.advance(p);
      }
    } else {
      walker.prepare(p);
    }
    loader.look_up(p, load_begin, load_keys, load_first);
    load_first += kTile;
  };
  uint32 load_row = TokenLoader::kNoRow;  // of the tile whose copies are being started
  const auto copy_keys = [&](int stage) {
    load_row = loader.locate(p);
    if (loading) copy_rows_async(ring + stage * kStageBytes, p.k, load_row);
    copy_async_commit();
  };
  const auto copy_values = [&](int stage) {
    if (loading) copy_rows_async(ring + stage * kStageBytes + kTileBytes, p.v, load_row);
    copy_async_commit();
    look_up_next();
  };

  // fill the ring: two groups of copies per tile, K and V
  look_up_next();
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    copy_keys(stage);
    copy_values(stage);
  }

  const float c = kRare ? 1.0f : p.scale2;
  int stage = 0;
  uint32 ahead[kQueryAhead ? kSteps : 1][4];  // Q of the next item
  bool have_ahead = false;
  for (int popped = 0;; ++popped) {
    // the next item, its rows and queries
    __syncwarp();
    const Entry& entry = queue[popped % kQueue];
    if (entry.item[0] == kNoItem) break;
    const WorkItem item{entry.item[0], entry.item[1], entry.item[2], entry.item[3],
                        entry.item[4], entry.item[5], entry.item[6], entry.item[7]};
    Rows<kM> rows;
#pragma unroll
    for (int r = 0; r < kM * 2; ++r) {
      rows.query[r] = entry.query[r * 8 + (lane >> 2)];
      rows.position[r] = entry.position[r * 8 + (lane >> 2)];
#if RARE
      rows.mask[r] = entry.mask[r * 8 + (lane >> 2)];
#endif
    }
    uint32 q[kQueryInShared ? 1 : kSteps][kM][4];
    if constexpr (kQueryInShared) {
      stage_queries(own + kStages * kStageBytes, p, kRows, lane, 32,
                    [&](int row) { return entry.query[row]; });
      __syncwarp();
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (kQueryAhead && have_ahead) {
#pragma unroll
          for (int i = 0; i < 4; ++i) q[step][0][i] = ahead[kQueryAhead ? step : 0][i];
        } else {
          load_query(q[step][0], p, rows.query[0], rows.query[1], step);
        }
      }
      have_ahead = false;
    }
    Accumulator<kM> acc;
    clear(acc);

    for (int first = 0; first < item.num_keys; first += kTile) {
      copy_async_wait<2 * kStages - 1>();
      __syncwarp();
      if constexpr (kQueryAhead) {
        if (!have_ahead && walker.pushed > popped + 1) {
          const Entry& after = queue[(popped + 1) % kQueue];
          const int row0 = after.query[lane >> 2], row1 = after.query[8 + (lane >> 2)];
#pragma unroll
          for (int step = 0; step < kSteps; ++step) load_query(ahead[step], p, row0, row1, step);
          have_ahead = true;
        }
      }

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
      __syncwarp();
      copy_keys(stage);
      if constexpr (kRare) cap_scores<kM, kTile>(s, p);
      if (first + kTile > item.num_keys || item.causal != 0 || kRare)
        hide_scores<kM, kTile>(s, rows, item, first, p);

      // softmax and values
      soften<kM, kTile>(s, acc, c);
      copy_async_wait<2 * kStages - 1>();
      __syncwarp();
      weigh_values<kM, kTile>(acc, s, keys + kTileBytes);
      __syncwarp();
      copy_values(stage);
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    write_state(acc, rows, p, item, 0, head, c);
  }
  copy_async_wait<0>();
}
