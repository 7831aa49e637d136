// One warp's share of attention: kM * 16 packed query rows against a tile of kTokens keys in shared
// memory. Scores, masking, the online softmax and P.V all stay in registers: the accumulator layout
// of S is the operand layout of P.
//
// Fragment geometry (mma m16n8k16): lane = 4 * g + j holds rows g and g + 8 and columns 2j, 2j + 1.
// fp8 tiles use the freedom that only the pairing matters: within 16 dims of K, lane j takes dims
// 4j .. 4j + 3 (Q is permuted alike), and within 16 dims of V the even dims form one column tile and
// the odd dims the next, so that lane j of the output owns dims 4j .. 4j + 3.
#pragma once

#include "params.cuh"
#include "shape.cuh"
#include "state.cuh"

constexpr int kChunks = kRowBytes / 16;
// An odd number of 16-byte chunks per row puts any 8 consecutive rows in 8 different bank groups.
constexpr int kRowStride = (kChunks | 1) * 16;
constexpr int kQueryStride = (kHeadDim / 8 + 1) * 16;  // Q rows in shared memory, compute type

// What one warp knows about the rows of its tile. Index m * 2 + half is row m * 16 + half * 8 + g.
template <int kM>
struct Rows {
  int query[kM * 2];     // row of q and o (in heads), or -1 past the tile's rows
  int position[kM * 2];
  int64 mask[kM * 2];    // bit of key position 0; used with a custom mask only
};

template <int kM>
struct Accumulator {
  float o[kM][kSteps * 2][4];
  float max[kM * 2];  // of raw scores (common) or of base-2 scores (rare)
  float sum[kM * 2];  // this lane's columns only until the end
};

template <int kM>
__device__ __forceinline__ void clear(Accumulator<kM>& acc) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kSteps * 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc.o[m][n][i] = 0.0f;
#pragma unroll
  for (int r = 0; r < kM * 2; ++r) {
    acc.max[r] = minus_infinity();
    acc.sum[r] = 0.0f;
  }
}

template <int kM>
__device__ __forceinline__ void find_rows(Rows<kM>& rows, const AttendParams& p,
                                          const WorkItem& item, int first_row, int head) {
  const int g = (threadIdx.x & 31) >> 2;
#pragma unroll
  for (int r = 0; r < kM * 2; ++r) {
    const int in_tile = first_row + r * 8 + g;
    rows.query[r] = -1;
    rows.position[r] = 0;
    rows.mask[r] = 0;
    if (in_tile < item.num_rows) {
      const int packed = item.row_begin + in_tile;
      const int row = packed / p.group_size;
      rows.query[r] = (p.order[row] * p.num_kv_heads + head) * p.group_size +
                      (packed - row * p.group_size);
      rows.position[r] = p.positions[row];
      if (kRare && p.mask_bits != nullptr) rows.mask[r] = p.mask_row_offsets[row];
    }
  }
}

// Q operand of one k step straight from global memory; rows past the tile's end are zero.
__device__ __forceinline__ void load_query(uint32 (&a)[4], const AttendParams& p, int row0, int row1,
                                           int step) {
  const int j = threadIdx.x & 3;
  const char* q = static_cast<const char*>(p.q) + step * 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half ? row1 : row0;
    uint2 x = make_uint2(0, 0);
    if (row >= 0) {
      const char* at = q + static_cast<int64>(row) * (kHeadDim * 2);
      if constexpr (kIsFp8) {
        x = *reinterpret_cast<const uint2*>(at + j * 8);
      } else {
        x.x = *reinterpret_cast<const uint32*>(at + j * 4);
        x.y = *reinterpret_cast<const uint32*>(at + j * 4 + 16);
      }
    }
    a[half] = x.x;
    a[2 + half] = x.y;
  }
}

