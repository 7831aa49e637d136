// What one CTA of the wide kernel holds: sizes, and shared memory.
#pragma once

#include "common/shape.cuh"
#include "common/types.cuh"
#include "common/work.cuh"
#include "wide/hopper.cuh"

#ifndef TILE_KEYS
#error "specialise with -DTILE_KEYS=... -DSTAGES=... -DQUERY_STAGES=... -DPAGE_SIZE=... -DQUERIES_IN_REGISTERS=0|1 -DCONSUMERS=... -DCTAS=... -DMOVERS=... -DSTAGED=... -DHAS_MASK=0|1 -DHAS_SOFT_CAP=0|1"
#endif
#ifndef SPLITS
#define SPLITS 0
#define RUNNING_HERE 0
#endif
#ifndef BY_TOKEN
#define BY_TOKEN 0
#endif

using Element = uint16;  // 16 bits of fp16 or bf16, as kBf16 says: only moved, never computed on

constexpr int kTileKeys = TILE_KEYS;
constexpr int kStages = STAGES;             // tiles of K, and of V
constexpr int kQueryStages = QUERY_STAGES;  // tiles of Q
constexpr int kPageSize = PAGE_SIZE;        // 0: ragged keys, or pages of any size
constexpr bool kByToken = BY_TOKEN != 0;    // the latter, of 16 bits
constexpr bool kQueriesInRegisters = QUERIES_IN_REGISTERS != 0;
constexpr bool kHasMask = HAS_MASK != 0;
constexpr bool kHasSoftCap = HAS_SOFT_CAP != 0;
constexpr int kConsumers = CONSUMERS;  // warpgroups that multiply, of 64 packed rows each
constexpr bool kMayBeLate = !kIsFp8 && kConsumers < 3;  // units can be taken late: three leave no registers
constexpr int kCtas = CTAS;            // at a time on a multiprocessor
constexpr int kMovers = MOVERS;  // warps that do not: 4 or 8
constexpr int kGatherers = kIsFp8 && CONSUMERS > 1 ? kMovers : 2;  // of these, the ones that bring queries

static_assert(kHeadDim % 64 == 0, "a swizzled row of 128 bytes holds 64 elements");
static_assert(kTileKeys % 16 == 0, "a product takes 16 keys");
#if PAGE_SIZE > 0
static_assert(kPageSize % 8 == 0, "a swizzled group is 8 rows");
static_assert(kTileKeys % kPageSize == 0, "a tile is whole pages");
constexpr int kPagesPerTile = kTileKeys / kPageSize;
constexpr int kPageBytes = kPageSize * kHeadDim * 2;
constexpr int kValuePageBytes = kPageSize * kValueDim * 2;
static_assert(kPagesPerTile <= 32, "one page id per lane");
// Page ids that the lane which copies them holds at a time: more than 12 are too many registers.
constexpr int kPagesAtOnce = kPagesPerTile > 12 ? 8 : kPagesPerTile;
static_assert(kPagesPerTile % kPagesAtOnce == 0, "whole turns");
#endif

constexpr int kTileRows = 64 * kConsumers;
constexpr int kThreads = 128 * kConsumers + 32 * kMovers;
// The consumers take the registers that the data movers give up, unless there are enough for all.
constexpr bool kSharesRegisters = kThreads * kCtas > 256;
constexpr bool kCapped = kByToken && kHasSoftCap && kCtas == 2;  // a cap's scores take more registers
constexpr int kProducerRegisters =
    kMovers > 4 ? 128 : kIsFp8 ? 72 : kConsumers == 3 || kCapped ? 32 : 40;
constexpr int kConsumerRegisters =
    kConsumers == 3 ? 160 : kMovers > 4 ? 240 : kCapped ? 224 : kIsFp8 || kCtas == 2 ? 216 : 232;
// A CTA begins with as many for each thread as are a multiple of 8, and has no others: more are waited for in vain.
constexpr int kEntryRegisters = 65536 / (kThreads * kCtas) / 8 * 8;
static_assert(!kSharesRegisters ||
                  32 * kMovers * kProducerRegisters + 128 * kConsumers * kConsumerRegisters <=
                      kThreads * kEntryRegisters,
              "no more than there are");
