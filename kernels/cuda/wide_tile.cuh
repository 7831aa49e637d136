// What one CTA of the wide kernel holds: sizes, arguments, shared memory.
#pragma once

#include "hopper.cuh"
#include "visible.cuh"
#include "work.cuh"

using Element = unsigned short;  // 16 bits of fp16 or bf16, as kBf16 says: only moved, never computed on

#ifndef kHasMask
#define kHasMask 0
#endif
#ifndef kHasSoftCap
#define kHasSoftCap 0
#endif
#ifndef kQueriesInRegisters
#define kQueriesInRegisters 0
#endif

static_assert(kHeadDim % 64 == 0, "a swizzled row of 128 bytes holds 64 elements");
static_assert(kTileKeys % 16 == 0, "a product takes 16 keys");
#if kPageSize > 0
static_assert(kPageSize % 8 == 0, "a swizzled group is 8 rows");
static_assert(kTileKeys % kPageSize == 0, "a tile is whole pages");
constexpr int kPagesPerTile = kTileKeys / kPageSize;
constexpr int kPageBytes = kPageSize * kHeadDim * 2;
static_assert(kPagesPerTile <= 32, "one page id per lane");
// Page ids that the lane which copies them holds at a time: more than 12 are too many registers.
constexpr int kPagesAtOnce = kPagesPerTile > 12 ? 8 : kPagesPerTile;
static_assert(kPagesPerTile % kPagesAtOnce == 0, "whole turns");
#endif

constexpr int kTileRows = 64 * kConsumers;
constexpr int kThreads = 128 * (kConsumers + 1);
// 65536 registers: what the data movers give up, the consumers take.
constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
constexpr int kScores = kTileKeys / 2;   // per thread
constexpr int kOutputs = kHeadDim / 2;  // per thread

// A K or V tile is made of groups of 8 keys x 64 dims (1024 bytes, swizzled). A page arrives in one box as
// [group of 8 keys][block of 64 dims]; ragged keys arrive as [block of 64 dims][group of 8 keys].
constexpr int kBlocks = kHeadDim / 64;
constexpr int kTileBytes = kTileKeys * kHeadDim * 2;
constexpr int kGroupStride = kPageSize > 0 ? kBlocks * 1024 : 1024;
constexpr int kBlockStride = kPageSize > 0 ? 1024 : kTileKeys * 128;
// Queries: per consumer [block of 64 dims][64 rows], swizzled.
constexpr int kQueryBlockStride = 64 * 128;
constexpr int kConsumerQueryBytes = kBlocks * kQueryBlockStride;
constexpr int kQueryBytes = kConsumers * kConsumerQueryBytes;
constexpr int kUnitSlots = 2;
// Rows are needed until o is written; q only until its last scores, or until it is in registers.
constexpr int kRowSlots = kQueryStages + 1 + kQueriesInRegisters;

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Key tiles of an item; one, all hidden, where there are no keys.
__device__ __forceinline__ int tiles_of(const WorkItem& item) {
  return max(1, ceil_div(item.num_keys, kTileKeys));
}

// Byte offset, in a tile of queries, of 16-byte chunk `chunk` of row `row`.
__device__ __forceinline__ int query_offset(int row, int chunk) {
  return row / 64 * kConsumerQueryBytes + chunk / 8 * kQueryBlockStride + row % 64 * 128 +
         ((chunk ^ row) % 8) * 16;
}

// The launch's arguments, as kernels/cuda/wide.py packs them.
struct WideArguments {
  const void* q;                      // [rows, num_qo_heads, head_dim] Element
  void* o;                            // same
  float* lse;                         // [rows, num_qo_heads], natural log
  const WorkItem* items;
  const int* kv_indices;              // page ids; unused for ragged keys
  const int* order;                   // plan row -> row of q and o
  const int* positions;               // by plan row
  const unsigned* mask_bits;          // padded by 32 readable bytes
  const long long* mask_row_offsets;  // by plan row
  const VisibleTiles* visible;        // visible_words for each item
  float* partial_o;
  float* partial_lse;
  unsigned* schedule;                 // two counters, zero between launches
  float sm_scale;
  float soft_cap;
  int window_left;
  int num_items;
  int num_kv_heads;
  int group_size;
  int head_block;                     // kv heads worked on together; divides num_kv_heads
  int num_pages;                      // pages of one layer: outer map index = layer * num_pages + page
  int head_blocks;                    // what a kv head adds to the map's third coordinate (NHD) ...
  int head_groups;                    // ... or to its fourth (HND); the other one is 0
  int visible_words;
};

struct Unit {
  WorkItem item;
  int head;   // kv head; -1: no further unit
  int index;  // of the item
};

// The way of a unit through its key tiles, from the last to the first, past those which a custom mask
// hides whole. Every unit visits a tile, be it one in which everything is hidden.
struct Way {
  int tile;  // where it is; -1: past the end
  int next;  // where it goes from there; -1: nowhere
#if kHasMask
  const VisibleTiles* visible;
#endif

  __device__ __forceinline__ Way(const Unit& unit, const WideArguments& arguments) {
#if kHasMask
    visible = arguments.visible + static_cast<long long>(unit.index) * arguments.visible_words;
#endif
    tile = max(before(tiles_of(unit.item)), 0);
    next = before(tile);
  }

  __device__ __forceinline__ void advance() {
    tile = next;
    next = before(tile);
  }

 private:
  // The last tile to visit of those before `tile`; -1: none.
  __device__ __forceinline__ int before(int tile) const {
#if kHasMask
    for (int word = (tile - 1) >> 5; word >= 0; --word) {
      unsigned seen = visible[word].seen;
      if (word == tile >> 5) seen &= (1u << (tile & 31)) - 1;
      if (seen != 0) return word * 32 + 31 - __clz(seen);
    }
    return -1;
#else
    return tile - 1;
#endif
  }
};

