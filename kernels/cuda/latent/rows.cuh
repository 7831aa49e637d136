// A consumer thread's two rows of the latent kernel: which keys they see, their softmax, their results.
#pragma once

#include "latent/shared.cuh"
#include "common/convert.cuh"
#include "common/limits.cuh"
#include "common/rows.cuh"
#include "latent/products.cuh"

constexpr int kCleared = 7;  // named barrier of one warpgroup; of the second, the next

// Limits and sums of rows `my_row()` and 8 further. Limits are those of both warpgroups, each sum is of the own keys.
struct Rows {
  float limit[2], sum[2];
  uint32 whole;  // tiles of which all 16 rows of the warp see every key: the first, and in the upper half the end

  __device__ __forceinline__ Rows(const Shared& shared, const WorkItem& item) {
    int low = 0, high = item.num_keys - 1;
    if (item.rules & (kHideFuture | kHideWindow)) {
      const RowRange &a = shared.range(my_row()), &b = shared.range(my_row() + 8);
      low = __reduce_max_sync(kAllLanes, max(a.low, b.low));
      high = __reduce_min_sync(kAllLanes, min(a.high, b.high));
    }
    whole = min((low + kTileKeys - 1) / kTileKeys, 0xffff) | min(max(high + 1, 0) / kTileKeys, 0xffff) << 16;
#pragma unroll
    for (int r = 0; r < 2; ++r) limit[r] = minus_infinity(), sum[r] = 0.0f;
  }

  __device__ __forceinline__ float reference(int r, float scale) const { return reference_of(limit[r], scale); }

  // Raises the limits that a score has reached, and leaves them to the other warpgroup. True: references of this warp have
  // moved by `factor`, to which sums are brought. Rare.
  __device__ __forceinline__ bool raise(const float (&s)[kScores], float (&factor)[2], const Shared& shared,
                                        float scale, int self, uint32 pair) {
    if (!__any_sync(kAllLanes, reaches_limit(s, limit))) return false;
    float by[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto score = [&](int i) { return s[i / 2 * 4 + 2 * r + i % 2]; };
      const float top = quad_max(highest_score<kScores / 2>(minus_infinity(), score));
      const float before = reference(r, scale);
      limit[r] = raised_limit(limit[r], top, scale);
      by[r] = state_rescale(before, reference(r, scale));
      factor[r] *= by[r];
      sum[r] *= by[r];
      if (fresh_lane() % 4 == 0) shared.limits()[my_row() + 8 * r] = limit[r];
    }
    const bool raised = __any_sync(kAllLanes, by[0] != 1.0f || by[1] != 1.0f);
    if (raised) shared.moved(self) = pair;
    return raised;
  }

  // Takes over the limits that the other warpgroup has raised.
  __device__ __forceinline__ void adopt(float (&factor)[2], const Shared& shared, float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float now = shared.limits()[my_row() + 8 * r];
      factor[r] = state_rescale(reference(r, scale), reference_of(now, scale));
      limit[r] = now;
      sum[r] *= factor[r];
    }
  }

  // Turns visible scores into weights, adds them to the sums, and leaves them packed.
  __device__ __forceinline__ void weigh(float (&s)[kScores], uint32 (&w)[kScores / 2], float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float base = state_reference(reference(r, scale));
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        float& x = s[i / 2 * 4 + 2 * r + i % 2];
        x = exp2_fast(fmaf(x, scale, -base));
        total += x;
      }
      sum[r] += total;
    }
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) w[i] = pack<kBf16>(s[2 * i], s[2 * i + 1]);
  }
};

__device__ __forceinline__ void rescale(float (&o)[kOutputs], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) o[i] *= factor[i / 2 % 2];
}

// Zeroes the rows from `valid` on of a warpgroup's own tile: slots past the run's end may hold anything, NaN included, and
// 0 * NaN is NaN. The other warpgroup reads them once this one's weights are there.
__device__ __forceinline__ void clear_dead(const Shared& shared, int self, int valid) {
#pragma unroll 1
  for (int i = fresh_thread() % 128; i < (kTileKeys - valid) * kBlocks * 8; i += 128) {
    const int key = valid + i / (kBlocks * 8), block = i / 8 % kBlocks, half = block >= kLeftBlocks;
    const uint32 at = shared.tile(self, half) + key / 8 * group_stride(half) + (block - half * kLeftBlocks) * 1024 +
                      key % 8 * 128 + i % 8 * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
  }
  fence_async_proxy();
  named_barrier_sync(kCleared + self, 128);
}

