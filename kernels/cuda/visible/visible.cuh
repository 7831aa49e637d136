// What a custom mask leaves of each key tile of a work item: found by visible.cu before the attention of a
// masked batch, read by the kernels of many query rows, which then neither load nor multiply a tile that
// none of its rows sees, and look at mask bits only where there is one to obey.
#pragma once

#include "common/types.cuh"

// 32 consecutive key tiles of an item, a bit each, the first in bit 0.
struct VisibleTiles {
  uint32 seen;  // some row sees some key
  uint32 cut;   // the mask hides a key that the other rules and the run's end leave to its row
};

// Of a launch: `words` elements for each item, in the order of the items.
struct VisibleTable {
  const VisibleTiles* tiles;  // null: no custom mask, every tile is visited
  int words;
};
