// Variable-length merge of attention states: for each (row, head) a list of members (o, lse)
// becomes one state, members weighted by e^lse. Bound by memory: each member is read once.
//
// A group of kLanes lanes owns one list, or one of `split` shares of it; members go by batches of
// BATCH so that their loads are in flight together. Shares meet in shared memory. Short lists give
// a lane two 16-byte vectors of each member: with one, instructions are half of what limits.
//
// PARTIALS 1: the attention kernels' float partial rows, lists of chunks of packed rows (work.cuh).
// PARTIALS 0: the public merge, row t's members are rows indptr[t] : indptr[t + 1].
// BATCH 2, 10: no list has more members than that, so one batch and no shares, blocks of 256 threads;
// 4: lists of any length, blocks of up to 1024; 16: the same without shares, blocks of 256.
// IN_ORDER 1: members one after another as a RunningState takes them, so that a member may be the running state of
// others before it. The bits are those of the list alone. No shares.
// HEAD_DIM 0: any head_dim, given at run time, one value per lane and step.
#include "common/formats.cuh"
#include "common/overlap.cuh"
#include "common/rows.cuh"
#include "common/state.cuh"

#ifndef IN_ORDER
#define IN_ORDER 0
#endif

constexpr int kHeadDim = HEAD_DIM;
constexpr bool kPartials = PARTIALS != 0;
constexpr int kIn = TENSOR_IN;
constexpr int kOut = TENSOR_OUT;
constexpr bool kAnyDim = kHeadDim == 0;
constexpr int kVector = kAnyDim ? 1 : kIn == kFp32 ? 4 : 8;
constexpr int kBatch = BATCH;
constexpr bool kShort = BATCH == 2;
constexpr bool kOnce = BATCH == 2 || BATCH == 10;  // a batch is a list
constexpr int kUnits = kShort && !kAnyDim ? 2 : 1;  // vectors of a member per lane and pass
constexpr int kValues = kUnits * kVector;
constexpr int kMostThreads = BATCH == 4 ? (HEAD_DIM > 256 ? 256 : HEAD_DIM > 192 ? 512 : 1024) : 256;  // more would spill
constexpr bool kInOrder = IN_ORDER != 0;

constexpr int lanes_for(int values) {
  int lanes = 1;
  while (lanes < 32 && lanes < values) lanes *= 2;
  return lanes;
}
constexpr int kLanes = kAnyDim ? 32 : lanes_for((kHeadDim + kValues - 1) / kValues);
constexpr int kStep = kLanes * kVector;  // from a lane's vector to its next
constexpr int kSpan = kStep * kUnits;    // values per pass of a group
constexpr int kPasses = kAnyDim ? 1 : (kHeadDim + kSpan - 1) / kSpan;
constexpr int kMostGroups = kMostThreads / kLanes;

struct MergeParams {
  const void* o_in;
  const float* lse_in;
  const float* sum_in;  // in order: the sum of a running state's weights; null: 1, members are complete
  void* o;
  float* lse;
  const float* sinks;  // natural; null: none
  int sinks_of_rows;   // 1: of each head of each row; 0: of each head of o
  const int* indptr;   // [num_rows + 1]
  const int* members;  // partials: partial row of the chunk's first packed row; else unused
  const int* chunks;   // partials: chunk id of each merged row; else unused
  const int* order;    // partials: plan row -> row of o
  int num_rows;        // lists: merged chunks, or rows
  int num_kv_heads;    // partials: kv heads; else heads of o
  int group_size;      // partials: query heads per kv head
  int chunk_rows;      // partials: packed rows per chunk; else 1
  int head_dim;        // of o, when HEAD_DIM is 0
  int split;           // shares per list: a power of two, at most a block's groups
  int into;            // 1: row t of o, lse is one more member of list t
};

// kVector values as stored in memory, so that a batch of loads costs few registers.
template <int kFormat>
struct Raw {
  uint32 word[kVector * format_bytes<kFormat>() > 4 ? kVector * format_bytes<kFormat>() / 4 : 1];
};

