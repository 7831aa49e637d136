// Hopper's asynchronous machinery as small functions: mbarriers, the bulk tensor copy engine (TMA),
// named barriers, register reallocation. PTX ISA 8.0 and later, sm_90a only.
#pragma once

#include "common/mma.cuh"

// What cuTensorMapEncodeTiled makes; NVRTC cannot include <cuda.h>.
struct alignas(64) TensorMap {
  uint8 opaque[128];
};

// The lane's number, read at each use: addresses built from it occupy no registers across a long loop.
__device__ __forceinline__ int fresh_lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// True in one lane of the warp, the same each time; ptxas knows its meaning, so that instructions
// with uniform operands need no loop over lanes.
__device__ __forceinline__ bool elect_lane() {
  uint32 elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

// --- mbarriers, by 32-bit shared address -----------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and adds `bytes` to the bytes that the copy engine must still deliver in this phase.
__device__ __forceinline__ void barrier_arrive_expect(uint32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity has completed. A fresh barrier counts as having completed the
// phase of parity 1, so a producer's first wait on an empty ring passes.
__device__ __forceinline__ void barrier_wait(uint32 barrier, uint32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait_loop:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait_loop;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// --- bulk tensor copies: global to shared, completing on an mbarrier ---------------------------------

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void copy_box(uint32 target, const TensorMap* map, uint32 barrier,
                                         int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(target),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

__device__ __forceinline__ void copy_box(uint32 target, const TensorMap* map, uint32 barrier,
                                         int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(target),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Neighbouring bytes: a multiple of 16 of them, both ends on 16.
__device__ __forceinline__ void copy_bytes(uint32 target, const void* source, int size,
                                           uint32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(target), "l"(source), "r"(size), "r"(barrier)
      : "memory");
}

// --- ordinary asynchronous copies, for gathered rows -------------------------------------------------

// 16 bytes; zeros when `present` is false (the address must be valid all the same).
__device__ __forceinline__ void copy_chunk(uint32 target, const void* source, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(present ? 16 : 0)
               : "memory");
}

// Arrives once the chunks that this thread has copied so far are there; the barrier's count includes it.
__device__ __forceinline__ void barrier_arrive_copied(uint32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Orders this thread's ordinary shared-memory accesses before later accesses by the tensor cores and
// the copy engine (which need a barrier after it as well).
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- named barriers, registers -------------------------------------------------------------------------

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
