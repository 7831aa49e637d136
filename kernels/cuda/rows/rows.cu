// Rows in and out of the pool: append, gather, and row copies between pages. All are copies at the
// memory limit: a thread moves 8 values of K and 8 of V with 8- to 32-byte accesses.
//
// TENSOR is the format of the k, v tensors outside the pool, STORE that of the pool. VALUE_DIM is that of v where it is not
// HEAD_DIM; 0: rows have no v (a latent pool's).
#include "common/formats.cuh"
#include "common/overlap.cuh"

constexpr int kHeadDim = HEAD_DIM;
constexpr int kTensor = TENSOR;
constexpr int kStore = STORE;
#ifndef VALUE_DIM
#define VALUE_DIM HEAD_DIM
#endif
constexpr int kValueDim = VALUE_DIM;
constexpr bool kAlike = kValueDim == kHeadDim;           // a thread then has the same eight values of K and of V
constexpr int kUnits = (kHeadDim + (kAlike ? 0 : kValueDim)) / 8;  // of eight values, of a head's row: else K's, then V's
constexpr int kThreads = 256;
constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }
constexpr int kRowUnit = gcd(kHeadDim, kValueDim);  // elements that strides of pages count
static_assert(kHeadDim % 8 == 0 && kValueDim % 8 == 0, "eight values per thread");

struct PoolRows {
  void* k;  // K of page 0 of the layer
  void* v;
  uint32 layer_rows;  // strides in rows of kRowUnit stored elements
  uint32 page_rows;
  uint32 token_rows;  // in rows of a head
  uint32 head_rows;
  int page_size;
  int num_kv_heads;
  float k_scale;  // real value = stored * scale
  float v_scale;
};

// Row i of k and v [num_rows, num_kv_heads, kHeadDim] belongs to token slot slots[i].
struct TensorRows {
  void* k;
  void* v;
  const int* slots;
  int num_rows;
};

struct Moved {
  PoolRows pool;
  TensorRows rows;
};

// Where eight values are: of K or V, their offset in the tensor and in the pool. Units of a head's row count those of V
// after those of K, but where both are alike.
struct Place {
  bool of_values;
  int slot;
  int64 tensor, pool;
};

__device__ __forceinline__ Place place_of(const Moved& moved, uint32 i) {
  const PoolRows& pool = moved.pool;
  const uint32 heads = pool.num_kv_heads, head_row = i / kUnits, row = head_row / heads;
  const int unit = i % kUnits;
  Place place;
  place.slot = moved.rows.slots[row];
  place.of_values = !kAlike && unit >= kHeadDim / 8;
  const int dim = place.of_values ? kValueDim : kHeadDim, at = place.of_values ? unit - kHeadDim / 8 : unit;
  const int page = static_cast<uint32>(place.slot) / static_cast<uint32>(pool.page_size);
  const uint32 before = page * pool.page_rows;
  const uint32 within = (place.slot - page * pool.page_size) * pool.token_rows + (head_row - row * heads) * pool.head_rows;
  const int64 stored = kAlike ? static_cast<int64>(before + within) * kHeadDim
                              : static_cast<int64>(before) * kRowUnit + static_cast<int64>(within) * dim;
  place.pool = (stored + at * 8) * format_bytes<kStore>();
  place.tensor = (kAlike ? static_cast<int64>(i) * 8 : static_cast<int64>(head_row) * dim + at * 8) * format_bytes<kTensor>();
  return place;
}

// Eight values of a tensor in registers: loaded for K and V both before either is stored.
struct Eight {
  uint4 word[kTensor == kFp32 ? 2 : 1];
};

__device__ __forceinline__ Eight load_8(const void* base, int64 at) {
  const uint4* from = reinterpret_cast<const uint4*>(static_cast<const char*>(base) + at);
  Eight x;
  x.word[0] = __ldcs(from);
  if constexpr (kTensor == kFp32) x.word[1] = __ldcs(from + 1);
  return x;
}

__device__ __forceinline__ void append_8(void* to, const Eight& from, float scale) {
  if constexpr (kTensor == kStore) {
    *static_cast<uint4*>(to) = from.word[0];
  } else {
    float x[8];
    read_8<kTensor>(x, from.word);
    if (scale != 1.0f) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = __fdiv_rn(x[i], scale);
    }
    write_8<kStore>(to, x);
  }
}