// A tile on the way, as the consumers know it. With a mask, the warp that streams K tells them.
struct KeyTile {
  int index;
#if kHasMask
  bool last, cut;  // the unit's last one; the mask hides some of it

  static __device__ __forceinline__ int pack(const Way& way) {
    const int cut = way.visible[way.tile >> 5].cut >> (way.tile & 31) & 1;
    return way.tile << 2 | (way.next < 0 ? 2 : 0) | cut;
  }
  __device__ __forceinline__ void enter(const WorkItem&) {}
  __device__ __forceinline__ void advance(int packed) {
    index = packed >> 2;
    last = packed & 2;
    cut = packed & 1;
  }
  __device__ __forceinline__ bool is_last() const { return last; }
#else
  __device__ __forceinline__ void enter(const WorkItem& item) { index = tiles_of(item); }
  __device__ __forceinline__ void advance(int) { --index; }
  __device__ __forceinline__ bool is_last() const { return index == 0; }
#endif
};

// One packed row of a unit, in rows of [rows * heads, head_dim].
struct PackedRow {
  int source;  // its row of q; -1: no such row
  int target;  // its row of o and lse, or of the partial arrays
  int position;
#if kHasMask
  long long mask_bit;  // bit of the run's first key
#endif
};

// --- shared memory ---------------------------------------------------------------------------------------

struct Shared {
  unsigned char* base;  // aligned to 1024: swizzled groups repeat with the address
  unsigned address;

  static constexpr int kQueries = 2 * kStages * kTileBytes;
  static constexpr int kRows = kQueries + kQueryStages * kQueryBytes;
  static constexpr int kUnits =
      kRows + kRowSlots * kTileRows * int(sizeof(PackedRow));
  static constexpr int kBarriers = kUnits + kUnitSlots * 64;
  static constexpr int kVisits = kBarriers + 8 * (4 * kStages + 2 * kQueryStages + 2 * kUnitSlots);

  __device__ __forceinline__ explicit Shared(unsigned char* storage)
      : base(storage), address(shared_address(storage)) {}
  __device__ __forceinline__ unsigned keys(int stage) const { return address + stage * kTileBytes; }
  __device__ __forceinline__ unsigned values(int stage) const {
    return address + (kStages + stage) * kTileBytes;
  }
  __device__ __forceinline__ unsigned queries(int stage) const {
    return address + kQueries + stage * kQueryBytes;
  }
  __device__ __forceinline__ PackedRow& row(int slot, int row) const {
    return reinterpret_cast<PackedRow*>(base + kRows)[slot * kTileRows + row];
  }
  __device__ __forceinline__ Unit& unit(int slot) const {
    return *reinterpret_cast<Unit*>(base + kUnits + slot * 64);
  }
  // Which tile is in a stage, as KeyTile packs it; with a mask only.
  __device__ __forceinline__ int& visit(int stage) const {
    return reinterpret_cast<int*>(base + kVisits)[stage];
  }
  __device__ __forceinline__ unsigned barrier(int index) const {
    return address + kBarriers + index * 8;
  }
  __device__ __forceinline__ unsigned keys_full(int stage) const { return barrier(stage); }
  __device__ __forceinline__ unsigned keys_empty(int stage) const { return barrier(kStages + stage); }
  __device__ __forceinline__ unsigned values_full(int stage) const {
    return barrier(2 * kStages + stage);
  }
  __device__ __forceinline__ unsigned values_empty(int stage) const {
    return barrier(3 * kStages + stage);
  }
  __device__ __forceinline__ unsigned query_full(int stage) const {
    return barrier(4 * kStages + stage);
  }
  __device__ __forceinline__ unsigned query_empty(int stage) const {
    return barrier(4 * kStages + kQueryStages + stage);
  }
  __device__ __forceinline__ unsigned unit_full(int slot) const {
    return barrier(4 * kStages + 2 * kQueryStages + slot);
  }
  __device__ __forceinline__ unsigned unit_empty(int slot) const {
    return barrier(4 * kStages + 2 * kQueryStages + kUnitSlots + slot);
  }

  // K and V tiles: full by the copy engine's bytes, empty by one arrival per warp, whose lanes have
  // waited for the same products. What threads write and read themselves, queries, their rows and
  // units: by an arrival of each of those threads.
  __device__ __forceinline__ void init_barriers() const {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(keys_full(stage), 1);
      barrier_init(values_full(stage), 1);
      barrier_init(keys_empty(stage), 4 * kConsumers);
      barrier_init(values_empty(stage), 4 * kConsumers);
    }
    for (int stage = 0; stage < kQueryStages; ++stage) {
      barrier_init(query_full(stage), 2 * 32);
      barrier_init(query_empty(stage), 128 * kConsumers);
    }
    for (int slot = 0; slot < kUnitSlots; ++slot) {
      barrier_init(unit_full(slot), 1);
      barrier_init(unit_empty(slot), kThreads);
    }
    barrier_init_fence();
  }
};

// Zeroes rows `valid` and up of a V tile, with the 128 threads of a warpgroup.
__device__ __forceinline__ void clear_rows(unsigned tile, int valid) {
  const int num_chunks = (kTileKeys - valid) * kBlocks * 8;
  for (int i = threadIdx.x % 128; i < num_chunks; i += 128) {
    const int key = valid + i / (kBlocks * 8), block = i / 8 % kBlocks;
    const unsigned target =
        tile + key / 8 * kGroupStride + block * kBlockStride + key % 8 * 128 + i % 8 * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(target), "r"(0) : "memory");
  }
}
