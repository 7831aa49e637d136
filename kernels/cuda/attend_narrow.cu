// Attention for tiles of few query rows (decode, small shared nodes): bound by memory, so built to
// keep bytes in flight, and these in registers: a warp loads the next tile's K as soon as the scores
// of the present one have taken the last, and V likewise, so one of the two is always under way. No
// shared memory, no barrier and no wait stand between a load and the product it is for.
//
// A team of `team` warps owns a contiguous list of work items for one kv head and shares each of them:
// warp r takes the tiles r, r + team, ... Loads run ahead straight across the ends of items. At an
// item's end the warps' states meet in shared memory and become the item's. Teams beside each other
// work on the neighbouring heads of the same tokens.
//
// What comes before an item's first product is fetched ahead as well: the places of the next item's
// rows while the present one is worked on, its queries while the present one's state is written.
#include "narrow.cuh"

constexpr int kN = ROW_TILES;  // of 8 packed rows
constexpr int kRows = kN * 8;
constexpr int kWarps = WARPS;
constexpr int kThreads = kWarps * 32;
constexpr int kStateStride = kHeadDim + 4;  // floats
constexpr int kQueryBytes = kSteps * 32 * 16;
constexpr int kStateBytes = 8 * kStateStride * 4;
constexpr int kWarpBytes = kQueryBytes + kStateBytes + 64 + kRows * 4;
static_assert(kN == 1 || kN == 2, "one fragment of Q");

// A warp's part of shared memory.
struct Own {
  char* at;
  __device__ __forceinline__ char* queries() const { return at; }  // as fragments
  __device__ __forceinline__ float* o(int row) const {  // of a row tile
    return reinterpret_cast<float*>(at + kQueryBytes) + row * kStateStride;
  }
  __device__ __forceinline__ float* max_sum(int row) const {
    return reinterpret_cast<float*>(at + kQueryBytes + kStateBytes) + row * 2;
  }
  __device__ __forceinline__ int& query(int row) const {  // row of q and o, in heads
    return reinterpret_cast<int*>(at + kQueryBytes + kStateBytes + 64)[row];
  }
};

// What the arithmetic needs of an item.
struct Run {
  int row_begin, num_rows, num_keys, kv_start, causal, partial;
};

// Item `index` of this worker's, or nothing to do past its last.
__device__ __forceinline__ Run read_run(const AttendParams& p, int index, int end) {
  Run run = {0, 0, 0, 0, 0, 0};
  if (index < end) {
    const int4* at = reinterpret_cast<const int4*>(p.items + index);
    const int4 a = at[0], b = at[1];
    run = Run{a.y, a.z, b.x, b.y, b.z, b.w};
  }
  return run;
}

// Where packed row `lane` of a run is, and by what rules it sees keys.
struct RowPlace {
  int query;     // row of q and o, in heads; -1: no such row
  int position;
  int64 mask;    // bit of key position 0; used with a custom mask only
};

__device__ __forceinline__ RowPlace find_row(const AttendParams& p, const Run& run, int head) {
  const int lane = threadIdx.x & 31;
  RowPlace place = {-1, 0, 0};
  if (lane < run.num_rows) {
    const int packed = run.row_begin + lane;
    const int row = packed / p.group_size;
    place.query = (p.order[row] * p.num_kv_heads + head) * p.group_size +
                  (packed - row * p.group_size);
    place.position = p.positions[row];
    if (kRare && p.mask_bits != nullptr) place.mask = p.mask_row_offsets[row];
  }
  return place;
}

// Walks this warp's tiles of all items, one tile ahead of the arithmetic; lane l looks after token l.
// A page's id is read one tile ahead of that. Tokens past a run's end are its last one again: their
// scores are hidden, and what is weighed by 0 is a value of the same run, never dead memory.
struct Walk {
  int item, end;     // of the tile looked up
  int first, keys;   // its first token, and the run's length
  int kv_begin;
  uint32 base;       // row of layer and head
  int page, offset;  // of this lane's token; the id is in flight

  __device__ __forceinline__ void enter(const AttendParams& p, int head, int start) {
    if (item < end) {
      const int4 a = reinterpret_cast<const int4*>(p.items + item)[0];
      first = start;
      keys = p.items[item].num_keys;
      kv_begin = a.w;
      base = a.x * p.layer_rows + head * p.head_rows;
    }
  }
  __device__ __forceinline__ bool more() const { return item < end; }
  // Go to the first tile at or after `first`, and start looking it up.
  __device__ __forceinline__ void settle(const AttendParams& p, int head, int start) {
    while (item < end && first >= keys) {
      ++item;
      enter(p, head, start);
    }
    if (item < end) {
      const int token = min(first + static_cast<int>(threadIdx.x & (kTile - 1)), keys - 1);
      const int index = static_cast<uint32>(token) / static_cast<uint32>(p.page_size);
      offset = token - index * p.page_size;
      page = kv_begin + index;
      if (p.kv_indices != nullptr) page = p.kv_indices[page];
    }
  }
  __device__ __forceinline__ uint32 row(const AttendParams& p) const {
    return base + page * p.page_rows + offset * p.token_rows;
  }
};

