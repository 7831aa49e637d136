// What one CTA of the wide kernel holds: sizes, shared memory, and the rows of a consumer warpgroup.
#pragma once

#include "hopper.cuh"
#include "state.cuh"
#include "wgmma.cuh"
#include "work.cuh"

using Element = unsigned short;  // 16 bits of fp16 or bf16, as kBf16 says: only moved, never computed on

#ifndef kHasMask
#define kHasMask 0
#endif
#ifndef kHasSoftCap
#define kHasSoftCap 0
#endif
#ifndef kPingPong
#define kPingPong 1
#endif
#ifndef kLazyRescale
#define kLazyRescale 0
#endif

#ifndef kCluster
#define kCluster 1
#endif
#ifndef kHalfTiles
#define kHalfTiles 0
#endif

static_assert(kHeadDim % 64 == 0, "a swizzled row of 128 bytes holds 64 elements");
static_assert(kTileKeys % 16 == 0, "a product takes 16 keys");
#if kPageSize > 0
static_assert(kPageSize % 8 == 0, "a swizzled group is 8 rows");
static_assert(kTileKeys % kPageSize == 0, "a tile is whole pages");
constexpr int kPagesPerTile = kTileKeys / kPageSize;
constexpr int kPageBytes = kPageSize * kHeadDim * 2;
static_assert(kPagesPerTile <= 32, "one page id per lane");
#endif

static_assert(kCluster == 1 || kCluster == 2, "blocks that share each K and V tile they load");

constexpr int kTileRows = 64 * kConsumers;  // of one block; an item has kCluster times as many
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
constexpr int kRowSlots = kQueryStages + 1;  // rows are needed until o is written, q is not

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
};

struct Unit {
  WorkItem item;
  int head;  // kv head; -1: no further unit
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
  __device__ __forceinline__ unsigned unit_address(int slot) const {
    return address + kUnits + slot * 64;
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

  // Full rings complete by bytes (or by a writer's arrival), empty ones by one arrival per reading warp.
  __device__ __forceinline__ void init_barriers() const {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(keys_full(stage), 1);
      barrier_init(values_full(stage), 1);
      barrier_init(keys_empty(stage), kCluster * 4 * kConsumers);
      barrier_init(values_empty(stage), kCluster * 4 * kConsumers);
    }
    for (int stage = 0; stage < kQueryStages; ++stage) {
      barrier_init(query_full(stage), 2);
      barrier_init(query_empty(stage), 4 * kConsumers);
    }
    for (int slot = 0; slot < kUnitSlots; ++slot) {
      barrier_init(unit_full(slot), 1);
      barrier_init(unit_empty(slot), kCluster * kThreads / 32);
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

// --- a thread's two rows ---------------------------------------------------------------------------------

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// A unit's two rows when their last key is summed: what is left is to write them.
struct Finished {
  float inverse[2], lse[2];
  int slot;
  bool final;

  __device__ __forceinline__ void write(const float (&o)[kOutputs], const WideArguments& arguments,
                                        const Shared& shared, int row) const;
};

// Running softmax of rows `row` and `row + 8`, of which this thread holds every fourth pair of columns.
// `max` is kept in units of the products; times `scale` it is in base 2.
struct Rows {
  float max[2], sum[2];
  float scale;              // of a product (after the cap, if any) to base 2
  float cap_scale;          // sm_scale / soft_cap
  int low[2], high[2];      // first and last key of the run that the row sees
  int warp_low, warp_high;  // keys in this range are seen by all 16 rows of the warp

  __device__ __forceinline__ Rows(const WorkItem& item, const WideArguments& arguments,
                                  const Shared& shared, int stage, int row) {
    scale = kHasSoftCap ? arguments.soft_cap * kLog2E : arguments.sm_scale * kLog2E;
    cap_scale = kHasSoftCap ? arguments.sm_scale / arguments.soft_cap : 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[r] = minus_infinity();
      sum[r] = 0.0f;
      low[r] = 0;
      high[r] = item.num_keys - 1;
      const PackedRow& packed = shared.row(stage, row + 8 * r);
      if (packed.source >= 0) {
        const long long key = static_cast<long long>(packed.position) - item.kv_start;
        if (item.causal & kHideFuture) high[r] = ::min(static_cast<long long>(high[r]), key);
        if (item.causal & kHideWindow) low[r] = ::max(key - arguments.window_left, 0ll);
      }
    }
    warp_low = __reduce_max_sync(0xffffffffu, ::max(low[0], low[1]));
    warp_high = __reduce_min_sync(0xffffffffu, ::min(high[0], high[1]));
  }

  // Hides the keys, of the tile that starts at key `begin`, which a row does not see.
  __device__ __forceinline__ void hide(float (&s)[kScores], int begin) const {
    const int column = begin + threadIdx.x % 4 * 2;
    if (begin < warp_low || begin + kTileKeys - 1 > warp_high) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const int r = i / 2 % 2, key = column + i / 4 * 8 + i % 2;
        if (key < low[r] || key > high[r]) s[i] = minus_infinity();
      }
    }
  }

  __device__ __forceinline__ void cap(float (&s)[kScores]) const {
#if kHasSoftCap
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = tanh_accurate(s[i] * cap_scale);
#endif
  }