// Rows -> token slots. A thread has kPerThread times eight values, a block's worth apart. Rows and
// slots come by copies, never from a kernel, so they are read while the kernel before still runs; only
// then does the pool change. With kSkips a row without a slot (-1) is left out.
template <bool kSkips>
__device__ __forceinline__ void append(const Moved& moved) {
  constexpr int kPerThread = 2;
  const PoolRows& pool = moved.pool;
  const uint32 total = moved.rows.num_rows * pool.num_kv_heads * kUnits;  // the host bounds it
  const uint32 first = blockIdx.x * (kThreads * kPerThread) + threadIdx.x;
  Eight keys[kPerThread], values[kPerThread];
  Place to[kPerThread];
  launch_dependents();
#pragma unroll
  for (int n = 0; n < kPerThread; ++n) {
    const uint32 i = first + n * kThreads;
    if (i < total) {
      to[n] = place_of(moved, i);
      keys[n] = load_8(to[n].of_values ? moved.rows.v : moved.rows.k, to[n].tensor);
      if (kAlike) values[n] = load_8(moved.rows.v, to[n].tensor);
    }
  }
  wait_for_predecessor();
#pragma unroll
  for (int n = 0; n < kPerThread; ++n) {
    if (first + n * kThreads < total && !(kSkips && to[n].slot < 0)) {
      const bool of_values = to[n].of_values;
      append_8(static_cast<char*>(of_values ? pool.v : pool.k) + to[n].pool, keys[n],
               of_values ? pool.v_scale : pool.k_scale);
      if (kAlike) append_8(static_cast<char*>(pool.v) + to[n].pool, values[n], pool.v_scale);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    append_rows(const __grid_constant__ Moved moved) {
  append<false>(moved);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    append_some_rows(const __grid_constant__ Moved moved) {
  append<true>(moved);
}

__device__ __forceinline__ void gather_8(void* to, const void* from, float scale) {
  if constexpr (kTensor == kStore) {
    *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
  } else {
    float x[8];
    read_8<kStore>(x, from);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= scale;
    write_8<kTensor>(to, x);
  }
}

// Token slots -> rows, dequantised.
extern "C" __global__ void __launch_bounds__(kThreads)
    gather_rows(const __grid_constant__ Moved moved) {
  const PoolRows& pool = moved.pool;
  const uint32 i = blockIdx.x * kThreads + threadIdx.x;  // the host bounds it
  if (i >= static_cast<uint32>(moved.rows.num_rows) * pool.num_kv_heads * kUnits) return;
  const Place from = place_of(moved, i);
  const bool of_values = from.of_values;
  gather_8(static_cast<char*>(of_values ? moved.rows.v : moved.rows.k) + from.tensor,
           static_cast<const char*>(of_values ? pool.v : pool.k) + from.pool, of_values ? pool.v_scale : pool.k_scale);
  if (kAlike)
    gather_8(static_cast<char*>(moved.rows.v) + from.tensor, static_cast<const char*>(pool.v) + from.pool, pool.v_scale);
}

// Copies the first `count` slots of a page, of K or V with rows of kDim.
template <int kDim>
__device__ __forceinline__ void copy_slots(void* part, const PoolRows& pool, int64 from_page, int64 to_page, int count) {
  constexpr int kChunks = kDim * format_bytes<kStore>() / 8, kUnitBytes = kRowUnit * format_bytes<kStore>();
  char* base = static_cast<char*>(part);
  for (int i = threadIdx.x; i < count * pool.num_kv_heads * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i - row * kChunks;
    const int token = row / pool.num_kv_heads, head = row - token * pool.num_kv_heads;
    const int64 within = static_cast<int64>(token) * pool.token_rows + head * pool.head_rows;
    const int64 at = (within * kChunks + chunk) * 8;
    *reinterpret_cast<uint2*>(base + to_page * kUnitBytes + at) =
        *reinterpret_cast<const uint2*>(base + from_page * kUnitBytes + at);
  }
}

// First num_rows[x] slots of page src[x] -> page dst[x]; blockIdx = (copy, layer).
extern "C" __global__ void __launch_bounds__(kThreads)
    copy_rows(const __grid_constant__ PoolRows pool, const int* src, const int* dst,
              const int* num_rows) {
  const int64 layer = static_cast<int64>(blockIdx.y) * pool.layer_rows;
  const int64 from_page = layer + static_cast<int64>(src[blockIdx.x]) * pool.page_rows;
  const int64 to_page = layer + static_cast<int64>(dst[blockIdx.x]) * pool.page_rows;
  copy_slots<kHeadDim>(pool.k, pool, from_page, to_page, num_rows[blockIdx.x]);
  if constexpr (kValueDim > 0) copy_slots<kValueDim>(pool.v, pool, from_page, to_page, num_rows[blockIdx.x]);
}
