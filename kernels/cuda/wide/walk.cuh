// Which key tiles of a unit are visited, and in what order.
#pragma once

#include "wide/params.cuh"
#include "wide/shared.cuh"

// Key tiles of an item; one, all hidden, where there are no keys.
__device__ __forceinline__ int tiles_of(const WorkItem& item) {
  return max(1, ceil_div(item.num_keys, kTileKeys));
}

// A unit's path through its key tiles, from the last to the first, past those which a custom mask
// hides whole. Every unit visits a tile, be it one in which everything is hidden.
struct TileCursor {
  int tile;  // where it is; -1: past the end
  int next;  // where it goes from there; -1: nowhere
#if HAS_MASK
  const VisibleTiles* visible;
#endif

  TileCursor() = default;
  __device__ __forceinline__ TileCursor(const Unit& unit, const WideParams& params) {
#if HAS_MASK
    visible = params.visible + static_cast<int64>(unit.index) * params.visible_words;
#endif
    tile = max(before(tiles_of(unit.item)), 0);
    next = before(tile);
  }

  __device__ __forceinline__ void advance() {
    tile = next;
    next = before(tile);
  }

 private:
  // The last tile to visit of those before `tile`; -1: none.
  __device__ __forceinline__ int before(int tile) const {
#if HAS_MASK
    for (int word = (tile - 1) >> 5; word >= 0; --word) {
      uint32 seen = visible[word].seen;
      if (word == tile >> 5) seen &= (1u << (tile & 31)) - 1;
      if (seen != 0) return word * 32 + 31 - __clz(seen);
    }
    return -1;
#else
    return tile - 1;
#endif
  }
};

// A tile on the way, as the consumers know it. With a mask, the warp that streams K sends it.
struct KeyTile {
  int index;
#if HAS_MASK
  bool last, cut;  // the unit's last one; the mask hides some of it

  static __device__ __forceinline__ int pack(const TileCursor& cursor) {
    const int cut = cursor.visible[cursor.tile >> 5].cut >> (cursor.tile & 31) & 1;
    return cursor.tile << 2 | (cursor.next < 0 ? 2 : 0) | cut;
  }
  __device__ __forceinline__ void enter(const WorkItem&) {}
  __device__ __forceinline__ void advance(int packed) {
    index = packed >> 2;
    last = packed & 2;
    cut = packed & 1;
  }
  __device__ __forceinline__ bool is_last() const { return last; }
#else
  __device__ __forceinline__ void enter(const WorkItem& item) { index = tiles_of(item); }
  __device__ __forceinline__ void advance(int) { --index; }
  __device__ __forceinline__ bool is_last() const { return index == 0; }
#endif
};