constexpr int kScores = kTileKeys / 2;   // per thread
constexpr int kOutputs = kValueDim / 2;  // per thread
constexpr int kRunningFloats = 4 + kOutputs;  // of a running state, per thread: each row's max and sum, then o
constexpr int kRunningHere = RUNNING_HERE;    // of its vectors of four, the first ones that shared memory holds

// A K or V tile is made of groups of 8 keys x 64 dims (1024 bytes, swizzled). A page arrives in one box as
// [group of 8 keys][block of 64 dims]; ragged keys arrive as [block of 64 dims][group of 8 keys].
constexpr int kBlocks = kHeadDim / 64;
constexpr int kValueBlocks = kValueDim / 64;
constexpr int kValueTileBytes = kTileKeys * kValueDim * 2;
constexpr int kTileBytes = kTileKeys * kHeadDim * 2;
constexpr int kGroupStride = kPageSize > 0 ? kBlocks * 1024 : 1024;
constexpr int kValueGroupStride = kPageSize > 0 ? kValueBlocks * 1024 : 1024;
constexpr int kBlockStride = kPageSize > 0 ? 1024 : kTileKeys * 128;
// Queries that the products read: per consumer [block of 64 dims][64 rows], swizzled. On their way to registers:
// row after row, 16 bytes between them, so that the chunks of eight rows are in different banks.
constexpr int kQueryBlockStride = 64 * 128;
constexpr int kQueryRowBytes = kHeadDim * 2;
constexpr int kQueryRowStride = kQueryRowBytes + 16;
constexpr int kConsumerQueryBytes =
    64 * (kQueriesInRegisters ? kQueryRowStride : kQueryRowBytes);
constexpr int kQueryBytes = kConsumers * kConsumerQueryBytes;
// fp8 pools: tiles as stored, of K and of V in turn, until they are converted.
constexpr int kStagedBytes = kIsFp8 ? kTileKeys * kRowBytes : 0;
constexpr int kStaged = STAGED;
constexpr int kUnitSlots = kIsFp8 ? 4 : 2;  // fp8 pools are read up to three tiles ahead
// Rows are needed until o is written, under the next unit's first scores; q only until its last scores, or until it
// is in registers.
constexpr int kRowSlots = kQueryStages + 2;

// A kv head's blocks of V in a map whose heads have `blocks` of K, or 0.
__device__ __forceinline__ int value_blocks(int blocks) {
  return kValueDim == kHeadDim ? blocks : blocks / kBlocks * kValueBlocks;
}

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Byte offset, in a tile of queries, of 16-byte chunk `chunk` of row `row`.
__device__ __forceinline__ int query_offset(int row, int chunk) {
  if constexpr (kQueriesInRegisters) return row * kQueryRowStride + chunk * 16;
  return row / 64 * kConsumerQueryBytes + chunk / 8 * kQueryBlockStride + row % 64 * 128 +
         ((chunk ^ row) % 8) * 16;
}

// One packed row of a unit, in rows of [rows * heads, head_dim].
struct UnitRow {
  int source;  // its row of q; -1: no such row
  int target;  // its row of o and lse, or of the partial arrays
  int position;
  float sink;  // of a final row; -inf: none
#if HAS_MASK
  int64 mask_bit;  // bit of the run's first key
#endif
};

// Whether an item's queries and rows are those of the unit before it: another of its fixed splits.
__device__ __forceinline__ bool is_same_rows(const WorkItem& item) {
  return SPLITS && (item.rules & kFollows);
}

struct Unit {
  WorkItem item;
  int head;   // kv head; -1: no further unit
  int index;  // of the item
};

// --- shared memory ---------------------------------------------------------------------------------------

struct Shared {
  uint8* base;  // aligned to 1024: swizzled groups repeat with the address
  uint32 address;

  static constexpr int kQueries = kStages * (kTileBytes + kValueTileBytes);
  static constexpr int kStaging = kQueries + kQueryStages * kQueryBytes;
  static constexpr int kRunning = kStaging + kStaged * kStagedBytes;
  static constexpr int kRows = kRunning + kRunningHere * 128 * kConsumers * 16;
  static constexpr int kUnits =
      kRows + kRowSlots * kTileRows * int(sizeof(UnitRow));
  static constexpr int kBarriers = kUnits + kUnitSlots * 64;
  static constexpr int kVisits = kBarriers + 8 * (4 * kStages + 2 * kQueryStages + 2 * kUnitSlots + 1);

