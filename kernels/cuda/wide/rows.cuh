// A consumer thread's two rows of the wide kernel: which they are, their softmax, what they may
// not see, their results.
#pragma once

#include "common/convert.cuh"
#include "common/rows.cuh"
#include "common/shape.cuh"
#include "common/limits.cuh"
#include "wide/params.cuh"
#include "wide/shared.cuh"

// This thread's first row of the tile (the other is 8 further); computed again each time where registers
// are short.
__device__ __forceinline__ int my_row() {
  int thread = threadIdx.x;
  if (kQueriesInRegisters) asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return (thread / 128 - kMovers / 4) * 64 + thread / 32 % 4 * 16 + thread % 32 / 4;
}

// What becomes of a unit's state: the rows' only one, or one of their splits.
constexpr int kFinalEnd = 1;
constexpr bool kBesideSplits = !SPLITS && kCtas == 2;  // beside a launch that joins splits, its states have sums, too
__device__ __forceinline__ int ends_of(const WorkItem& item) {
  return (item.partial == kFinal ? kFinalEnd : 0) | (SPLITS ? item.rules & (kFollows | kFollowed) : 0);
}

// A unit's two rows after their last key: only the write is left.
struct Finished {
  float inverse[2], lse[2];
  int slot;
  int ends;  // kFinalEnd, kFollows, kFollowed

  // Clears the outputs of rows that have seen nothing: weights of 0 times a hidden inf or NaN may have left
  // anything there.
  __device__ __forceinline__ void clear_empty(float (&o)[kOutputs]) const {
    if (inverse[0] != 0.0f && inverse[1] != 0.0f) return;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] = inverse[i / 2 % 2] == 0.0f ? 0.0f : o[i];
  }

  // Of fixed splits: takes up the running state of those before, and leaves it where others follow: true.
  __device__ __forceinline__ bool join(float (&o)[kOutputs], const WideParams& params,
                                       const Shared& shared, int row);

  __device__ __forceinline__ void write(float (&o)[kOutputs], const WideParams& params,
                                        const Shared& shared, int row);
};

// Running softmax of rows `row` and `row + 8`, of which this thread holds every fourth pair of columns, by limits and
// references (common/limits.cuh).
struct Rows {
  float limit[2], sum[2];
  KeyRange keys[2];         // of the run, that the row sees
  uint32 whole;  // tiles of which all 16 rows of the warp see every key: the first, and in the upper half the end

  __device__ __forceinline__ Rows(const WorkItem& item, const WideParams& params,
                                  const Shared& shared, int stage, int row) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      limit[r] = minus_infinity();
      sum[r] = 0.0f;
      keys[r] = {0, item.num_keys - 1};
    }
    int low = 0, high = item.num_keys - 1;
    if (kHeadDim > 128 || item.rules & (kHideFuture | kHideWindow)) {  // above, the branch takes registers
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const UnitRow& packed = shared.row(stage, row + 8 * r);
        if (packed.source >= 0)
          keys[r] = visible_keys(keys[r], item, packed.position, params.window_left);
      }
      low = __reduce_max_sync(kAllLanes, ::max(keys[0].low, keys[1].low));
      high = __reduce_min_sync(kAllLanes, ::min(keys[0].high, keys[1].high));
    }
    whole = min(ceil_div(low, kTileKeys), 0xffff) | min(max(high + 1, 0) / kTileKeys, 0xffff) << 16;
  }

  // Hides the keys of a tile which a row does not see.
  __device__ __forceinline__ void hide(float (&s)[kScores], uint32 tile) const {
    if (tile < (whole & 0xffff) || tile >= whole >> 16) {
      const int column = tile * kTileKeys + threadIdx.x % 4 * 2;
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const int r = i / 2 % 2, key = column + i / 4 * 8 + i % 2;
        if (!keys[r].has(key)) s[i] = minus_infinity();
      }
    }
  }

  __device__ __forceinline__ void cap(float (&s)[kScores], float cap_scale) const {
#if HAS_SOFT_CAP
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = tanh_accurate(s[i] * cap_scale);
#endif
  }

  // Raises the limits if a score of the warp's 16 rows has reached its row's. True where a reference has moved:
  // `factor` rescales earlier sums to the new ones.
  __device__ __forceinline__ bool raise(const float (&s)[kScores], float (&factor)[2], float scale) {
    if (!__any_sync(kAllLanes, reaches_limit(s, limit))) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto score = [&](int i) { return s[i / 2 * 4 + 2 * r + i % 2]; };
      const float top = quad_max(highest_score<kScores / 2>(minus_infinity(), score));
      const float before = reference(r, scale);
      limit[r] = raised_limit(limit[r], top, scale);
      factor[r] = state_rescale(before, reference(r, scale));
      sum[r] *= factor[r];
    }
    return __any_sync(kAllLanes, factor[0] != 1.0f || factor[1] != 1.0f);
  }

  // Turns visible scores into weights, in place, and adds them to the earlier sum.
  __device__ __forceinline__ void weigh(float (&s)[kScores], float scale) {
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
  }

  __device__ __forceinline__ void rescale(float (&o)[kOutputs], const float (&factor)[2]) const {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] *= factor[i / 2 % 2];
  }

  // Completes the sums over the four threads of a row; a stored value is worth `v_scale`.
  __device__ __forceinline__ Finished finish(int slot, int ends, float scale, float v_scale) const {
    Finished finished;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float base = reference(r, scale);
      const float total = checked_sum(quad_sum(sum[r]), base);
      finished.inverse[r] = state_inverse(total) * v_scale;
      finished.lse[r] = state_lse(base, total);
    }
    finished.slot = slot;
    finished.ends = ends;
    return finished;
  }

 private:
  __device__ __forceinline__ float reference(int r, float scale) const { return reference_of(limit[r], scale); }
};