  // Visible scores to weights 2^(s - max), in place. `factor` brings what was summed before to the new
  // maximum.
  __device__ __forceinline__ void soften(float (&s)[kScores], float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = max[r];
#pragma unroll
      for (int i = 0; i < kScores; i += 4) top = fmaxf(top, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
      top = quad_max(top);
      const float reference = state_reference(top) * scale;
      factor[r] = exp2_fast(max[r] * scale - reference);
      max[r] = top;
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        if (i / 2 % 2 == r) {
          s[i] = exp2_fast(fmaf(s[i], scale, -reference));
          total += s[i];
        }
      }
      sum[r] = fmaf(sum[r], factor[r], total);
    }
  }

  __device__ __forceinline__ void rescale(float (&o)[kOutputs], const float (&factor)[2]) const {
    if (kLazyRescale && !__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] *= factor[i / 2 % 2];
  }

  // Completes the sums over the four threads of a row.
  __device__ __forceinline__ Finished finish(int slot, bool final) const {
    Finished finished;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = quad_sum(sum[r]);
      finished.inverse[r] = state_inverse(total);
      finished.lse[r] = state_lse(max[r] * scale, total);
    }
    finished.slot = slot;
    finished.final = final;
    return finished;
  }
};

#if kHasMask
// Hides what the custom mask hides of the tile that starts at key `begin`: 32 bits at a time.
__device__ __forceinline__ void hide_masked(float (&s)[kScores], int begin, const Shared& shared,
                                            int stage, int row, const unsigned* mask_bits) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const long long bit = shared.row(stage, row + 8 * r).mask_bit + begin;
    const unsigned* words = mask_bits + (bit >> 5);
#pragma unroll
    for (int w = 0; w < (kTileKeys + 31) / 32; ++w) {
      const unsigned word = __funnelshift_r(words[w], words[w + 1], bit & 31);
#pragma unroll
      for (int j = 4 * w; j < 4 * w + 4 && j < kTileKeys / 8; ++j) {
        const unsigned pair = word >> (j % 4 * 8 + threadIdx.x % 4 * 2);
        if (!(pair & 1)) s[4 * j + 2 * r] = minus_infinity();
        if (!(pair & 2)) s[4 * j + 2 * r + 1] = minus_infinity();
      }
    }
  }
}
#endif

__device__ __forceinline__ unsigned pack_pair(float low, float high) {
  unsigned packed;
#ifdef kBf16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
  return packed;
}

// Accumulator pairs in their order are the A fragments of the next product: 4 registers per 16 keys.
__device__ __forceinline__ void pack(const float (&s)[kScores], unsigned (&p)[kScores / 2]) {
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) p[i] = pack_pair(s[2 * i], s[2 * i + 1]);
}

// --- results -----------------------------------------------------------------------------------------------

__device__ __forceinline__ void clear(float (&o)[kOutputs]) {
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) o[i] = 0.0f;
}

// Each thread of a quad holds word `lane % 4` of four 16-byte chunks; after it, all of chunk `lane % 4`.
__device__ __forceinline__ uint4 transpose_quad(unsigned a, unsigned b, unsigned c, unsigned d,
                                                int lane) {
  const bool odd = lane & 1, high = lane & 2;
  const unsigned ab = __shfl_xor_sync(0xffffffffu, odd ? a : b, 1);
  const unsigned cd = __shfl_xor_sync(0xffffffffu, odd ? c : d, 1);
  a = odd ? ab : a;
  b = odd ? b : ab;
  c = odd ? cd : c;
  d = odd ? d : cd;
  const unsigned ac = __shfl_xor_sync(0xffffffffu, high ? a : c, 2);
  const unsigned bd = __shfl_xor_sync(0xffffffffu, high ? b : d, 2);
  return make_uint4(high ? ac : a, high ? bd : b, high ? c : ac, high ? d : bd);
}

// Final rows in 16-byte chunks, a quad of threads 64 consecutive bytes at a time; partial rows in
// float, a quad 32 bytes at a time.
__device__ __forceinline__ void Finished::write(const float (&o)[kOutputs],
                                                const WideArguments& arguments,
                                                const Shared& shared, int row) const {
  const int part = fresh_lane() % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int index = shared.row(slot, row + 8 * r).target;
    const long long offset = static_cast<long long>(index) * kHeadDim;
    if (final) {
      Element* o_row = static_cast<Element*>(arguments.o) + offset + part * 8;
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; j += 4) {
        unsigned words[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int i = 4 * (j + c) + 2 * r;
          words[c] = pack_pair(o[i] * inverse[r], o[i + 1] * inverse[r]);
        }
        const uint4 chunk = transpose_quad(words[0], words[1], words[2], words[3], part);
        if (index >= 0) *reinterpret_cast<uint4*>(o_row + j * 8) = chunk;
      }
    } else if (index >= 0) {
      float* o_row = arguments.partial_o + offset + part * 2;
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        const int i = 4 * j + 2 * r;
        *reinterpret_cast<float2*>(o_row + 8 * j) =
            make_float2(o[i] * inverse[r], o[i + 1] * inverse[r]);
      }
    }
    if (part == 0 && index >= 0) (final ? arguments.lse : arguments.partial_lse)[index] = lse[r];
  }
}