// Q rows -> shared memory, by `threads` threads, 16 dims at a time, in the order the k steps want.
__device__ __forceinline__ void stage_queries(char* shared, const AttendParams& p,
                                              const WorkItem& item, int first_row, int num_rows,
                                              int head, int thread, int threads) {
  for (int i = thread; i < num_rows * kSteps; i += threads) {
    const int row = i / kSteps, step = i % kSteps;
    uint4 x = make_uint4(0, 0, 0, 0), y = x;
    if (first_row + row < item.num_rows) {
      const int packed = item.row_begin + first_row + row;
      const int plan_row = packed / p.group_size;
      const int64 query = static_cast<int64>(p.order[plan_row] * p.num_kv_heads + head) *
                              p.group_size +
                          (packed - plan_row * p.group_size);
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

// s = Q K^T for one k step: a holds Q of every row tile, `keys` the tile in shared memory.
template <int kM, int kTokens>
__device__ __forceinline__ void score_step(float (&s)[kM][kTokens / 8][4],
                                           const uint32 (&a)[kM][4], uint32 keys, int step) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int t = 0; t < kTokens / 16; ++t) {
    uint32 b[4];
    if constexpr (kIsFp8) {
      uint32 raw[2];
      load_matrix_x2(raw, keys + (t * 16 + (lane & 15)) * kRowStride + step * 16);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        b[n * 2] = fp8_unpack<kFp8, kBf16>(raw[n]);
        b[n * 2 + 1] = fp8_unpack<kFp8, kBf16>(raw[n] >> 16);
      }
    } else {
      load_matrix_x4(b, keys + (t * 16 + (lane & 7) + ((lane >> 4) << 3)) * kRowStride +
                            step * 32 + ((lane >> 3) & 1) * 16);
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      multiply_add<kBf16>(s[m][t * 2], a[m], b[0], b[1]);
      multiply_add<kBf16>(s[m][t * 2 + 1], a[m], b[2], b[3]);
    }
  }
}

// Soft cap and scale; leaves base-2 scores. Rare kernels only.
template <int kM, int kTokens>
__device__ __forceinline__ void cap_scores(float (&s)[kM][kTokens / 8][4], const AttendParams& p) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x = s[m][n][i] * p.scale;
        if (p.soft_cap > 0.0f) x = p.soft_cap * tanh_accurate(__fdividef(x, p.soft_cap));
        s[m][n][i] = x * kLog2E;
      }
}

// Hide what a row must not see: keys past the run's end, the future, the window, the custom mask.
// `first` is the index in the run of the tile's first key.
template <int kM, int kTokens>
__device__ __forceinline__ void hide_scores(float (&s)[kM][kTokens / 8][4], const Rows<kM>& rows,
                                            const WorkItem& item, int first,
                                            const AttendParams& p) {
  const int j = threadIdx.x & 3;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = m * 2 + half;
      int last = item.num_keys - 1;  // last and least visible key of the run, for this row
      int least = 0;
      if (item.causal & kHideFuture) last = min(last, rows.position[r] - item.kv_start);
      if (item.causal & kHideWindow)
        least = max(least, rows.position[r] - p.window_left - item.kv_start);
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = first + n * 8 + j * 2 + i;
          bool visible = key >= least && key <= last;
          if constexpr (kRare) {
            if (p.mask_bits != nullptr && visible && rows.query[r] >= 0) {
              const int64 bit = rows.mask[r] + item.kv_start + key;
              visible = (p.mask_bits[bit >> 3] >> (bit & 7)) & 1;
            }
          }
          if (!visible) s[m][n][half * 2 + i] = minus_infinity();
        }
    }
}

// Online softmax: raise the running maximum, rescale what it changes, s becomes p = 2^(s c - max c).
template <int kM, int kTokens>
__device__ __forceinline__ void soften(float (&s)[kM][kTokens / 8][4], Accumulator<kM>& acc,
                                       float c) {
  float next[kM * 2];
  bool raised = false;
#pragma unroll
  for (int r = 0; r < kM * 2; ++r) {
    float x = s[r / 2][0][(r & 1) * 2];
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
      x = fmaxf(x, s[r / 2][n][(r & 1) * 2]);
      x = fmaxf(x, s[r / 2][n][(r & 1) * 2 + 1]);
    }
    next[r] = fmaxf(acc.max[r], quad_max(x));
    raised |= next[r] > acc.max[r];
  }
  if (__any_sync(kAllLanes, raised)) {
#pragma unroll
    for (int r = 0; r < kM * 2; ++r) {
      const float factor = state_rescale(acc.max[r] * c, next[r] * c);
      acc.max[r] = next[r];
      acc.sum[r] *= factor;
#pragma unroll
      for (int n = 0; n < kSteps * 2; ++n) {
        acc.o[r / 2][n][(r & 1) * 2] *= factor;
        acc.o[r / 2][n][(r & 1) * 2 + 1] *= factor;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kM * 2; ++r) {
    const float reference = state_reference(acc.max[r]) * c;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = s[r / 2][n][(r & 1) * 2 + i];
        x = exp2_fast(fmaf(x, c, -reference));
        sum += x;
      }
    acc.sum[r] += sum;
  }
}