// Hides from a tile's scores what their rows do not see, and caps them; dead slots of the tile become zeros. All that is
// rare is in one branch.
__device__ __forceinline__ void finish_scores(float (&s)[kScores], const Rows& rows, const Shared& shared,
                                              const WideParams& params, const WorkItem& item, uint32 tile, int self) {
#if HAS_SOFT_CAP
#pragma unroll
  for (int i = 0; i < kScores; ++i) s[i] = tanh_accurate(s[i] * params.cap_scale);
#endif
  if (tile < (rows.whole & 0xffff) || tile >= rows.whole >> 16) {
    const int valid = item.num_keys - static_cast<int>(tile) * kTileKeys;  // the same for all warps, which then all are here
    if (valid > 0 && valid < kTileKeys && valid % kPageSize != 0) clear_dead(shared, self, valid);
    const int column = tile * kTileKeys + fresh_lane() % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowRange& seen = shared.range(my_row() + 8 * r);
      const KeyRange keys{seen.low, seen.high};
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i)
        if (!keys.has(column + i / 2 * 8 + i % 2)) s[i / 2 * 4 + 2 * r + i % 2] = minus_infinity();
    }
  }
#if HAS_MASK
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64 bit = shared.range(my_row() + 8 * r).mask_bit + tile * kTileKeys;
    const uint32* words = params.mask_bits + (bit >> 5);
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      // a tile may begin where the mask's bits have ended: there all is hidden
      const uint32 word = tile * kTileKeys + w * 32 <= shared.range(my_row() + 8 * r).high
                              ? __funnelshift_r(words[w], words[w + 1], bit & 31) : 0;
#pragma unroll
      for (int j = 4 * w; j < 4 * w + 4; ++j) {
        const uint32 two = word >> (j % 4 * 8 + fresh_lane() % 4 * 2);
        if (!(two & 1)) s[4 * j + 2 * r] = minus_infinity();
        if (!(two & 2)) s[4 * j + 2 * r + 1] = minus_infinity();
      }
    }
  }
#endif
  pin(s);
}

// Where a thread's two rows go, asked for before the sums are exchanged.
struct Targets {
  int64 row[2];  // of o and lse, or of the partial arrays; -1: no such row
  float sink[2];
  bool final;

  __device__ __forceinline__ Targets(const WorkItem& item, const WideParams& params) : final(item.partial == kFinal) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row_in_tile = my_row() + 8 * r;
      row[r] = -1;
      sink[r] = minus_infinity();
      if (row_in_tile >= item.num_rows) continue;
      row[r] = item.partial + row_in_tile;
      if (final) {
        const PackedRow packed(item.row_begin + row_in_tile, params.group_size);
        row[r] = packed.query(params, 0);
        sink[r] = sink_of(params, packed.query_head(params, 0), row[r]);
      }
    }
  }
};

// A warpgroup's half of the columns: final rows in 16-byte chunks, a quad of threads 64 consecutive bytes at a time;
// partial rows in float, a quad 32 bytes at a time. The first warpgroup writes lse.
__device__ __forceinline__ void write_rows(float (&o)[kOutputs], const Rows& rows, const float (&sum)[2],
                                           const Targets& to, const WideParams& params, int self) {
  const int part = fresh_lane() % 4;
  const bool final = __any_sync(kAllLanes, to.final);  // of the whole unit: no branch below parts a warp
  float factor[2], lse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float base = rows.reference(r, params.scale), total = checked_sum(sum[r], base);
    factor[r] = state_inverse(total);
    lse[r] = state_lse(base, total);
  }
  if (__any_sync(kAllLanes, factor[0] == 0.0f || factor[1] == 0.0f)) {  // rows that have seen nothing
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] = factor[i / 2 % 2] == 0.0f ? 0.0f : o[i];
  }
  if (has_sinks(params)) {  // first divided, then multiplied: the bits do not depend on where a row is divided
    rescale(o, factor);
#pragma unroll
    for (int r = 0; r < 2; ++r) factor[r] = add_sink(lse[r], to.sink[r]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool there = to.row[r] >= 0;
    const int64 offset = to.row[r] * kValueDim + self * (kValueDim / 2);
    if (final) {
      uint16* o_row = static_cast<uint16*>(params.o) + offset + part * 8;
#pragma unroll
      for (int j = 0; j < kValueDim / 16; j += 4) {
        uint32 words[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int i = 4 * (j + c) + 2 * r;
          words[c] = pack<kBf16>(o[i] * factor[r], o[i + 1] * factor[r]);
        }
        const uint4 chunk = transpose_quad(words[0], words[1], words[2], words[3], part);
        if (there) *reinterpret_cast<uint4*>(o_row + j * 8) = chunk;
      }
    } else if (there) {
      float* o_row = params.partial_o + offset + part * 2;
#pragma unroll
      for (int j = 0; j < kValueDim / 16; ++j) {
        const int i = 4 * j + 2 * r;
        *reinterpret_cast<float2*>(o_row + 8 * j) = make_float2(o[i] * factor[r], o[i + 1] * factor[r]);
      }
    }
    if (self == 0 && part == 0 && there) (final ? params.lse : params.partial_lse)[to.row[r]] = lse[r];
  }
}
