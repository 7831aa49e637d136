// A warpgroup's products in the latent kernel, issued and not waited for: S = Q K^T of its own tile, O += P V of its half
// of the values, with its own weights from registers and the other warpgroup's from shared memory.
#pragma once

#include "latent/shared.cuh"
#include "wide/wgmma.cuh"

using Queries = uint32[4][4];  // A fragments of the last block of q, kept in registers for the whole unit
constexpr int kScores = kTileKeys / 2;  // per thread
constexpr int kOutputs = kValueDim / 4;  // per thread: half of the columns

__device__ __forceinline__ int fresh_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// This thread's first row of the tile (the other is 8 further); computed again each time, as registers are short.
__device__ __forceinline__ int my_row() { return fresh_thread() / 32 % 4 * 16 + fresh_lane() / 4; }

__device__ __forceinline__ void load_queries(Queries& q, const Shared& shared) {
  const int lane = fresh_lane(), row = fresh_thread() / 32 % 4 * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const int chunk = 2 * step + lane / 16;
    load_matrix_x4(q[step], shared.address + kAtWeights1 + row * 128 + ((chunk ^ row) % 8) * 16);
  }
}

// O += P V with P in shared memory: 64 x 256 += 64 x 16 times 16 x 256.
__device__ __forceinline__ void accumulate_shared(float (&d)[kOutputs], uint64 a, uint64 b) {
  asm volatile("{.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n" WGMMA_OP(256, WGMMA_REGS128) "%128,%129, p, 1, 1, 0, 1;}\n"
               : WGMMA_OUT128(WGMMA_READ_WRITE, d, 0)
               : "l"(a), "l"(b));
}

// The scores' products over one half of a tile's columns. kApart: the last block is a batch of its own.
template <int kHalf, bool kApart>
__device__ __forceinline__ void issue_scores(float (&s)[kScores], const Queries& q, const Shared& shared, int stage) {
  constexpr int first = kHalf * kLeftBlocks, count = half_blocks(kHalf);
  uint32 from = shared.tile(stage, kHalf), with = shared.address + first * kQueryBlock;
  asm volatile("" : "+r"(from), "+r"(with));  // else all descriptors are kept from turn to turn
  uint64 a = matrix_descriptor(with, 16, 1024), b = matrix_descriptor(from, 16, group_stride(kHalf));
  products_begin();
#pragma unroll
  for (int block = first; block < first + count; ++block) {
    if (kApart && block == first + count - 1) {
      products_commit();
      products_begin();
    }
#pragma unroll
    for (int inner = 0; inner < 4; ++inner) {
      const uint64 a_step = a + inner * 2, b_step = b + inner * 2;
      if (block == kBlocks - 1) {
        Wgmma<kTileKeys>::template scores_registers<false>(s, q[inner], b_step);
      } else if (block == 0 && inner == 0) {
        Wgmma<kTileKeys>::scores(s, a_step, b_step);
      } else {
        Wgmma<kTileKeys>::accumulate_scores(s, a_step, b_step);
      }
    }
    a += kQueryBlock / 16;
    b += 1024 / 16;
    asm volatile("" : "+l"(a), "+l"(b));
  }
  products_commit();
}

template <int kHalf>
__device__ __forceinline__ void issue_own_values(float (&o)[kOutputs], const uint32 (&w)[kScores / 2], uint32 values) {
  asm volatile("" : "+r"(values));
  const uint64 b = matrix_descriptor(values, 1024, group_stride(kHalf));
  products_begin();
#pragma unroll
  for (int step = 0; step < 4; ++step)
    Wgmma<256>::accumulate_values(o, w[4 * step], w[4 * step + 1], w[4 * step + 2], w[4 * step + 3],
                                  b + step * 2 * group_stride(kHalf) / 16);
  products_commit();
}

template <int kHalf>
__device__ __forceinline__ void issue_other_values(float (&o)[kOutputs], uint32 weights, uint32 values) {
  asm volatile("" : "+r"(values), "+r"(weights));
  const uint64 a = matrix_descriptor(weights, 16, 1024), b = matrix_descriptor(values, 1024, group_stride(kHalf));
  products_begin();
#pragma unroll
  for (int step = 0; step < 4; ++step) accumulate_shared(o, a + step * 2, b + step * 2 * group_stride(kHalf) / 16);
  products_commit();
}

// Leaves weights where the other warpgroup's products read them.
__device__ __forceinline__ void store_weights(uint32 at, const uint32 (&p)[kScores / 2]) {
  const int lane = fresh_lane(), row = fresh_thread() / 32 % 4 * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32 to = at + row * 128 + (((2 * i + lane / 16) ^ row) % 8) * 16;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(p[4 * i]),
                 "r"(p[4 * i + 1]), "r"(p[4 * i + 2]), "r"(p[4 * i + 3])
                 : "memory");
  }
  fence_async_proxy();
}
