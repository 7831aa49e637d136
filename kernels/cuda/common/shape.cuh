// What every attention kernel is specialised by, and the sizes that follow.
#pragma once

#ifndef HEAD_DIM
#error "specialise with -DHEAD_DIM=... -DBF16=0|1 -DFP8=0|4|5"
#endif

constexpr int kHeadDim = HEAD_DIM;
#ifndef VALUE_DIM
#define VALUE_DIM HEAD_DIM
#endif
constexpr int kValueDim = VALUE_DIM;
constexpr bool kBf16 = BF16 != 0;
constexpr int kFp8 = FP8;
constexpr bool kIsFp8 = kFp8 != 0;
static_assert(kHeadDim % 16 == 0 && kHeadDim <= 256, "whole matrix fragments");

constexpr int kSteps = kHeadDim / 16;  // k steps of the scores, row or column tiles of the values
constexpr int kElementBytes = kIsFp8 ? 1 : 2;
constexpr int kRowBytes = kHeadDim * kElementBytes;  // one token's K or V of one head