#if HAS_MASK
// Applies the custom mask to the tile that starts at key `begin`: 32 bits at a time.
__device__ __forceinline__ void hide_masked(float (&s)[kScores], int begin, const Shared& shared,
                                            int stage, int row, const uint32* mask_bits) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64 bit = shared.row(stage, row + 8 * r).mask_bit + begin;
    const uint32* words = mask_bits + (bit >> 5);
#pragma unroll
    for (int w = 0; w < (kTileKeys + 31) / 32; ++w) {
      const uint32 word = __funnelshift_r(words[w], words[w + 1], bit & 31);
#pragma unroll
      for (int j = 4 * w; j < 4 * w + 4 && j < kTileKeys / 8; ++j) {
        const uint32 pair = word >> (j % 4 * 8 + threadIdx.x % 4 * 2);
        if (!(pair & 1)) s[4 * j + 2 * r] = minus_infinity();
        if (!(pair & 2)) s[4 * j + 2 * r + 1] = minus_infinity();
      }
    }
  }
}
#endif

// Accumulator pairs in their order are the A fragments of the next product: 4 registers per 16 keys.
__device__ __forceinline__ void pack(const float (&s)[kScores], uint32 (&p)[kScores / 2]) {
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) p[i] = pack<kBf16>(s[2 * i], s[2 * i + 1]);
}

// --- results -----------------------------------------------------------------------------------------------

__device__ __forceinline__ void clear(float (&o)[kOutputs]) {
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) o[i] = 0.0f;
}