// Hide what a row must not see: keys past the run's end, the future, the window, the custom mask.
struct RowRules {
  int position[kN];  // of rows g and g + 8
  int64 mask[kN];    // bit of key position 0; used with a custom mask only

  __device__ __forceinline__ void hide(Scores& s, const Run& run, int first,
                                       const AttendParams& p) const {
    const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      int last = run.num_keys - 1, least = 0;  // visible keys of the run, for this row
      if (run.causal & kHideFuture) last = min(last, position[n] - run.kv_start);
      if (run.causal & kHideWindow) least = max(least, position[n] - p.window_left - run.kv_start);
#pragma unroll
      for (int tile = 0; tile < kTokenTiles * 2; ++tile)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = first + tile * 8 + j * 2 + i;
          bool visible = key >= least && key <= last;
          if constexpr (kRare) {
            if (p.mask_bits != nullptr && visible && n * 8 + g < run.num_rows) {
              const int64 bit = mask[n] + run.kv_start + key;
              visible = (p.mask_bits[bit >> 3] >> (bit & 7)) & 1;
            }
          }
          if (!visible) s[tile][n * 2 + i] = minus_infinity();
        }
    }
  }
};

// The warps of a team.
struct Team {
  int size, rank, name;
  __device__ __forceinline__ void meet() const {
    if (size == 1) {
      __syncwarp();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(size * 32) : "memory");
    }
  }
};

// Puts the team's states of an item together and writes them: final rows, or partial ones.
__device__ __forceinline__ void write_state(const Accumulator<kN>& acc, const AttendParams& p,
                                            const Run& run, int head, float c, Own own,
                                            const Team& team) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
  const bool final = run.partial == kFinal;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    if (n * 8 >= run.num_rows) break;
    const float sum = quad_sum(acc.sum[n]);
    if (j == 0) {
      own.max_sum(g)[0] = acc.max[n] * c;
      own.max_sum(g)[1] = sum;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (n * 8 + j * 2 + i < run.num_rows) {
#pragma unroll
        for (int t = 0; t < kSteps; ++t)
          *reinterpret_cast<float2*>(own.o(j * 2 + i) + output_dim(t, g)) =
              make_float2(acc.o[n][t][i], acc.o[n][t][2 + i]);
      }
    }
    team.meet();
    const int units = min(8, run.num_rows - n * 8) * (kHeadDim / 4);
    const Own leader{own.at - team.rank * kWarpBytes};
    for (int unit = team.rank * 32 + lane; unit < units; unit += team.size * 32) {
      const int row = unit / (kHeadDim / 4), dim = unit % (kHeadDim / 4) * 4;
      float max = minus_infinity();
#pragma unroll 4
      for (int w = 0; w < team.size; ++w)
        max = fmaxf(max, Own{leader.at + w * kWarpBytes}.max_sum(row)[0]);
      float sum = 0.0f;
      float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
      for (int w = 0; w < team.size; ++w) {
        const Own member{leader.at + w * kWarpBytes};
        const float2 state = *reinterpret_cast<const float2*>(member.max_sum(row));
        const float weight = state_rescale(state.x, max);
        const float4 x = *reinterpret_cast<const float4*>(member.o(row) + dim);
        sum = fmaf(state.y, weight, sum);
        o.x = fmaf(x.x, weight, o.x), o.y = fmaf(x.y, weight, o.y);
        o.z = fmaf(x.z, weight, o.z), o.w = fmaf(x.w, weight, o.w);
      }
      const float inverse = state_inverse(sum) * p.v_scale;
      o.x *= inverse, o.y *= inverse, o.z *= inverse, o.w *= inverse;
      const int64 at = final ? own.query(n * 8 + row)
                             : static_cast<int64>(run.partial + n * 8 + row) * p.num_kv_heads + head;
      if (dim == 0) (final ? p.lse : p.partial_lse)[at] = state_lse(max, sum);
      if (final) {
        *reinterpret_cast<uint2*>(static_cast<uint16*>(p.o) + at * kHeadDim + dim) =
            make_uint2(pack<kBf16>(o.x, o.y), pack<kBf16>(o.z, o.w));
      } else {
        *reinterpret_cast<float4*>(p.partial_o + at * kHeadDim + dim) = o;
      }
    }
    team.meet();
  }
}

