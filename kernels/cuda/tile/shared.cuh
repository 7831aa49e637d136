// The tile kernel's shared memory and its loads: rows of Q, and tokens of K and V.
#pragma once

#include "common/mma.cuh"
#include "common/params.cuh"
#include "common/rows.cuh"
#include "common/shape.cuh"
#include "common/work.cuh"

constexpr int kChunks = kRowBytes / 16;
// An odd number of 16-byte chunks per row puts any 8 consecutive rows in 8 different bank groups.
constexpr int kRowStride = (kChunks | 1) * 16;
constexpr int kQueryStride = (kHeadDim / 8 + 1) * 16;  // Q rows in shared memory, compute type

// Q rows -> shared memory, by `threads` threads, 16 dims at a time, in the order the k steps want.
__device__ __forceinline__ void stage_queries(char* shared, const AttendParams& p,
                                              const WorkItem& item, int first_row, int num_rows,
                                              int head, int thread, int threads) {
  for (int i = thread; i < num_rows * kSteps; i += threads) {
    const int row = i / kSteps, step = i % kSteps;
    uint4 x = make_uint4(0, 0, 0, 0), y = x;
    if (first_row + row < item.num_rows) {
      const int64 query = PackedRow(item.row_begin + first_row + row, p.group_size).query(p, head);
      const uint4* at = reinterpret_cast<const uint4*>(static_cast<const char*>(p.q) +
                                                       query * (kHeadDim * 2) + step * 32);
      x = at[0];
      y = at[1];
    }
    if constexpr (kIsFp8) {
      const uint4 even = make_uint4(x.x, x.z, y.x, y.z), odd = make_uint4(x.y, x.w, y.y, y.w);
      x = even;
      y = odd;
    }
    uint4* to = reinterpret_cast<uint4*>(shared + row * kQueryStride + step * 32);
    to[0] = x;
    to[1] = y;
  }
}

// Loads 16 tokens of K and V at a time into shared memory, one warp. Lane l (and l + 16) looks after
// token l: its page id is read one tile ahead of its rows, so that the id's latency is hidden too.
struct TokenLoader {
  static constexpr uint32 kNoRow = 0xffffffffu;

  uint32 base;     // row of layer and head
  int page_index;  // index into kv_indices, or -1: no token
  int page;        // its id, in flight
  int offset;      // slot within the page

  __device__ __forceinline__ void start(const AttendParams& p, int layer, int head) {
    base = layer * p.layer_rows + head * p.head_rows;
  }

  // Read the page id of token `first + lane % 16` of a run.
  __device__ __forceinline__ void look_up(const AttendParams& p, int kv_begin, int num_keys,
                                          int first) {
    const int token = first + (threadIdx.x & 15);
    page_index = -1;
    if (token < num_keys) {
      const int index = static_cast<uint32>(token) / static_cast<uint32>(p.page_size);
      offset = token - index * p.page_size;
      page_index = kv_begin + index;
      page = p.kv_indices != nullptr ? p.kv_indices[page_index] : page_index;
    }
  }

  // Start copying the tokens looked up; tokens that are not there become zeros.
  __device__ __forceinline__ void copy(const AttendParams& p, uint32 keys, uint32 values) const {
    const int lane = threadIdx.x & 31;
    uint32 row = kNoRow;
    if (page_index >= 0) row = base + page * p.page_rows + offset * p.token_rows;
    constexpr int kCopies = 16 * kChunks;
#pragma unroll
    for (int i = 0; i < (kCopies + 31) / 32; ++i) {
      const int n = i * 32 + lane;
      const int token = n / kChunks, chunk = n % kChunks;
      const uint32 from = __shfl_sync(kAllLanes, row, token & 15);
      if (kCopies % 32 != 0 && n >= kCopies) continue;
      const bool valid = from != kNoRow;
      const int64 at = static_cast<int64>(valid ? from : 0) * kRowBytes + chunk * 16;
      const uint32 to = token * kRowStride + chunk * 16;
      copy_async_16(keys + to, static_cast<const char*>(p.k) + at, valid);
      copy_async_16(values + to, static_cast<const char*>(p.v) + at, valid);
    }
  }
};
