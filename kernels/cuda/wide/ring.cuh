// Rings in shared memory, through which the wide kernel's data movers pass data to the consumers
// beside the tiles themselves: the units, and with a custom mask which tiles come.
#pragma once

#include "wide/hopper.cuh"
#include "wide/shared.cuh"
#include "wide/walk.cuh"

// A place in a ring of kSize stages: one counter of uses, so that it costs one register.
template <int kSize>
struct Ring {
  uint32 uses = 0;
  __device__ __forceinline__ int stage() const { return uses % kSize; }
  __device__ __forceinline__ uint32 parity() const { return uses / kSize & 1; }
  __device__ __forceinline__ void advance() { ++uses; }
};

// Takes the next unit's description out of its slot; false when there is no further unit.
__device__ __forceinline__ bool next_unit(const Shared& shared, Ring<kUnitSlots>& ring,
                                          Unit& unit) {
  barrier_wait(shared.unit_full(ring.stage()), ring.parity());
  unit = shared.unit(ring.stage());
  barrier_arrive(shared.unit_empty(ring.stage()));
  ring.advance();
  return unit.head >= 0;
}

// Sends the consumers the tile of a stage of keys, through the stage's barrier.
__device__ __forceinline__ void publish_visit(const Shared& shared, int stage, const TileCursor& cursor) {
#if HAS_MASK
  shared.visit(stage) = KeyTile::pack(cursor);
#endif
}

// The tile whose keys have arrived in a stage.
__device__ __forceinline__ void visit_next(KeyTile& tile, const Shared& shared, int stage) {
  tile.advance(kHasMask ? shared.visit(stage) : 0);
}
