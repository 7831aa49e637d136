// How a warp of the narrow kernel loads a tile of K and V: the elements of each lane, and so the dims and
// tokens of a fragment.
//
// Eight lanes' 16 bytes leave the L1 cache together if they are in different banks, which is to say at
// different places of a line of 128 bytes; else one after the other, and that, not the memory, is
// then what a tile takes. Where rows are few, fragments have room to see to it:
//
// - kHalves: a token of K has two columns, its even blocks of 64 bytes and its odd ones, and Q's rows
//   come twice, above for the even blocks and below for the odd ones. Lanes 8q to 8q + 7 then read a
//   line of one token; the score is the sum of one element of the upper rows and one of the lower.
// - kParts > 1: only kTileRows query rows come in a tile, kParts times over. Each part of the columns of
//   P^T is 0 but for its share of the lanes j, so these may have dims of their own: they read other
//   places of the line than their neighbours. The parts of O^T are added where states meet.
#pragma once

#include "common/mma.cuh"
#include "common/params.cuh"
#include "common/shape.cuh"

constexpr int unit_bytes(int share) {
  return share % 16 == 0 ? 16 : share % 8 == 0 ? 8 : share % 4 == 0 ? 4 : 2;
}
// Whether teams go through all items of a head before they come to the next.
constexpr bool kHeadsFirst = HEADS_FIRST != 0;

constexpr int kLine = 128;  // bytes
// There are no registers for it in general scoring of 32 tokens at a time, nor in converting long rows.
constexpr bool kHalves = ROW_TILES == 1 && kRowBytes % kLine == 0 &&
                         !(kGeneral && kRowBytes == kLine) && !(kIsFp8 && kRowBytes > kLine);
constexpr int kParts = PARTS;
constexpr int kTileRows = 8 / kParts;  // query rows of a tile
static_assert(kParts == 1 || kHalves, "parts read whole lines");
constexpr int kKeyTokens = kHalves ? 4 : 8;       // of K's columns
constexpr int kColumnTiles = 16 / kKeyTokens;     // of 16 tokens
constexpr int kKeyLanes = kHalves ? 8 : 4;        // that share a token of K
constexpr int kKeySteps = kHalves ? kSteps / 2 : kSteps;
constexpr int kKeyUnit = unit_bytes(kRowBytes / kKeyLanes);
constexpr int kValueUnit = unit_bytes(kRowBytes / 8);  // 8 lanes share a token of V
constexpr int kKeyWords = kRowBytes / 4 / kKeyLanes;
constexpr int kValueWords = kValueUnit == 2 ? kRowBytes / 16 : kRowBytes / 32;
// Conversion without an instruction for it takes registers of its own.
constexpr bool kConverts = kFp8 == 4 && kBf16 && __CUDA_ARCH__ < 890;
constexpr int kTokenTiles =
    kRowBytes <= 128 && kRowBytes % 32 == 0 && !(kConverts && kHeadsFirst && kRowBytes == 96) ? 2 : 1;
constexpr int kTile = 16 * kTokenTiles;
// Long rows: K and V take turns in the same registers, 8 KB each is enough under way.
constexpr bool kTakeTurns = kRowBytes > 256 || (kConverts && kRowBytes == 256);

using Keys = uint32[kTokenTiles][kColumnTiles][kKeyWords];
using Values = uint32[kTokenTiles][4][kValueWords];

// The token of a tile that a lane's score i is of: the lane weighs these.
__device__ __forceinline__ int token_of(int i) {
  const int j = threadIdx.x & 3;
  return kHalves ? i * 4 + j : i / 2 * 8 + j * 2 + i % 2;
}

// Loads of K and V: streaming, since they are read once, unless teams beside each other read the same.
// Where `wanted` is 0 the registers keep their content: a branch around the load would cost copies of
// them, made where the load is waited for.
#if HEADS_FIRST
#define LOAD "ld.global"
#else
#define LOAD "ld.global.cs"
#endif
template <int kBytes>
__device__ __forceinline__ void load_unit(uint32* to, const char* from, int wanted) {
  if constexpr (kBytes == 16) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n"
        "@p " LOAD ".v4.u32 {%0,%1,%2,%3}, [%4];\n}"
        : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
        : "l"(from), "r"(wanted));
  } else if constexpr (kBytes == 8) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.s32 p, %3, 0;\n@p " LOAD ".v2.u32 {%0,%1}, [%2];\n}"
        : "+r"(to[0]), "+r"(to[1])
        : "l"(from), "r"(wanted));
  } else if constexpr (kBytes == 4) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p " LOAD ".u32 %0, [%1];\n}"
                 : "+r"(to[0])
                 : "l"(from), "r"(wanted));
  } else {
    asm volatile(
        "{\n.reg .pred p;\n.reg .u16 x;\nsetp.ne.s32 p, %2, 0;\n"
        "@p " LOAD ".u16 x, [%1];\n@p cvt.u32.u16 %0, x;\n}"
        : "+r"(to[0])
        : "l"(from), "r"(wanted));
  }
}
#undef LOAD

// `row`: lane l holds the position of token l (modulo kTile), in rows of kHeadDim stored elements.
__device__ __forceinline__ void load_keys(Keys& k, const AttendParams& p, uint32 row, int wanted) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
  const int first = (kHalves ? g % 2 * 4 + j : j) * kKeyUnit;
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile)
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column) {
      const int token = tile * 16 + column * kKeyTokens + (kHalves ? g / 2 : g);
      const uint32 mine = __shfl_sync(kAllLanes, row, token);
      const char* at =
          static_cast<const char*>(p.k) + static_cast<uint64>(mine) * kRowBytes + first;
#pragma unroll
      for (int unit = 0; unit < kKeyWords * 4 / kKeyUnit; ++unit)
        load_unit<kKeyUnit>(&k[tile][column][unit * kKeyUnit / 4],
                            at + unit * kKeyLanes * kKeyUnit, wanted);
    }
}

// Where in each eight units of V lane group g has its one; lanes of different parts in different places.
__device__ __forceinline__ int value_place(int g, int part) {
  return (g * kValueUnit + part * (kLine / 4)) % (8 * kValueUnit);
}

__device__ __forceinline__ void load_values(Values& v, const AttendParams& p, uint32 row,
                                            int wanted) {
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
  constexpr int kUnits = kRowBytes / 8 / kValueUnit;
  const int first = value_place(g, j * kParts / 4);
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32 mine = __shfl_sync(kAllLanes, row, token_of(tile * 4 + i));
      const char* at =
          static_cast<const char*>(p.v) + static_cast<uint64>(mine) * kRowBytes + first;
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit)
        load_unit<kValueUnit>(&v[tile][i][unit * kValueWords / kUnits], at + unit * 8 * kValueUnit,
                              wanted);
    }
}

// Asks the L2 cache for a tile's K and V, lane l for the row of token l: a kernel that begins while its predecessor
// ends has them come out of memory meanwhile. What the predecessor still writes of them it writes there too.
__device__ __forceinline__ void prefetch_tile(const AttendParams& p, uint32 row) {
  const int64 at = static_cast<int64>(row) * kRowBytes;
  for (int line = (threadIdx.x & 31) / kTile * kLine; line < kRowBytes; line += 32 / kTile * kLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(p.k) + at + line));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(p.v) + at + line));
  }
}
