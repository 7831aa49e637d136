// Rows in and out of the pool: append, gather, and row copies between pages. All are copies at the
// memory limit: a thread moves 8 values of K and 8 of V with 8- to 32-byte accesses.
//
// TENSOR is the format of the k, v tensors outside the pool, STORE that of the pool.
#include "common/formats.cuh"
#include "common/overlap.cuh"

constexpr int kHeadDim = HEAD_DIM;
constexpr int kTensor = TENSOR;
constexpr int kStore = STORE;
constexpr int kUnits = kHeadDim / 8;
constexpr int kThreads = 256;
constexpr int64 kNowhere = -1;
static_assert(kHeadDim % 8 == 0, "eight values per thread");

struct PoolRows {
  void* k;  // K of page 0 of the layer
  void* v;
  uint32 layer_rows;  // strides in rows of kHeadDim stored elements
  uint32 page_rows;
  uint32 token_rows;
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

__device__ __forceinline__ int64 pool_offset(const PoolRows& pool, int slot, int head, int unit) {
  const int page = static_cast<uint32>(slot) / static_cast<uint32>(pool.page_size), offset = slot - page * pool.page_size;
  const uint32 row = page * pool.page_rows + offset * pool.token_rows + head * pool.head_rows;
  return (static_cast<int64>(row) * kHeadDim + unit * 8) * format_bytes<kStore>();
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
  const uint32 heads = pool.num_kv_heads;
  const uint32 total = moved.rows.num_rows * heads * kUnits;  // the host bounds it
  const uint32 first = blockIdx.x * (kThreads * kPerThread) + threadIdx.x;
  Eight keys[kPerThread], values[kPerThread];
  int64 to[kPerThread];
  launch_dependents();
#pragma unroll
  for (int n = 0; n < kPerThread; ++n) {
    const uint32 i = first + n * kThreads;
    if (i < total) {
      const int64 from = static_cast<int64>(i) * 8 * format_bytes<kTensor>();
      keys[n] = load_8(moved.rows.k, from);
      values[n] = load_8(moved.rows.v, from);
      const uint32 head_row = i / kUnits, row = head_row / heads;
      const int slot = moved.rows.slots[row];
      to[n] = kSkips && slot < 0 ? kNowhere : pool_offset(pool, slot, head_row - row * heads, i % kUnits);
    }
  }
  wait_for_predecessor();
#pragma unroll
  for (int n = 0; n < kPerThread; ++n) {
    if (first + n * kThreads < total && !(kSkips && to[n] == kNowhere)) {
      append_8(static_cast<char*>(pool.k) + to[n], keys[n], pool.k_scale);
      append_8(static_cast<char*>(pool.v) + to[n], values[n], pool.v_scale);
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
  const uint32 head_row = i / kUnits;
  const int unit = i % kUnits;
  const int row = head_row / static_cast<uint32>(pool.num_kv_heads);
  if (row >= moved.rows.num_rows) return;
  const int head = head_row - row * pool.num_kv_heads;
  const int64 to = static_cast<int64>(i) * 8 * format_bytes<kTensor>();
  const int64 from = pool_offset(pool, moved.rows.slots[row], head, unit);
  gather_8(static_cast<char*>(moved.rows.k) + to, static_cast<const char*>(pool.k) + from,
           pool.k_scale);
  gather_8(static_cast<char*>(moved.rows.v) + to, static_cast<const char*>(pool.v) + from,
           pool.v_scale);
}

// First num_rows[x] slots of page src[x] -> page dst[x]; blockIdx = (copy, layer).
extern "C" __global__ void __launch_bounds__(kThreads)
    copy_rows(const __grid_constant__ PoolRows pool, const int* src, const int* dst,
              const int* num_rows) {
  constexpr int kChunks = kHeadDim * format_bytes<kStore>() / 8;
  const int64 layer = static_cast<int64>(blockIdx.y) * pool.layer_rows;
  const int64 from_page = layer + static_cast<int64>(src[blockIdx.x]) * pool.page_rows;
  const int64 to_page = layer + static_cast<int64>(dst[blockIdx.x]) * pool.page_rows;
  const int count = num_rows[blockIdx.x] * pool.num_kv_heads * kChunks;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const int token = row / pool.num_kv_heads, head = row - token * pool.num_kv_heads;
    const int64 within = static_cast<int64>(token) * pool.token_rows + head * pool.head_rows;
    const int64 from = (from_page + within) * kChunks + chunk;
    const int64 to = (to_page + within) * kChunks + chunk;
    static_cast<uint2*>(pool.k)[to] = static_cast<const uint2*>(pool.k)[from];
    static_cast<uint2*>(pool.v)[to] = static_cast<const uint2*>(pool.v)[from];
  }
}
