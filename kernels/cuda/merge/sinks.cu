// Attention sinks: each row's state (o, lse) merges once with the state (0, sink) of its head, in place.
//
// A group of `lanes` lanes owns one row of one head. Runs only where sinks are given: every kernel that makes
// states goes without.
#include "common/formats.cuh"
#include "common/state.cuh"

constexpr int kFormat = TENSOR;
constexpr int kThreads = 256;

struct SinkParams {
  void* o;             // [num_states, head_dim]
  float* lse;          // natural
  const float* sinks;  // [num_heads], natural
  int num_states;      // rows times heads
  int num_heads;
  int head_dim;
  int lanes;           // of a group: a power of two, at most 32
};

__device__ __forceinline__ float scaled(float x, float share) {
  return share == 0.0f ? 0.0f : x * share;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    add_sinks(const __grid_constant__ SinkParams p) {
  const uint32 state = blockIdx.x * (kThreads / p.lanes) + threadIdx.x / p.lanes;
  const int lane = threadIdx.x & (p.lanes - 1);
  const bool active = state < static_cast<uint32>(p.num_states);
  float lse = 0.0f, sink = minus_infinity();
  if (active) {
    lse = p.lse[state];
    sink = p.sinks[state % static_cast<uint32>(p.num_heads)];
  }
  __syncwarp();  // lane 0 overwrites it
  if (sink == minus_infinity()) return;  // idle groups, too
  const float top = fmaxf(lse, sink);
  const float weight = state_weight(lse, top), sum = weight + state_weight(sink, top);
  const float share = weight * state_inverse(sum);
  if (lane == 0) p.lse[state] = state_merged_lse(top, sum);
  char* o = static_cast<char*>(p.o) + static_cast<int64>(state) * p.head_dim * format_bytes<kFormat>();
  if (p.head_dim % 8 == 0) {
    for (int d = lane * 8; d < p.head_dim; d += p.lanes * 8) {
      float x[8];
      read_8<kFormat>(x, o + d * format_bytes<kFormat>());
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = scaled(x[i], share);
      write_8<kFormat>(o + d * format_bytes<kFormat>(), x);
    }
    return;
  }
  for (int d = lane; d < p.head_dim; d += p.lanes) {
    if constexpr (kFormat == kFp32) {
      float* x = reinterpret_cast<float*>(o) + d;
      *x = scaled(*x, share);
    } else {
      uint16* word = reinterpret_cast<uint16*>(o) + d;
      float x, unused;
      unpack<kFormat == kBfloat16>(*word, x, unused);
      *word = static_cast<uint16>(pack<kFormat == kBfloat16>(scaled(x, share), 0.0f));
    }
  }
}
