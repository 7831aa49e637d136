// The arithmetic of attention states, and every guard against -inf, in one place.
//
// Scores are kept in base 2: s2 = score * log2(e), so that exp is one ex2. A row's running state is
// (max, sum): max over s2 seen so far (-inf when it saw nothing) and the sum of 2^(s2 - max). The
// output accumulator is scaled by 2^-max too. A finished state is (o, lse), lse natural; the empty
// state is (0, -inf), recognised by its sum of 0. No large finite number replaces -inf anywhere.
//
// A score that is NaN or +inf makes the row's sum NaN, and so its o and lse: maxima pass over NaN, weights
// do not.
//
// Products of fp16 weights use all of its range: below 2^-24 fp16 has only 0, and a sum that keeps what the products lose
// is too large (131,072 keys of weight 2^-25 beside one of weight 1 are 0.4 % of it). So a maximum of the attention
// kernels may be up to kFp16Top below the row's highest score, whose weight is then 2^kFp16Top.
#pragma once

constexpr float kFp16Top = 15.0f;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

// Over the four lanes that hold a row of a product's result.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Within 2^-19 of tanh(x) relative to it, everywhere: of a soft cap times it, relative to the score.
__device__ __forceinline__ float tanh_accurate(float x) {
  // 1 - 2 / (e^2x + 1): right at both infinities, but within 2^-23 absolute for small x, where the
  // first terms of the series are exact enough
  const float far = 1.0f - __fdividef(2.0f, exp2_fast(x * (2.0f * kLog2E)) + 1.0f);
  const float square = x * x;
  float series = fmaf(square, 2.1869488e-2f, -5.3968254e-2f);
  series = fmaf(series, square, 1.3333333e-1f);
  series = fmaf(series, square, -3.3333333e-1f);
  const float near = fmaf(x * square, series, x);
  return fabsf(x) < 0.3f ? near : far;
}

// The number to subtract from a row's scores: its maximum, or 0 if the row has seen no key, because
// -inf - -inf is NaN while 2^(-inf - 0) is the 0 we want.
__device__ __forceinline__ float state_reference(float max) {
  return max == minus_infinity() ? 0.0f : max;
}

// Factor that brings a sum or an accumulator from the old maximum to the new one (0 when the old
// state was empty; both empty: 2^(-inf - 0) = 0 times an accumulator that is 0 already). `scale` brings
// maxima to base 2.
__device__ __forceinline__ float state_rescale(float old_max, float new_max, float scale = 1.0f) {
  return exp2_fast((old_max - state_reference(new_max)) * scale);
}

// --- online softmax of one row: `score(i)` is its i-th score that this lane holds, of kCount ---------------
//
// A kernel raises the row's maximum (`highest_score`, over the lanes that share the row, and `lowered`), brings what
// was summed before to it (`state_rescale`), and turns the scores into weights (`weigh_scores`). `scale` brings scores
// and maxima to base 2.

// The maximum that leaves the highest score a weight of 2^kFp16Top, or where floats are too coarse for that a lower one;
// `headroom` is kFp16Top in units of the scores.
__device__ __forceinline__ float lowered(float highest, float headroom) { return __fsub_ru(highest, headroom); }

template <int kCount, class Score>
__device__ __forceinline__ float highest_score(float max, Score score) {
#pragma unroll
  for (int i = 0; i < kCount; i += 2) max = fmaxf(max, fmaxf(score(i), score(i + 1)));
  return max;
}

// Scores to weights 2^((s - max) scale), in place; the sum of `sum` and the weights. The difference comes
// first: however large scores are, no weight is more than the highest score's then.
template <int kCount, class Score>
__device__ __forceinline__ float weigh_scores(float sum, float max, float scale, Score score) {
  const float reference = state_reference(max);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float& x = score(i);
    x = exp2_fast((x - reference) * scale);
    sum += x;
  }
  return sum;
}

// Soft cap and scale of a product; leaves a base-2 score.
__device__ __forceinline__ float capped_score(float x, float scale, float soft_cap) {
  x *= scale;
  if (soft_cap > 0.0f) x = soft_cap * tanh_accurate(__fdividef(x, soft_cap));
  return x * kLog2E;
}

// 1 / sum, or 0 for the empty state.
__device__ __forceinline__ float state_inverse(float sum) {
  return sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
}

// A number of a finished o: the accumulator's times the state's inverse. Of the empty state, whose inverse is 0,
// exactly 0: weights of 0 times a hidden inf or NaN may have left anything there.
__device__ __forceinline__ float state_output(float accumulated, float inverse) {
  return inverse == 0.0f ? 0.0f : accumulated * inverse;
}

// Natural log-sum-exp of a state whose maximum is in base 2.
__device__ __forceinline__ float state_lse(float max, float sum) {
  return sum == 0.0f ? minus_infinity() : (max + log2_fast(sum)) * kLn2;
}

// A sink as the maximum of a state, in base 2: of a finite one finite, however large it is, as it is rounded towards 0.
__device__ __forceinline__ float sink_maximum(float sink) { return __fmul_rz(sink, kLog2E); }

// Weight of a member state in a merge: e^(lse - max_lse), 0 for an empty member.
__device__ __forceinline__ float state_weight(float lse, float max_lse) {
  return exp2_fast((lse - state_reference(max_lse)) * kLog2E);
}

// lse of the merge of members whose weights sum to `sum`.
__device__ __forceinline__ float state_merged_lse(float max_lse, float sum) {
  return sum == 0.0f ? minus_infinity() : fmaf(log2_fast(sum), kLn2, max_lse);
}

// The share that a complete state keeps once it is merged with a sink's state (0, sink): what its o is multiplied by,
// after it has been divided by its sum, so that the bits do not depend on where it is divided. Moves `lse` to that of both.
// -inf changes nothing.
__device__ __forceinline__ float merge_sink(float& lse, float sink) {
  const float top = fmaxf(lse, sink);
  const float weight = state_weight(lse, top), sum = weight + state_weight(sink, top);
  lse = state_merged_lse(top, sum);
  return weight * state_inverse(sum);
}

// The same, at no cost where there is none.
__device__ __forceinline__ float add_sink(float& lse, float sink) {
  return sink == minus_infinity() ? 1.0f : merge_sink(lse, sink);
}

// The state of members in order, one after another, their outputs weighed by what e^lse is relative to the highest
// so far. The bits are those of the members in order alone: an empty one changes nothing, and a member can be the
// running state that the ones before it have left.
struct RunningState {
  float max = minus_infinity();
  float sum = 0.0f;

  // Takes in a member; o of the members so far is multiplied by `keep`, the member's by `weight`.
  __device__ __forceinline__ void add(float lse, float member_sum, float& keep, float& weight) {
    const float higher = fmaxf(max, lse);
    keep = state_weight(max, higher);
    weight = state_weight(lse, higher);
    sum = fmaf(sum, keep, weight * member_sum);
    max = higher;
  }
};