// A run's queries on their way from memory to shared memory.
struct Queries {
  static constexpr int kChunks = kHeadDim / 8;  // of a row, 16 bytes each
  static constexpr int kAll = kRows * kChunks;
  static constexpr int kLoads = (kAll + 31) / 32;
  uint4 x[kLoads];

  // `query`: lane r's row r; rows that are not there are zeros.
  __device__ __forceinline__ void load(const AttendParams& p, int query) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int chunk = i * 32 + (threadIdx.x & 31);
      const int from = __shfl_sync(kAllLanes, query, chunk / kChunks);
      x[i] = make_uint4(0, 0, 0, 0);
      if (from >= 0 && chunk < kAll)
        x[i] = *reinterpret_cast<const uint4*>(
            static_cast<const char*>(p.q) +
            (static_cast<int64>(from) * kHeadDim + chunk % kChunks * 8) * 2);
    }
  }
  __device__ __forceinline__ void store(char* fragments) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int chunk = i * 32 + (threadIdx.x & 31);
      if (chunk >= kAll) break;
      const int row = chunk / kChunks, dim = chunk % kChunks * 8;
      const uint32 words[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int place = query_step(dim + half * 4) * 32 + query_lane(row, dim + half * 4);
        uint32* fragment = reinterpret_cast<uint32*>(fragments + place * 16) + row / 8;
        fragment[0] = words[half * 2];
        fragment[2] = words[half * 2 + 1];
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    attend_narrow(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int unit = (blockIdx.x * kWarps + warp) / p.team;
  const Team team{p.team, warp % p.team, 1 + warp / p.team};
  const int worker = unit / p.num_kv_heads, head = unit - worker * p.num_kv_heads;
  launch_dependents();  // the merge, or the next call: it waits for this grid before it reads states
  if (worker >= p.num_workers) {
    wait_for_predecessor();
    return;
  }
  int begin = worker, end = worker + 1;  // an item each where there is no list
  if (p.worker_begin != nullptr) {
    begin = p.worker_begin[worker];
    end = p.worker_begin[worker + 1];
  }
  const Own own{shared + warp * kWarpBytes};

  // the order of these matters: each read of a chain goes out before another chain is waited for
  Walk walk;
  walk.item = begin;
  walk.end = end;
  const int start = team.rank * kTile, stride = team.size * kTile;
  walk.enter(p, head, start);
  walk.settle(p, head, start);
  RowPlace place = find_row(p, read_run(p, begin, end), head);
  for (int i = lane; i < kQueryBytes / 16; i += 32)  // rows past kRows stay 0
    reinterpret_cast<uint4*>(own.queries())[i] = make_uint4(0, 0, 0, 0);
  __syncwarp();
  Keys k;
  Values v;
  uint32 row = walk.row(p);  // of the tile to load next
  int more = walk.more();    // whether there is one
  const auto go_on = [&]() {
    walk.first += stride;
    walk.settle(p, head, start);
  };
  wait_for_predecessor();  // up to here, only the plan was read
  load_keys(k, p, row, more);
  if constexpr (!kTakeTurns) load_values(v, p, row, more);
  Queries queries;
  queries.load(p, place.query);
  go_on();

  const float c = kRare ? 1.0f : p.scale2;
  for (int index = begin; index < end; ++index) {
    const Run run = read_run(p, index, end);  // in L1, from when the walk came by
    queries.store(own.queries());
    if (lane < kRows) own.query(lane) = place.query;
    RowRules rules;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int in_tile = n * 8 + (lane >> 2);
      rules.position[n] = __shfl_sync(kAllLanes, place.position, in_tile);
      rules.mask[n] = kRare ? __shfl_sync(kAllLanes, place.mask, in_tile) : 0;
    }
    __syncwarp();
    Accumulator<kN> acc;
    clear(acc);
    place = find_row(p, read_run(p, index + 1, end), head);

    for (int first = start; first < run.num_keys; first += stride) {
      Scores s;
      score(s, k, own.queries());
      if constexpr (kTakeTurns) load_values(v, p, row, 1);
      more = walk.more();
      row = walk.row(p);
      asm volatile("" : "+r"(row));  // keep it: working it out again would keep the old page's id
      if constexpr (!kTakeTurns) load_keys(k, p, row, more);
      go_on();
      if constexpr (kRare) cap(s, p);
      if (first + kTile > run.num_keys || run.causal != 0 || kRare) rules.hide(s, run, first, p);
      soften<kN>(s, acc, c);
      weigh<kN>(acc, s, v);
      if constexpr (kTakeTurns) {
        load_keys(k, p, row, more);
      } else {
        load_values(v, p, row, more);
      }
    }
    if constexpr (!kTakeTurns) queries.load(p, place.query);
    write_state(acc, p, run, head, c, own, team);
    if constexpr (kTakeTurns) queries.load(p, place.query);  // no registers for them before
  }
}
