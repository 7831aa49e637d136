// Whole pages of the pool, whose layers are apart, to and from places in host memory; and their digests. Bits are
// moved as they are, so formats and layouts do not matter.
//
// The processors copy, and not the copy engines, which have one queue for all streams: a decode's small copies would
// wait for all pages before them. Few blocks are enough, and leave the others to the kernels beside. When moving, a
// block owns runs of 32 KiB, a thread four units of 16 bytes of each. For digests, a block owns a segment.
#include "common/types.cuh"
#include "pages/xxh3.cuh"

constexpr int kThreads = 512;
constexpr int kUnitsPerThread = 4;
constexpr uint32 kRunUnits = kThreads * kUnitsPerThread;
constexpr int kMostPages = 64;

struct PageMoves {
  void* pool;          // page 0 of layer 0
  void* digests;       // [num_pages, num_segments, 16], in host memory
  uint32 page_units;   // 16-byte units of a page in one layer
  uint32 pool_pages;   // pages of the pool
  uint32 num_layers;
  uint32 segment_layers;  // of a digest; the last one of a page can have fewer, but more than 240 bytes
  uint32 num_pages;
};

struct PagePlaces {
  void* host[kMostPages];  // [num_layers, page_units]
  int page[kMostPages];
};

template <bool kLoads>
__device__ __forceinline__ void move_pages(const PageMoves& p, const PagePlaces& places) {
  const uint32 payload = p.num_layers * p.page_units, total = p.num_pages * payload;
  uint4* pool = static_cast<uint4*>(p.pool);
  for (uint32 run = blockIdx.x * kRunUnits; run < total; run += gridDim.x * kRunUnits) {
    uint4 moved[kUnitsPerThread];
    uint4* to[kUnitsPerThread];
#pragma unroll
    for (int n = 0; n < kUnitsPerThread; ++n) {
      const uint32 unit = run + n * kThreads + threadIdx.x;
      if (unit >= total) continue;
      const uint32 i = unit / payload, at = unit - i * payload;
      const uint32 layer = at / p.page_units, page = places.page[i];
      uint4* stored = pool + (static_cast<int64>(layer) * p.pool_pages + page) * p.page_units + (at - layer * p.page_units);
      uint4* host = static_cast<uint4*>(places.host[i]) + at;
      to[n] = kLoads ? stored : host;
      moved[n] = __ldcs(kLoads ? host : stored);
    }
#pragma unroll
    for (int n = 0; n < kUnitsPerThread; ++n)
      if (run + n * kThreads + threadIdx.x < total) *to[n] = moved[n];
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    load_pages(const __grid_constant__ PageMoves moves, const __grid_constant__ PagePlaces places) {
  move_pages<true>(moves, places);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    store_pages(const __grid_constant__ PageMoves moves, const __grid_constant__ PagePlaces places) {
  move_pages<false>(moves, places);
}

constexpr uint32 kBlocksAtOnce = kThreads / 4;

// Four threads sum a block of 1,024 bytes, two of its eight sums each. Then eight threads chain the blocks. A stripe
// is in one layer.
extern "C" __global__ void __launch_bounds__(kThreads)
    digest_pages(const __grid_constant__ PageMoves p, const __grid_constant__ PagePlaces places) {
  using namespace xxh3;
  __shared__ ulonglong2 added[kBlocksAtOnce][kSums / 2];
  __shared__ uint64 secret[kSecretBytes / 8], sums[kSums];
  const uint32 segments = (p.num_layers + p.segment_layers - 1) / p.segment_layers;
  if (blockIdx.x >= p.num_pages * segments) return;
  const uint32 i = blockIdx.x / segments, first_layer = (blockIdx.x - i * segments) * p.segment_layers;
  const uint32 page_bytes = 16 * p.page_units, length = min(p.segment_layers, p.num_layers - first_layer) * page_bytes;
  const uint32 whole = (length - 1) / kBlock, lane = threadIdx.x;
  if (lane < kSecretBytes / 8) secret[lane] = kSecret[lane];
  uint64 sum = lane < kSums ? kFirstSums[lane] : 0;
  __syncthreads();

  // A stripe's address, from its first byte in the segment.
  const auto stripe_at = [&](uint32 byte) {
    const uint32 layer = byte / page_bytes;
    const int64 page = static_cast<int64>(first_layer + layer) * p.pool_pages + places.page[i];
    return static_cast<const char*>(p.pool) + page * page_bytes + (byte - layer * page_bytes);
  };
  for (uint32 first = 0; first <= whole; first += kBlocksAtOnce) {
    const uint32 block = first + lane / 4, pair = lane % 4;
    if (block <= whole) {
      const uint32 stripes = block < whole ? kStripes : (length - 1 - whole * kBlock) / kStripe;
      ulonglong2 both = {0, 0};
#pragma unroll
      for (uint32 n = 0; n < kStripes; ++n) {
        if (n >= stripes) continue;
        const auto word = reinterpret_cast<const ulonglong2*>(stripe_at(block * kBlock + n * kStripe))[pair];
        both.x += product(word.x, secret[n + 2 * pair]) + word.y;
        both.y += product(word.y, secret[n + 2 * pair + 1]) + word.x;
      }
      added[block - first][pair] = both;
    }
    __syncthreads();
    if (lane < kSums) {
      const uint64 key = secret[kStripes + lane];
      const uint32 end = min(whole - first, kBlocksAtOnce);
      const auto* each = reinterpret_cast<const uint64*>(added) + lane;
#pragma unroll 4
      for (uint32 n = 0; n < end; ++n) sum = scrambled(sum + each[n * kSums], key);
      if (end < kBlocksAtOnce) sum += each[end * kSums];
    }
    __syncthreads();
  }

  if (lane < kSums) {
    const auto* last = reinterpret_cast<const uint64*>(stripe_at(length - kStripe));
    const uint64 key = secret_at(kSecretBytes - kStripe - 7 + 8 * lane);
    sums[lane] = sum + product(last[lane], key) + last[lane ^ 1];
    __syncwarp((1u << kSums) - 1);
    auto* digest = static_cast<uint64*>(p.digests) + 2 * blockIdx.x;
    if (lane == 0) digest[0] = reversed(high_half(sums, length));
    if (lane == 1) digest[1] = reversed(low_half(sums, length));
  }
}