template <int kFormat>
__device__ __forceinline__ Raw<kFormat> read_raw(const void* base, int64 at) {
  constexpr int kBytes = kVector * format_bytes<kFormat>();
  const char* from = static_cast<const char*>(base) + at * format_bytes<kFormat>();
  Raw<kFormat> raw;
  if constexpr (kBytes >= 16) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      const uint4* unit = reinterpret_cast<const uint4*>(from) + i;
      const uint4 x = kShort ? *unit : __ldcs(unit);  // as measured
      raw.word[i * 4] = x.x, raw.word[i * 4 + 1] = x.y;
      raw.word[i * 4 + 2] = x.z, raw.word[i * 4 + 3] = x.w;
    }
  } else if constexpr (kBytes == 4) {
    raw.word[0] = *reinterpret_cast<const uint32*>(from);
  } else {
    static_assert(kBytes == 2, "one or several values");
    raw.word[0] = *reinterpret_cast<const uint16*>(from);
  }
  return raw;
}

// 0 where the member is not `live`, whatever it holds.
template <int kFormat>
__device__ __forceinline__ void convert(float* x, const Raw<kFormat>& raw, bool live) {
  constexpr int kWords = sizeof(raw.word) / 4;
  uint32 word[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) word[i] = live ? raw.word[i] : 0;
  if constexpr (kFormat == kFp32) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = __uint_as_float(word[i]);
  } else if constexpr (kVector == 1) {
    float unused;
    unpack<kFormat == kBfloat16>(word[0], x[0], unused);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; i += 2)
      unpack<kFormat == kBfloat16>(word[i / 2], x[i], x[i + 1]);
  }
}

__device__ __forceinline__ void write_vector(void* base, int64 at, const float* x) {
  if constexpr (kVector == 1) {
    if constexpr (kOut == kFp32) {
      static_cast<float*>(base)[at] = x[0];
    } else {
      static_cast<uint16*>(base)[at] = static_cast<uint16>(pack<kOut == kBfloat16>(x[0], 0.0f));
    }
  } else if constexpr (kOut == kFp32) {
    float* to = static_cast<float*>(base) + at;
#pragma unroll
    for (int i = 0; i < kVector; i += 4)
      *reinterpret_cast<float4*>(to + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  } else {
    constexpr bool kBrain = kOut == kBfloat16;
    uint16* to = static_cast<uint16*>(base) + at;
    const uint32 a = pack<kBrain>(x[0], x[1]), b = pack<kBrain>(x[2], x[3]);
    if constexpr (kVector == 8) {
      *reinterpret_cast<uint4*>(to) =
          make_uint4(a, b, pack<kBrain>(x[4], x[5]), pack<kBrain>(x[6], x[7]));
    } else {
      *reinterpret_cast<uint2*>(to) = make_uint2(a, b);
    }
  }
}

struct State {
  float max = minus_infinity();
  float sum = 0.0f;
  float o[kValues] = {};
};

// Brings a state to a maximum of at least `max`.
__device__ __forceinline__ void raise(State& state, float max) {
  if (state.max != minus_infinity()) {
    max = fmaxf(max, state.max);
    const float keep = state_weight(state.max, max);
    state.sum *= keep;
#pragma unroll
    for (int i = 0; i < kValues; ++i) state.o[i] *= keep;
  }
  state.max = max;
}

// One more member, in order.
template <int kFormat>
__device__ __forceinline__ void add_in_order(State& state, float lse, float sum, const Raw<kFormat> (&raw)[kUnits]) {
  RunningState running{state.max, state.sum};
  float keep, weight;
  running.add(lse, sum, keep, weight);
  state.max = running.max;
  state.sum = running.sum;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    float x[kVector];
    convert<kFormat>(x, raw[u], weight > 0.0f);
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      state.o[u * kVector + i] = fmaf(x[i], weight, state.o[u * kVector + i] * keep);
  }
}

