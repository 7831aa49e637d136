// Custom masks over the rows that sequences have in a step, expanded to what attention reads: bits of all
// keys of a row. The elements are in memory that the caller may write to at any time. They are read here
// once, so that all launches of the step agree on the mask.
//
// A thread makes one word: 32 keys of one row. Keys before the sequence's own rows are visible; bits behind
// its last key are set, and nothing reads them.
#include "common/types.cuh"

struct OwnRow {
  int first;    // position of the first of its sequence's rows; negative: more rows than keys
  int count;    // rows of its sequence
  int64 begin;  // element of the first of these rows
};

struct ExpandParams {
  const uint8* elements;
  const OwnRow* rows;  // by plan row
  uint32* bits;        // [num_rows, stride]
  int num_rows;
  int stride;  // in words
  int packed;  // elements are bits, else bytes
};

extern "C" __global__ void __launch_bounds__(256) expand_mask(const __grid_constant__ ExpandParams p) {
  const int unit = blockIdx.x * 256 + threadIdx.x;
  const int index = unit / p.stride, key = 32 * (unit - index * p.stride);
  if (index >= p.num_rows) return;
  const OwnRow row = p.rows[index];
  const int end = min(32, row.first + row.count - key);
  uint32 word = 0xffffffffu;
  for (int i = max(row.first - key, 0); i < end; ++i) {
    const int64 at = row.begin + (key + i - row.first);
    const bool shown = p.packed ? p.elements[at >> 3] >> (at & 7) & 1 : p.elements[at] != 0;
    if (!shown) word &= ~(1u << i);
  }
  p.bits[unit] = word;
}
