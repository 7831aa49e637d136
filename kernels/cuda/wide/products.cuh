// A consumer warpgroup's products in the wide kernel: S = Q K^T and O += P V, issued and not waited for; and
// Q in registers, where there is room for it.
#pragma once

#include "wide/hopper.cuh"
#include "wide/wgmma.cuh"
#include "wide/ring.cuh"
#include "wide/rows.cuh"
#include "wide/shared.cuh"

using Queries = uint32[kHeadDim / 16][4];

// Waits for a unit's queries.
__device__ __forceinline__ void wait_for_queries(const Shared& shared,
                                                 const Ring<kQueryStages>& queries) {
  barrier_wait(shared.query_full(queries.stage()), queries.parity());
  if constexpr (!kQueriesInRegisters) fence_async_proxy();  // they were copied by ordinary threads
}

// A fragments of this warp's 16 rows of q, kept in registers for the whole unit.
__device__ __forceinline__ void load_queries(Queries& q, const Shared& shared,
                                             const Ring<kQueryStages>& queries) {
  const uint32 tile = shared.queries(queries.stage());
  const int lane = fresh_lane();
  const int row = my_row() / 16 * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const uint32 source = tile + query_offset(row, 2 * step + lane / 16);
    load_matrix_x4(q[step], source);
  }
  barrier_arrive(shared.query_empty(queries.stage()));
}

// S = Q K^T: 64 rows by kTileKeys keys; q from registers, or from its tile.
__device__ __forceinline__ void issue_scores(float (&s)[kScores], const Queries& q, uint32 tile,
                                             uint32 keys) {
  const auto a = matrix_descriptor(tile, 16, 1024);
  const auto b = matrix_descriptor(keys, 16, kGroupStride);
  products_begin();
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int block = step / 4, inner = step % 4 * 32;
    const auto a_step = a + (block * kQueryBlockStride + inner) / 16;
    const auto b_step = b + (block * kBlockStride + inner) / 16;
    if constexpr (kQueriesInRegisters) {
      if (step == 0) {
        Wgmma<kTileKeys>::template scores_registers<true>(s, q[step], b_step);
      } else {
        Wgmma<kTileKeys>::template scores_registers<false>(s, q[step], b_step);
      }
    } else if (step == 0) {
      Wgmma<kTileKeys>::scores(s, a_step, b_step);
    } else {
      Wgmma<kTileKeys>::accumulate_scores(s, a_step, b_step);
    }
  }
  products_commit();
}

// O += P V: 64 rows by kValueDim, over kTileKeys keys.
__device__ __forceinline__ void issue_values(float (&o)[kOutputs], const uint32 (&p)[kScores / 2],
                                             uint32 values) {
  const auto b = matrix_descriptor(values, kBlockStride, kValueGroupStride);
  products_begin();
#pragma unroll
  for (int step = 0; step < kTileKeys / 16; ++step) {
    Wgmma<kValueDim>::accumulate_values(o, p[4 * step], p[4 * step + 1], p[4 * step + 2],
                                       p[4 * step + 3], b + step * 2 * kValueGroupStride / 16);
  }
  products_commit();
}
