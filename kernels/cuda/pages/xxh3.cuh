// XXH3-128 of inputs of more than 240 bytes, seed 0 and the default secret, as xxHash specifies it (XXH128).
//
// Eight sums of 64 bits take the input's stripes of 64 bytes, in any order within a block of 1,024 bytes. After
// each whole block they are scrambled, one block after another; at the end the last 64 bytes, which may have been
// read before, are added, and the sums become two halves.
#pragma once
#include "common/types.cuh"

namespace xxh3 {

constexpr uint32 kPrime32[3] = {0x9e3779b1u, 0x85ebca77u, 0xc2b2ae3du};
constexpr uint64 kPrime64[5] = {0x9e3779b185ebca87ull, 0xc2b2ae3d27d4eb4full, 0x165667b19e3779f9ull,
                                0x85ebca77c2b2ae63ull, 0x27d4eb2f165667c5ull};
constexpr uint32 kStripe = 64, kBlock = 1024, kSums = 8, kStripes = kBlock / kStripe;
constexpr uint32 kSecretBytes = 192;

__constant__ uint64 kSecret[kSecretBytes / 8] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};

__constant__ uint64 kFirstSums[kSums] = {kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2],
                                          kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]};

// Eight bytes of the secret, from any byte on.
__device__ __forceinline__ uint64 secret_at(uint32 byte) {
  const uint32 word = byte / 8, shift = 8 * (byte % 8);
  return shift == 0 ? kSecret[word] : kSecret[word] >> shift | kSecret[word + 1] << (64 - shift);
}

// What a word of a stripe adds to its own sum; to its neighbour's (sum ^ 1) it adds itself.
__device__ __forceinline__ uint64 product(uint64 word, uint64 secret) {
  const uint64 keyed = word ^ secret;
  return (keyed & 0xffffffffull) * (keyed >> 32);
}

__device__ __forceinline__ uint64 scrambled(uint64 sum, uint64 secret) {
  return (sum ^ sum >> 47 ^ secret) * kPrime32[0];
}

__device__ __forceinline__ uint64 folded(uint64 a, uint64 b) { return a * b ^ __umul64hi(a, b); }

// One half of the digest: `start` and `secret`, a byte of the secret, differ by half.
__device__ __forceinline__ uint64 merged(const uint64* sums, uint32 secret, uint64 start) {
  for (uint32 i = 0; i < kSums; i += 2)
    start += folded(sums[i] ^ secret_at(secret + 8 * i), sums[i + 1] ^ secret_at(secret + 8 * i + 8));
  start = (start ^ start >> 37) * 0x165667919e3779f9ull;
  return start ^ start >> 32;
}

__device__ __forceinline__ uint64 low_half(const uint64* sums, uint64 length) {
  return merged(sums, 11, length * kPrime64[0]);
}

__device__ __forceinline__ uint64 high_half(const uint64* sums, uint64 length) {
  return merged(sums, kSecretBytes - kStripe - 11, ~(length * kPrime64[1]));
}

// The bytes of a number in the order of a digest, most significant first.
__device__ __forceinline__ uint64 reversed(uint64 half) {
  const uint64 low = __byte_perm(static_cast<uint32>(half), 0, 0x0123);
  return low << 32 | __byte_perm(static_cast<uint32>(half >> 32), 0, 0x0123);
}

}  // namespace xxh3
