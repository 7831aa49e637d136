// Attention of any head_dim and v_head_dim that are multiples of 8, on any device: for shapes that no other kernel takes.
// No matrix instructions; all arithmetic is float32.
//
// A block owns one work item of one kv head: kWarps packed rows, a warp each, its query in shared memory. The warp walks
// the run 32 keys at a time: each lane has the score of one key, then each lane adds up some columns of all their values.
// Keys that the row does not see are neither scored nor multiplied, so what they hold does not matter. Memory traffic:
// each K and V byte of a run once per row, through the caches.
//
// Specialised by -D: HEAD_DIM, VALUE_DIM (of a latent pool, LATENT 1, V is the first values of K), TENSOR and STORE
// (formats of q and o, and of the pool).
#include "common/formats.cuh"
#include "common/mma.cuh"

constexpr int kHeadDim = HEAD_DIM, kValueDim = VALUE_DIM, kTensor = TENSOR, kStore = STORE;
constexpr int kWarps = 8, kKeys = 32;
constexpr int kVectors = (kValueDim / 8 + 31) / 32;  // of 8 columns, per lane
static_assert(kHeadDim % 8 == 0 && kValueDim % 8 == 0, "eight values at a time");

#define GENERAL 1
#include "common/params.cuh"
#include "common/rows.cuh"
#include "common/state.cuh"
#include "visible/visible.cuh"

struct PlainParams {
  AttendParams attend;
  VisibleTable unused;
};

constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }
constexpr int kRowUnit = LATENT ? kHeadDim : gcd(kHeadDim, kValueDim);  // elements that strides of pages count

// The address of a token's row of K (or V): `page` of the item's layer, token `offset` there.
template <int kDim>
__device__ __forceinline__ const char* token_row(const void* base, const AttendParams& p, int layer, int page, int offset,
                                                 int head) {
  const uint32 before = layer * p.layer_rows + page * p.page_rows;
  const uint32 within = offset * p.token_rows + head * p.head_rows;
  const int64 at = static_cast<int64>(before) * kRowUnit + static_cast<int64>(within) * kDim;
  return static_cast<const char*>(base) + at * format_bytes<kStore>();
}

extern "C" __global__ void __launch_bounds__(kWarps * 32) attend_plain(const __grid_constant__ PlainParams params) {
  __shared__ float queries[kWarps][kHeadDim];
  const AttendParams& p = params.attend;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int index = blockIdx.x / p.num_kv_heads, head = blockIdx.x - index * p.num_kv_heads;
  const WorkItem item = p.items[index];
  if (warp >= item.num_rows) return;
  const PackedRow row(item.row_begin + warp, p.group_size);
  const int query = row.query(p, head), position = p.positions[row.plan_row];
  const char* q = static_cast<const char*>(p.q) + static_cast<int64>(query) * kHeadDim * format_bytes<kTensor>();
  for (int i = lane; i < kHeadDim / 8; i += 32) {
    float x[8];
    read_8<kTensor>(x, q + i * 8 * format_bytes<kTensor>());
#pragma unroll
    for (int j = 0; j < 8; ++j) queries[warp][i * 8 + j] = x[j];
  }
  __syncwarp();

  const KeyRange seen = visible_keys({0, item.num_keys - 1}, item, position, p.window_left);
  const int64 first_bit = p.mask_bits == nullptr ? 0 : p.mask_row_offsets[row.plan_row] + item.kv_start;
  float max = minus_infinity(), sum = 0.0f, o[kVectors][8] = {};
  // chunks of keys begin where the run does, so that the bits do not depend on what else is there
  for (int first = seen.low / kKeys * kKeys; first <= seen.high; first += kKeys) {
    const int key = first + lane;
    const bool visible = seen.has(key) && (p.mask_bits == nullptr || unmasked(p.mask_bits, first_bit + key));
    int offset = min(key, item.num_keys - 1), id = 0;
    if (p.kv_indices == nullptr) {  // ragged keys: K and V have no pages in common
      offset += item.kv_begin;
    } else {
      const int page = offset / p.page_size;
      offset -= page * p.page_size;
      id = p.kv_indices[item.kv_begin + page];
    }

    float score = minus_infinity();
    if (visible) {
      const char* k = token_row<kHeadDim>(p.k, p, item.layer, id, offset, head);
      float product = 0.0f;
      for (int i = 0; i < kHeadDim / 8; ++i) {
        float x[8];
        read_8<kStore>(x, k + i * 8 * format_bytes<kStore>());
#pragma unroll
        for (int j = 0; j < 8; ++j) product = fmaf(queries[warp][i * 8 + j], x[j], product);
      }
      score = capped_score(product, p.scale, p.soft_cap);
    }
    float top = fmaxf(max, score);
#pragma unroll
    for (int other = 16; other > 0; other /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, other));
    const float keep = state_rescale(max, top);
    max = top;
    const float weight = visible ? exp2_fast(score - state_reference(max)) : 0.0f;
    sum = fmaf(sum, keep, weight);
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int j = 0; j < 8; ++j) o[v][j] *= keep;

    for (uint32 left = __ballot_sync(kAllLanes, visible); left != 0; left &= left - 1) {
      const int from = __ffs(left) - 1;
      const float w = __shfl_sync(kAllLanes, weight, from);
      const int its_page = __shfl_sync(kAllLanes, id, from), its_offset = __shfl_sync(kAllLanes, offset, from);
      const char* values = LATENT ? token_row<kHeadDim>(p.k, p, item.layer, its_page, its_offset, head)
                                  : token_row<kValueDim>(p.v, p, item.layer, its_page, its_offset, head);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int column = (v * 32 + lane) * 8;
        if (column >= kValueDim) continue;
        float x[8];
        read_8<kStore>(x, values + column * format_bytes<kStore>());
#pragma unroll
        for (int j = 0; j < 8; ++j) o[v][j] = fmaf(x[j], w, o[v][j]);
      }
    }
  }

#pragma unroll
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(kAllLanes, sum, other);
  const float inverse = state_inverse(sum) * p.v_scale;
  float lse = state_lse(max, sum);
  const bool final = item.partial == kFinal;
  const int64 to = final ? query : partial_place(item.partial + warp, p.num_kv_heads, head);
  const float kept = final ? add_sink(lse, sink_of(p, row.query_head(p, head), to)) : 1.0f;
  if (lane == 0) (final ? p.lse : p.partial_lse)[to] = lse;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = (v * 32 + lane) * 8;
    if (column >= kValueDim) continue;
    float x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = state_output(o[v][j], inverse) * kept;
    if (final) {
      write_8<kTensor>(static_cast<char*>(p.o) + (to * kValueDim + column) * format_bytes<kTensor>(), x);
    } else {
      write_8<kFp32>(p.partial_o + to * kValueDim + column, x);
    }
  }
}
