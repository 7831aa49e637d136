// References of an online softmax that needs no maximum of most tiles: weights are 2^(s - reference), with a reference
// that no score of the row is kTop above or more. A row's `limit`, in units of the products, is where that would be.
// Nothing seen: -inf, both. Included where kBf16 is known.
#pragma once

#include "common/state.cuh"

// How far a row's scores may rise before its reference follows, in base 2; weights are then up to 2^kTop, and a row's
// highest is 2^(kTop - kSlack) at least.
constexpr float kSlack = 8.0f;
constexpr float kTop = kBf16 ? kSlack : kFp16Top;
// Up to references of this size, in base 2, products and references are fine enough for weights of fp16 (2^28) or
// bf16 (2^30): a float's spacing is 16, or 64, below it. Rows beyond come out as NaN.
constexpr float kLargest = kBf16 ? 1073741824.0f : 268435456.0f;
// Negative limits from here on, in base 2, are raised to 0: a row's highest weight is then 2^(kTop - kSlack + kLowest) at
// least, in fp16 2^3, and what it has not, below 2^-24, is 2^-27 of that.
constexpr float kLowest = kBf16 ? -96.0f : -4.0f;
constexpr float kHighest = 3e38f;  // limit: finite

// What a row's scores are weighed by, in base 2; -inf where it has seen nothing. Rounded up: rounded down, it would
// let weights of large scores overflow fp16.
__device__ __forceinline__ float reference_of(float limit, float scale) {
  return __fmaf_ru(limit, scale, -kTop);
}

// The limit of a row whose highest score of a tile is `top`: by the row's own scores alone, so that what other rows
// have, and whether they are there, leaves no trace.
__device__ __forceinline__ float raised_limit(float limit, float top, float scale) {
  const float above = top >= limit ? top + __fdividef(kSlack, scale) : limit;
  return above * scale >= kLowest ? fminf(fmaxf(above, 0.0f), kHighest) : above;
}

// Whether a score of this thread has reached its row's limit: it holds kCount of two rows, in pairs of each in turn.
// Floats that are not negative are ordered as their bits are, above all that are negative, and the highest of three
// integers is one instruction; a row whose limit is negative is looked at each time.
template <int kCount>
__device__ __forceinline__ bool reaches_limit(const float (&s)[kCount], const float (&limit)[2]) {
  bool reached = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int top = __float_as_int(s[2 * r]);
#pragma unroll
    for (int i = 2 * r; i < kCount; i += 4)
      top = __vimax3_s32(top, __float_as_int(s[i]), __float_as_int(s[i + 1]));
    reached |= !(limit[r] >= 0.0f) || top >= __float_as_int(limit[r]);
  }
  return reached;
}

// Whether a row's sum stands for its state: not after a score of +inf, or of one that is too large.
__device__ __forceinline__ float checked_sum(float total, float reference) {
  return total > kHighest || fabsf(state_reference(reference)) > kLargest ? not_a_number() : total;
}