// kCount more members at once, weighed against the highest lse of theirs, the state's and `max`; one without weight adds
// nothing whatever its o holds.
template <int kFormat, int kCount>
__device__ __forceinline__ void add_members(State& state, const float (&lse)[kCount],
                                            const Raw<kFormat> (&raw)[kCount][kUnits],
                                            float max = minus_infinity()) {
#pragma unroll
  for (int b = 0; b < kCount; ++b) max = fmaxf(max, lse[b]);
  raise(state, max);
#pragma unroll
  for (int b = 0; b < kCount; ++b) {
    const float weight = state_weight(lse[b], state.max);
    state.sum += weight;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      float x[kVector];
      convert<kFormat>(x, raw[b][u], weight > 0.0f);
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        state.o[u * kVector + i] = fmaf(x[i], weight, state.o[u * kVector + i]);
    }
  }
}

// Whether a state's o is finite where it is less than `dims` dims from the lane's first.
__device__ __forceinline__ bool is_finite(const State& state, int dims) {
  float zero = 0.0f;
#pragma unroll
  for (int i = 0; i < kValues; ++i)
    if (i / kVector * kStep < dims) zero = fmaf(state.o[i], 0.0f, zero);
  return zero == 0.0f;
}

extern "C" __global__ void __launch_bounds__(kMostThreads)
    merge_states(const __grid_constant__ MergeParams p) {
  launch_dependents();
  __shared__ float shared_state[kOnce ? 1 : kMostGroups][2];
  __shared__ float shared_o[kOnce ? 1 : kMostGroups][kSpan];
  const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const uint32 split = kOnce ? 1 : p.split;
  const int shift = 31 - __clz(split);  // split is a power of two
  const uint32 groups = blockDim.x / kLanes;
  const uint32 unit = blockIdx.x * (groups >> shift) + (group >> shift);  // the host bounds it
  const int share = group & (split - 1);
  const int head_dim = kAnyDim ? p.head_dim : kHeadDim;

  // which list, and where its result goes
  const uint32 rest = unit / static_cast<uint32>(p.num_kv_heads);
  const int head = unit - rest * p.num_kv_heads;
  int row = rest, in_chunk = 0;
  if constexpr (kPartials) {
    row = rest / static_cast<uint32>(p.chunk_rows);
    in_chunk = rest - row * p.chunk_rows;
  }
  const bool active = row < p.num_rows;
  int begin = 0, end = 0;
  int64 out_row = 0;
  int query_head = head;
  if (active) {
    begin = p.indptr[row];
    end = p.indptr[row + 1];
    if constexpr (kPartials) {
      const PackedRow packed(p.chunks[row] * p.chunk_rows + in_chunk, p.group_size);
      out_row = packed.query(p, head);
      query_head = packed.query_head(p, head);
    } else {
      out_row = static_cast<int64>(row) * p.num_kv_heads + head;
    }
  }

  // the row of list element `e`, in rows of all heads; the lists were written before the states, too
  const auto row_of = [&](int e) {
    int at = e;
    if constexpr (kPartials) at = e < end ? p.members[e] + in_chunk : 0;
    return at;
  };
  int rows[kBatch];  // of the next batch
#pragma unroll
  for (int b = 0; b < kBatch; ++b) rows[b] = row_of(begin + share + b * split);

  // passes over the head dimension, a span at a time (one, up to 128 or 256 values)
  const int passes = kAnyDim ? (head_dim + kSpan - 1) / kSpan : kPasses;
  wait_for_predecessor();  // everything read above was written before it
  float into_lse = minus_infinity();
  if (active && p.into) into_lse = p.lse[out_row];
  const float sink = sink_of(p, query_head, out_row);
  __syncwarp();  // lane 0 overwrites it below
  for (int pass = 0; pass < passes; ++pass) {
    const int d = pass * kSpan + lane * kVector;
    const auto read_member = [&](Raw<kIn> (&raw)[kUnits], const void* from, int64 at) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u)
        if (d + u * kStep < head_dim) raw[u] = read_raw<kIn>(from, at * head_dim + d + u * kStep);
    };
    State state;
    int e = begin + share;
    do {
      float lse[kBatch], sum[kBatch];
      Raw<kIn> raw[kBatch][kUnits];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        lse[b] = minus_infinity();
        if (kInOrder) sum[b] = 1.0f;
        if (e + b * split < end) {
          const int64 at = static_cast<int64>(rows[b]) * p.num_kv_heads + head;
          lse[b] = p.lse_in[at];
          if (kInOrder) sum[b] = p.sum_in == nullptr ? 1.0f : p.sum_in[at];
          read_member(raw[b], p.o_in, at);
        }
      }
      e += split * kBatch;
      const int next = passes > 1 && e >= end ? begin + share : e;  // the next pass restarts
      if (!kOnce) {
#pragma unroll
        for (int b = 0; b < kBatch; ++b) rows[b] = row_of(next + b * split);
      }
      if constexpr (kInOrder) {
#pragma unroll
        for (int b = 0; b < kBatch; ++b) add_in_order<kIn>(state, lse[b], sum[b], raw[b]);
      } else {
        add_members<kIn>(state, lse, raw, kOnce ? into_lse : minus_infinity());
      }
    } while (!kOnce && e < end);
    if constexpr (!kPartials) {
      if (p.into && share == 0 && active) {
        Raw<kIn> raw[1][kUnits];
        read_member(raw[0], p.o, out_row);
        if constexpr (kInOrder) {
          add_in_order<kIn>(state, into_lse, 1.0f, raw[0]);
        } else {
          add_members<kIn>(state, {into_lse}, raw);
        }
      }
    }

    // shares of one list meet
    if (split > 1) {
      if (share != 0) {
        if (lane == 0) {
          shared_state[group][0] = state.max;
          shared_state[group][1] = state.sum;
        }
#pragma unroll
        for (int i = 0; i < kValues; ++i) shared_o[group][i * kLanes + lane] = state.o[i];
      }
      __syncthreads();
      if (share == 0) {
        for (int other = group + 1; other < group + split; ++other) {
          raise(state, shared_state[other][0]);
          const float weight = state_weight(shared_state[other][0], state.max);
          state.sum = fmaf(shared_state[other][1], weight, state.sum);
#pragma unroll
          for (int i = 0; i < kValues; ++i)
            state.o[i] = fmaf(shared_o[other][i * kLanes + lane], weight, state.o[i]);
        }
      }
      __syncthreads();
    }
    if (share == 0 && active) {
      // One member's o at least is not finite: again, with all weights relative to the highest lse, so that what
      // weighs nothing adds nothing.
      if (!kPartials && (!kOnce || kInOrder && p.into) && !is_finite(state, head_dim - d)) {
        state = {state.max};
        Raw<kIn> raw[1][kUnits];
        for (int member = begin; member < end; ++member) {
          const int64 at = static_cast<int64>(member) * p.num_kv_heads + head;
          read_member(raw[0], p.o_in, at);
          add_members<kIn>(state, {p.lse_in[at]}, raw);
        }
        if (p.into) {
          read_member(raw[0], p.o, out_row);
          add_members<kIn>(state, {into_lse}, raw);
        }
      }
      float lse = state_merged_lse(state.max, state.sum);
      const float inverse = state_inverse(state.sum), kept = add_sink(lse, sink);
#pragma unroll
      for (int i = 0; i < kValues; ++i) state.o[i] = state.o[i] * inverse * kept;
#pragma unroll
      for (int u = 0; u < kUnits; ++u)
        if (d + u * kStep < head_dim)
          write_vector(p.o, out_row * head_dim + d + u * kStep, state.o + u * kVector);
      if (d == 0) p.lse[out_row] = lse;
    }
  }
}