// acc.o += P V, V of the tile in shared memory.
template <int kM, int kTokens>
__device__ __forceinline__ void weigh_values(Accumulator<kM>& acc,
                                             const float (&s)[kM][kTokens / 8][4], uint32 values) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int t = 0; t < kTokens / 16; ++t) {
    uint32 a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      a[m][0] = pack<kBf16>(s[m][t * 2][0], s[m][t * 2][1]);
      a[m][1] = pack<kBf16>(s[m][t * 2][2], s[m][t * 2][3]);
      a[m][2] = pack<kBf16>(s[m][t * 2 + 1][0], s[m][t * 2 + 1][1]);
      a[m][3] = pack<kBf16>(s[m][t * 2 + 1][2], s[m][t * 2 + 1][3]);
    }
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      uint32 b[4];
      const uint32 row = values + (t * 16 + (lane & 15)) * kRowStride;
      if constexpr (kIsFp8) {
        uint32 raw[2];
        load_matrix_x2_transposed(raw, row + n * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // bytes: token 2j dim even, odd; token 2j + 1 dim even, odd -> evens low, odds high
          const uint32 sorted = __byte_perm(raw[i], 0, 0x3120);
          b[i] = fp8_unpack<kFp8, kBf16>(sorted);
          b[2 + i] = fp8_unpack<kFp8, kBf16>(sorted >> 16);
        }
      } else {
        load_matrix_x4_transposed(b, row + n * 32 + (lane >> 4) * 16);
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        multiply_add<kBf16>(acc.o[m][n * 2], a[m], b[0], b[1]);
        multiply_add<kBf16>(acc.o[m][n * 2 + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Normalise and write: the final rows of o and lse, or partial rows for the merge.
template <int kM>
__device__ __forceinline__ void write_state(Accumulator<kM>& acc, const Rows<kM>& rows,
                                            const AttendParams& p, const WorkItem& item,
                                            int first_row, int head, float c) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
#pragma unroll
  for (int r = 0; r < kM * 2; ++r) {
    const float sum = quad_sum(acc.sum[r]);
    if (rows.query[r] < 0) continue;
    const float inverse = state_inverse(sum) * p.v_scale;
    const float lse = state_lse(acc.max[r] * c, sum);
    const bool final = item.partial == kFinal;
    const int64 row =
        final ? rows.query[r]
              : static_cast<int64>(item.partial + first_row + r * 8 + g) * p.num_kv_heads + head;
    if (j == 0) (final ? p.lse : p.partial_lse)[row] = lse;
    uint32* o = static_cast<uint32*>(p.o) + row * (kHeadDim / 2);
    float* partial = p.partial_o + row * kHeadDim;
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      const int i = (r & 1) * 2;
      const float a0 = acc.o[r / 2][n * 2][i] * inverse, a1 = acc.o[r / 2][n * 2][i + 1] * inverse;
      const float b0 = acc.o[r / 2][n * 2 + 1][i] * inverse,
                  b1 = acc.o[r / 2][n * 2 + 1][i + 1] * inverse;
      if constexpr (kIsFp8) {
        if (final) {
          *reinterpret_cast<uint2*>(o + n * 8 + j * 2) =
              make_uint2(pack<kBf16>(a0, b0), pack<kBf16>(a1, b1));
        } else {
          *reinterpret_cast<float4*>(partial + n * 16 + j * 4) = make_float4(a0, b0, a1, b1);
        }
      } else if (final) {
        o[n * 8 + j] = pack<kBf16>(a0, a1);
        o[n * 8 + 4 + j] = pack<kBf16>(b0, b1);
      } else {
        *reinterpret_cast<float2*>(partial + n * 16 + j * 2) = make_float2(a0, a1);
        *reinterpret_cast<float2*>(partial + n * 16 + 8 + j * 2) = make_float2(b0, b1);
      }
    }
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
