// Where a packed row is, and which keys it sees.
#pragma once

#include "common/state.cuh"
#include "common/types.cuh"
#include "common/work.cuh"

// Packed row `packed` of a launch: row packed / group_size of the plan, and query head packed % group_size
// of the kv head's group.
struct PackedRow {
  int packed;
  int plan_row;

  __device__ __forceinline__ PackedRow(int packed, int group_size)
      : packed(packed), plan_row(packed / group_size) {}

  // Its query head, of all kv heads' groups.
  template <class Params>
  __device__ __forceinline__ int query_head(const Params& p, int head) const {
    return head * p.group_size + (packed - plan_row * p.group_size);
  }

  // Its row of q, o and lse, counted in heads.
  template <class Params>
  __device__ __forceinline__ int query(const Params& p, int head) const {
    return p.order[plan_row] * p.num_kv_heads * p.group_size + query_head(p, head);
  }
};

// Where partial row `row` of a kv head is in the partial arrays, counted in heads.
__device__ __forceinline__ int64 partial_place(int row, int num_kv_heads, int head) {
  return static_cast<int64>(row) * num_kv_heads + head;
}

// Whether there are sinks: calls without pay nothing for them.
template <class Params>
__device__ __forceinline__ bool has_sinks(const Params& p) {
  return __builtin_expect(p.sinks != nullptr, 0);
}

// The sink of query head `head` in row `at` of o and lse, counted in heads; -inf where there are none.
template <class Params>
__device__ __forceinline__ float sink_of(const Params& p, int head, int64 at) {
  return has_sinks(p) ? p.sinks[p.sinks_of_rows ? at : head] : minus_infinity();
}

// Keys `low` to `high` of a run.
struct KeyRange {
  int low, high;
  __device__ __forceinline__ bool has(int key) const { return key >= low && key <= high; }
};

// What a row at `position` sees of the keys by the rules that the run still needs, causal and window; a
// custom mask may hide some of it. Nothing overflows: positions are -1 at least, and a window is left to the kernels
// only where some row of the item is further from the run's first key.
__device__ __forceinline__ KeyRange visible_keys(KeyRange keys, const WorkItem& item, int position,
                                                 int window_left) {
  if (item.rules & kHideFuture) keys.high = min(keys.high, position - item.kv_start);
  if (item.rules & kHideWindow) keys.low = max(keys.low, position - window_left - item.kv_start);
  return keys;
}

// Whether the custom mask lets a key be seen whose bit this is.
__device__ __forceinline__ bool unmasked(const uint8* mask_bits, int64 bit) {
  return mask_bits[bit >> 3] >> (bit & 7) & 1;
}
