// What one CTA of the latent kernel holds: sizes, and shared memory.
#pragma once

#include "common/types.cuh"
#include "common/work.cuh"
#include "wide/hopper.cuh"
#include "wide/params.cuh"

#ifndef PAGE_SIZE
#error "specialise with -DBF16=0|1 -DPAGE_SIZE=8|16|32|64 -DHAS_MASK=0|1 -DHAS_SOFT_CAP=0|1"
#endif

constexpr bool kBf16 = BF16 != 0;
constexpr int kPageSize = PAGE_SIZE;

// A row of the pool is nine blocks of 64 values: the latent, which is the value too, and the rotary part.
constexpr int kBlocks = 9, kLeftBlocks = 4, kRowBytes = kBlocks * 128, kValueDim = 512;
constexpr int kTileRows = 64, kTileKeys = 64, kPairKeys = 2 * kTileKeys;
constexpr int kPagesPerTile = kTileKeys / kPageSize;
static_assert(kPageSize % 8 == 0 && kTileKeys % kPageSize == 0, "a tile is whole pages, a page whole groups of 8 keys");

// Sizes of half `half` of a tile: left (0) has blocks 0 to 3, right (1) blocks 4 to 8. A half is [group of 8 keys][block]
// of 1024 bytes (8 keys x 64 values, swizzled), as the copy engine leaves the boxes of consecutive pages.
__host__ __device__ constexpr int half_blocks(int half) { return half ? kBlocks - kLeftBlocks : kLeftBlocks; }
__host__ __device__ constexpr int half_bytes(int half) { return half_blocks(half) * kTileKeys * 128; }
__host__ __device__ constexpr int group_stride(int half) { return half_blocks(half) * 1024; }

// Queries and weights: [block of 64 columns][64 rows], swizzled. The last block of the queries is kept in registers, and
// the second warpgroup's weights take its place.
constexpr int kQueryBlock = kTileRows * 128;
constexpr int kTileBytes = half_bytes(0) + half_bytes(1);
constexpr int kAtTiles = kBlocks * kQueryBlock;
constexpr int kAtWeights0 = kAtTiles + 2 * kTileBytes;
constexpr int kAtWeights1 = (kBlocks - 1) * kQueryBlock;
constexpr int kAtLimits = kAtWeights0 + kQueryBlock;
constexpr int kAtSums = kAtLimits + kTileRows * 4;
constexpr int kAtMoved = kAtSums + 2 * kTileRows * 4;
constexpr int kAtBarriers = kAtMoved + 16;
constexpr int kAtUnits = kAtBarriers + 12 * 8;
constexpr int kAtRanges = kAtUnits + 2 * 32;
constexpr int kSharedBytes = kAtRanges + kTileRows * (HAS_MASK ? 16 : 8);

// What a packed row sees of a unit's keys.
struct RowRange {
  int low, high;
#if HAS_MASK
  int64 mask_bit;  // bit of the run's first key
#endif
};

struct Shared {
  uint8* base;  // aligned to 1024: swizzled groups repeat with the address
  uint32 address;

  __device__ __forceinline__ uint32 tile(int stage, int half) const {
    return address + kAtTiles + stage * kTileBytes + half * half_bytes(0);
  }
  __device__ __forceinline__ uint32 weights(int warpgroup) const {
    return address + (warpgroup ? kAtWeights1 : kAtWeights0);
  }
  __device__ __forceinline__ float* limits() const { return reinterpret_cast<float*>(base + kAtLimits); }
  __device__ __forceinline__ float* sums(int warpgroup) const {
    return reinterpret_cast<float*>(base + kAtSums) + warpgroup * kTileRows;
  }
  // The number of the last pair in which a warpgroup has moved a reference.
  __device__ __forceinline__ volatile uint32& moved(int warpgroup) const {
    return reinterpret_cast<volatile uint32*>(base + kAtMoved)[warpgroup];
  }
  __device__ __forceinline__ WorkItem& unit(uint32 number) const {
    return reinterpret_cast<WorkItem*>(base + kAtUnits)[number % 2];
  }
  __device__ __forceinline__ RowRange& range(int row) const {
    return reinterpret_cast<RowRange*>(base + kAtRanges)[row];
  }
  __device__ __forceinline__ uint32 barrier(int index) const { return address + kAtBarriers + index * 8; }
  __device__ __forceinline__ uint32 full(int stage, int half) const { return barrier(stage * 2 + half); }
  __device__ __forceinline__ uint32 empty(int stage, int half) const { return barrier(4 + stage * 2 + half); }
  __device__ __forceinline__ uint32 unit_full(uint32 number) const { return barrier(8 + number % 2); }
  __device__ __forceinline__ uint32 unit_empty(uint32 number) const { return barrier(10 + number % 2); }

  // Halves of tiles: full by the copy engine's bytes, empty by the warps of the two warpgroups' one that multiplies
  // them last. Units: empty by each warp that reads them.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < 4; ++i) {
      barrier_init(barrier(i), 1);
      barrier_init(barrier(4 + i), 4);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(unit_full(i), 1);
      barrier_init(unit_empty(i), 12);
      moved(i) = 0;
    }
    barrier_init_fence();
  }
};

// The parity of the `number`-th use of one of two places.
__device__ __forceinline__ uint32 parity_of(uint32 number) { return number / 2 & 1; }