// A thread's own 16 bytes beside those of its neighbours: what it has left it reads itself, in shared memory, or in the
// L2 cache what does not fit there.
__device__ __forceinline__ bool Finished::join(float (&o)[kOutputs], const WideParams& params,
                                               const Shared& shared, int row) {
  const bool follows = ends & kFollows, followed = ends & kFollowed;
  if (!follows && !followed) return false;
  const int target[2] = {shared.row(slot, row).target, shared.row(slot, row + 8).target};
  if (target[0] < 0 && target[1] < 0) return followed;  // no such rows
  constexpr int kEach = 128 * kConsumers;
  int thread, block;  // read again: kept, what follows from them would occupy registers all the time
  asm volatile("mov.u32 %0, %%tid.x; mov.u32 %1, %%ctaid.x;" : "=r"(thread), "=r"(block));
  thread -= 32 * kMovers;
  const auto mine = [&](int i) -> float4& {
    if (i < kRunningHere) return shared.running(i * kEach + thread);
    return reinterpret_cast<float4*>(
        params.running)[block * (kEach * kRunningFloats / 4) + i * kEach + thread];
  };
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) o[i] *= inverse[i / 2 % 2];
  RunningState state[2];
  if (follows) {
    const float4 before = mine(0);
    state[0] = {before.x, before.y};
    state[1] = {before.z, before.w};
  }
  float keep[2], weight[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) state[r].add(lse[r], 1.0f, keep[r], weight[r]);
  if (follows) {
#pragma unroll
    for (int i = 0; i < kOutputs; i += 4) {
      const float4 before = mine(1 + i / 4);
      o[i] = fmaf(o[i], weight[0], before.x * keep[0]);
      o[i + 1] = fmaf(o[i + 1], weight[0], before.y * keep[0]);
      o[i + 2] = fmaf(o[i + 2], weight[1], before.z * keep[1]);
      o[i + 3] = fmaf(o[i + 3], weight[1], before.w * keep[1]);
    }
  }
  if (followed) {
#pragma unroll
    for (int i = 0; i < kOutputs; i += 4)
      mine(1 + i / 4) = make_float4(o[i], o[i + 1], o[i + 2], o[i + 3]);
    mine(0) = make_float4(state[0].max, state[0].sum, state[1].max, state[1].sum);
    return true;
  }
  const bool final = ends & kFinalEnd;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    inverse[r] = final ? state_inverse(state[r].sum) : 1.0f;
    lse[r] = final ? state_merged_lse(state[r].max, state[r].sum) : state[r].max;
    if (!final && target[r] >= 0) params.partial_sum[target[r]] = state[r].sum;
  }
  return false;
}

// Final rows in 16-byte chunks, a quad of threads 64 consecutive bytes at a time; partial rows in
// float, a quad 32 bytes at a time.
__device__ __forceinline__ void Finished::write(float (&o)[kOutputs],
                                                const WideParams& params,
                                                const Shared& shared, int row) {
  const int part = fresh_lane() % 4;
  const bool final = ends & kFinalEnd;
  const float sink[2] = {shared.row(slot, row).sink, shared.row(slot, row + 8).sink};
  if (final && (sink[0] != minus_infinity() || sink[1] != minus_infinity())) {
    const float kept[2] = {merge_sink(lse[0], sink[0]), merge_sink(lse[1], sink[1])};
    if (params.split_keys > 0) {  // invariant: first divided, then multiplied
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) o[i] *= inverse[i / 2 % 2];
      inverse[0] = kept[0], inverse[1] = kept[1];
    } else {
      inverse[0] *= kept[0], inverse[1] *= kept[1];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int index = shared.row(slot, row + 8 * r).target;
    if (!__any_sync(kAllLanes, index >= 0)) continue;  // none of eight rows: units of few rows are short
    const int64 offset = static_cast<int64>(index) * kValueDim;
    if (final) {
      Element* o_row = static_cast<Element*>(params.o) + offset + part * 8;
#pragma unroll
      for (int j = 0; j < kValueDim / 8; j += 4) {
        uint32 words[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int i = 4 * (j + c) + 2 * r;
          words[c] = pack<kBf16>(o[i] * inverse[r], o[i + 1] * inverse[r]);
        }
        const uint4 chunk = transpose_quad(words[0], words[1], words[2], words[3], part);
        if (index >= 0) *reinterpret_cast<uint4*>(o_row + j * 8) = chunk;
      }
    } else if (index >= 0) {
      float* o_row = params.partial_o + offset + part * 2;
#pragma unroll
      for (int j = 0; j < kValueDim / 8; ++j) {
        const int i = 4 * j + 2 * r;
        *reinterpret_cast<float2*>(o_row + 8 * j) =
            make_float2(o[i] * inverse[r], o[i + 1] * inverse[r]);
      }
    }
    if (part == 0 && index >= 0) {
      (final ? params.lse : params.partial_lse)[index] = lse[r];
      if (SPLITS && !final && !(ends & kFollows)) params.partial_sum[index] = 1.0f;
      if (kBesideSplits && !final && params.partial_sum != nullptr) params.partial_sum[index] = 1.0f;
    }
  }
}
