// Warpgroup matrix products: m64nNk16, 16-bit operands, float accumulators.
//
// `Wgmma<N>::scores` multiplies two shared-memory operands whose k is contiguous (A = Q, B = K) and
// starts a new sum; `accumulate_scores` adds to it; `scores_registers` does either with A in registers;
// `accumulate_values` has A in registers (P) and B with n contiguous (V, transposed by the instruction,
// not by a copy). Accumulator i of a thread holds row lane / 4 + 8 * (i / 2 % 2) of its warp's 16,
// column 8 * (i / 4) + 2 * (lane % 4) + i % 2.
#pragma once

#if BF16
#define WGMMA_TYPE "bf16"
#else
#define WGMMA_TYPE "f16"
#endif

// --- matrix descriptors ----------------------------------------------------------------------------------

// 128-byte swizzle (bits 62-63 = 1): 8 rows of 128 bytes make one 1024-byte group, aligned to 1024. For
// k-contiguous operands `stride` is the distance between groups of 8 rows and `leading` is not used;
// for n-contiguous ones `stride` is between groups of 8 k and `leading` between blocks of 64 n.
__device__ __forceinline__ uint64 matrix_descriptor(uint32 address, int leading,
                                                                int stride) {
  return static_cast<uint64>((address & 0x3FFFF) >> 4) |
         static_cast<uint64>(leading >> 4) << 16 |
         static_cast<uint64>(stride >> 4) << 32 | 1ull << 62;
}

// --- ordering ----------------------------------------------------------------------------------------------

// Before the first product of a batch: registers written by ordinary instructions are ready for it.
__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `kPending` committed batches are unfinished.
template <int kPending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The compiler believes a product's registers are ready when it is issued. Pinning them after the
// wait keeps it from moving their uses, or its own copies of them, in front of it.
template <int kCount>
__device__ __forceinline__ void pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void pin(uint32 (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

// --- the instructions --------------------------------------------------------------------------------------

#define WGMMA_OUT8(c, d, i)                                                                        \
  c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define WGMMA_OUT32(c, d, i)                                                                       \
  WGMMA_OUT8(c, d, i), WGMMA_OUT8(c, d, i + 8), WGMMA_OUT8(c, d, i + 16), WGMMA_OUT8(c, d, i + 24)
#define WGMMA_OUT48(c, d, i) \
  WGMMA_OUT32(c, d, i), WGMMA_OUT8(c, d, i + 32), WGMMA_OUT8(c, d, i + 40)
#define WGMMA_OUT64(c, d, i) WGMMA_OUT32(c, d, i), WGMMA_OUT32(c, d, i + 32)
#define WGMMA_OUT96(c, d, i) WGMMA_OUT64(c, d, i), WGMMA_OUT32(c, d, i + 64)
#define WGMMA_OUT128(c, d, i) WGMMA_OUT64(c, d, i), WGMMA_OUT64(c, d, i + 64)

#define WGMMA_REGS32                                                                               \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
  "%26,%27,%28,%29,%30,%31"
#define WGMMA_REGS48 WGMMA_REGS32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_REGS64                                                                               \
  WGMMA_REGS32                                                                                     \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,"  \
  "%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_REGS96                                                                               \
  WGMMA_REGS64                                                                                     \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,"  \
  "%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_REGS128                                                                              \
  WGMMA_REGS96                                                                                     \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,"   \
  "%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define WGMMA_OP(N, REGS)                                                                          \
  "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." WGMMA_TYPE "." WGMMA_TYPE " {" REGS "}, "
#define WGMMA_READ_WRITE(x) "+f"(x)
#define WGMMA_WRITE(x) "=f"(x)

template <int kColumns>
struct Wgmma;

// A0..A4 number the operands that follow the accumulators.
#define WGMMA_DEFINE(N, COUNT, OUT, REGS, A0, A1, A2, A3, A4)                                      \
  template <>                                                                                      \
  struct Wgmma<N> {                                                                                \
    static __device__ __forceinline__ void scores(float (&d)[COUNT], uint64 a,                     \
                                                  uint64 b) {                                      \
      asm volatile("{.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n" WGMMA_OP(N, REGS) A0 "," A1            \
                   ", p, 1, 1, 0, 0;}\n"                                                           \
                   : OUT(WGMMA_WRITE, d, 0)                                                        \
                   : "l"(a), "l"(b));                                                              \
    }                                                                                              \
    static __device__ __forceinline__ void accumulate_scores(                                      \
        float (&d)[COUNT], uint64 a, uint64 b) {                                                   \
      asm volatile("{.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n" WGMMA_OP(N, REGS) A0 "," A1            \
                   ", p, 1, 1, 0, 0;}\n"                                                           \
                   : OUT(WGMMA_READ_WRITE, d, 0)                                                   \
                   : "l"(a), "l"(b));                                                              \
    }                                                                                              \
    template <bool kFirst>                                                                         \
    static __device__ __forceinline__ void scores_registers(                                       \
        float (&d)[COUNT], const uint32 (&a)[4], uint64 b) {                                       \
      if (kFirst) {                                                                                \
        asm volatile("{.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n" WGMMA_OP(N, REGS) "{" A0 "," A1 ","  \
                     A2 "," A3 "}," A4 ", p, 1, 1, 0;}\n"                                          \
                     : OUT(WGMMA_WRITE, d, 0)                                                      \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                        \
      } else {                                                                                     \
        asm volatile("{.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n" WGMMA_OP(N, REGS) "{" A0 "," A1 ","  \
                     A2 "," A3 "}," A4 ", p, 1, 1, 0;}\n"                                          \
                     : OUT(WGMMA_READ_WRITE, d, 0)                                                 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                        \
      }                                                                                            \
    }                                                                                              \
    static __device__ __forceinline__ void accumulate_values(                                      \
        float (&d)[COUNT], uint32 a0, uint32 a1, uint32 a2, uint32 a3,                             \
        uint64 b) {                                                                                \
      asm volatile("{.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n" WGMMA_OP(N, REGS) "{" A0 "," A1 "," A2 \
                   "," A3 "}," A4 ", p, 1, 1, 1;}\n"                                               \
                   : OUT(WGMMA_READ_WRITE, d, 0)                                                   \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));                                  \
    }                                                                                              \
  };

WGMMA_DEFINE(64, 32, WGMMA_OUT32, WGMMA_REGS32, "%32", "%33", "%34", "%35", "%36")
WGMMA_DEFINE(96, 48, WGMMA_OUT48, WGMMA_REGS48, "%48", "%49", "%50", "%51", "%52")
WGMMA_DEFINE(128, 64, WGMMA_OUT64, WGMMA_REGS64, "%64", "%65", "%66", "%67", "%68")
WGMMA_DEFINE(192, 96, WGMMA_OUT96, WGMMA_REGS96, "%96", "%97", "%98", "%99", "%100")
WGMMA_DEFINE(256, 128, WGMMA_OUT128, WGMMA_REGS128, "%128", "%129", "%130", "%131", "%132")
