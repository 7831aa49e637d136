// Whole pages of the pool, whose layers lie apart, to and from contiguous staging memory. Bits are moved as
// they are, so formats and layouts do not matter.
//
// A block moves pieces of 16 KiB, a thread four units of 16 bytes of each. Grids are small: the copies to the
// host that follow are far slower, and other kernels run beside.
#include "common/types.cuh"

constexpr int kThreads = 256;
constexpr int kUnitsPerThread = 4;
constexpr uint32 kPieceUnits = kThreads * kUnitsPerThread;
constexpr int kMostPages = 64;

struct PageMoves {
  void* pool;          // page 0 of layer 0
  void* staged;        // [num_pages, num_layers, page_units]
  uint32 page_units;   // 16-byte units of a page in one layer
  uint32 pool_pages;   // pages of the pool
  uint32 first_layer;
  uint32 num_layers;   // from first_layer on
  uint32 num_pages;
};

struct PageIds {
  int page[kMostPages];
};

template <bool kGathers>
__device__ __forceinline__ void move_pages(const PageMoves& p, const PageIds& ids) {
  uint4* pool = static_cast<uint4*>(p.pool);
  uint4* staged = static_cast<uint4*>(p.staged);
  const uint32 pieces = (p.page_units + kPieceUnits - 1) / kPieceUnits;
  const uint32 total = p.num_pages * p.num_layers * pieces;
  for (uint32 i = blockIdx.x; i < total; i += gridDim.x) {
    const uint32 row = i / pieces, first = (i - row * pieces) * kPieceUnits + threadIdx.x;
    const uint32 page = row / p.num_layers, layer = p.first_layer + (row - page * p.num_layers);
    const int64 in_pool = (static_cast<int64>(layer) * p.pool_pages + ids.page[page]) * p.page_units;
    const int64 in_stage = static_cast<int64>(row) * p.page_units;
    const uint4* from = kGathers ? pool + in_pool : staged + in_stage;
    uint4* to = kGathers ? staged + in_stage : pool + in_pool;
    uint4 moved[kUnitsPerThread];
#pragma unroll
    for (int n = 0; n < kUnitsPerThread; ++n) {
      const uint32 unit = first + n * kThreads;
      if (unit < p.page_units) moved[n] = __ldcs(from + unit);
    }
#pragma unroll
    for (int n = 0; n < kUnitsPerThread; ++n) {
      const uint32 unit = first + n * kThreads;
      if (unit < p.page_units) to[unit] = moved[n];
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    gather_pages(const __grid_constant__ PageMoves moves, const __grid_constant__ PageIds ids) {
  move_pages<true>(moves, ids);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    scatter_pages(const __grid_constant__ PageMoves moves, const __grid_constant__ PageIds ids) {
  move_pages<false>(moves, ids);
}