  __device__ __forceinline__ explicit Shared(uint8* storage)
      : base(storage), address(shared_address(storage)) {}
  __device__ __forceinline__ uint32 keys(int stage) const { return address + stage * kTileBytes; }
  __device__ __forceinline__ uint32 values(int stage) const {
    return address + kStages * kTileBytes + stage * kValueTileBytes;
  }
  __device__ __forceinline__ uint32 queries(int stage) const {
    return address + kQueries + stage * kQueryBytes;
  }
  __device__ __forceinline__ uint32 staged(int place) const {
    return address + kStaging + place * kStagedBytes;
  }
  // A vector of the consumer threads' running states.
  __device__ __forceinline__ float4& running(int i) const {
    return reinterpret_cast<float4*>(base + kRunning)[i];
  }
  __device__ __forceinline__ UnitRow& row(int slot, int row) const {
    return reinterpret_cast<UnitRow*>(base + kRows)[slot * kTileRows + row];
  }
  __device__ __forceinline__ Unit& unit(int slot) const {
    return *reinterpret_cast<Unit*>(base + kUnits + slot * 64);
  }
  // Which tile is in a stage, as KeyTile packs it; with a mask only.
  __device__ __forceinline__ int& visit(int stage) const {
    return reinterpret_cast<int*>(base + kVisits)[stage];
  }
  __device__ __forceinline__ uint32 barrier(int index) const {
    return address + kBarriers + index * 8;
  }
  __device__ __forceinline__ uint32 keys_full(int stage) const { return barrier(stage); }
  __device__ __forceinline__ uint32 keys_empty(int stage) const { return barrier(kStages + stage); }
  __device__ __forceinline__ uint32 values_full(int stage) const {
    return barrier(2 * kStages + stage);
  }
  __device__ __forceinline__ uint32 values_empty(int stage) const {
    return barrier(3 * kStages + stage);
  }
  __device__ __forceinline__ uint32 query_full(int stage) const {
    return barrier(4 * kStages + stage);
  }
  __device__ __forceinline__ uint32 query_empty(int stage) const {
    return barrier(4 * kStages + kQueryStages + stage);
  }
  __device__ __forceinline__ uint32 unit_full(int slot) const {
    return barrier(4 * kStages + 2 * kQueryStages + slot);
  }
  __device__ __forceinline__ uint32 unit_empty(int slot) const {
    return barrier(4 * kStages + 2 * kQueryStages + kUnitSlots + slot);
  }

  __device__ __forceinline__ uint32 unit_ending() const {
    return barrier(4 * kStages + 2 * kQueryStages + 2 * kUnitSlots);
  }

  // K and V tiles: full by the copy engine's bytes, or by one arrival per warp that stored them, or by each copying
  // lane's and one more; empty by one arrival per warp, whose lanes have waited for the same products. What threads
  // write and read themselves, queries, their rows and units: by an arrival of each of those threads.
  __device__ __forceinline__ void init_barriers() const {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(keys_full(stage), kIsFp8 ? 4 : kByToken ? 33 : 1);
      barrier_init(values_full(stage), kIsFp8 ? 4 : kByToken ? 33 : 1);
      barrier_init(keys_empty(stage), 4 * kConsumers);
      barrier_init(values_empty(stage), 4 * kConsumers);
    }
    for (int stage = 0; stage < kQueryStages; ++stage) {
      barrier_init(query_full(stage), (kQueriesInRegisters ? 1 : 2) * 32 * kGatherers);
      barrier_init(query_empty(stage), 128 * kConsumers);
    }
    for (int slot = 0; slot < kUnitSlots; ++slot) {
      barrier_init(unit_full(slot), 1);
      barrier_init(unit_empty(slot), kThreads);
    }
    if (kMayBeLate) barrier_init(unit_ending(), 1);
    barrier_init_fence();
  }
};

// Zeroes rows `valid` and up of a V tile, with the 128 threads of a warpgroup.
__device__ __forceinline__ void clear_rows(uint32 tile, int valid) {
  const int num_chunks = (kTileKeys - valid) * kValueBlocks * 8;
  for (int i = threadIdx.x % 128; i < num_chunks; i += 128) {
    const int key = valid + i / (kValueBlocks * 8), block = i / 8 % kValueBlocks;
    const uint32 target =
        tile + key / 8 * kValueGroupStride + block * kBlockStride + key % 8 * 128 + i % 8 * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(target), "r"(0) : "memory");
  }
}
