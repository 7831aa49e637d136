// Work items: the host's instructions for the attention kernels. One launch runs many items.
//
// Query rows are packed: packed row p of a plan is (plan row p / group_size, query head p % group_size
// of the kv head's group). An item is a tile of consecutive packed rows times a run of keys of one
// segment, for every kv head: a launch has num_items * num_kv_heads units, and the arrays below are the
// same for every head.
#pragma once

struct WorkItem {
  int layer;        // layer of the pool, 0 based
  int row_begin;    // first packed row of the tile, in the launch's packed rows
  int num_rows;     // packed rows in the tile, 1 .. kTileRows
  int kv_begin;     // index into kv_indices of the page that holds the first key
  int num_keys;     // keys in the run; it starts at the first slot of a page
  int kv_start;     // position, in each row's own sequence, of the run's first key
  int rules;        // kHideFuture | kHideWindow: which rules this run still needs, key by key
  int partial;      // first partial row, or kFinal: the tile is its rows' only state, write o and lse
};

constexpr int kFinal = -1;

// Bits of `rules`. The planner clears a bit when every row of the tile passes that rule for every key
// of the run, so that 0 means no look at positions at all.
constexpr int kHideFuture = 1;  // hide keys whose position is greater than the row's position
constexpr int kHideWindow = 2;  // hide keys whose position is less than the row's position - window_left

// Where keys are split at multiples of `split_keys`, the wide kernel takes an item's splits one after another, as runs
// of their own.
constexpr int kFollows = 4;   // splits before this one have left a running state
constexpr int kFollowed = 8;  // splits after this one take the running state up

// Partial row j = partial + (packed row - row_begin) of kv head h is stored at j * num_kv_heads + h:
// float o[head_dim] and float lse (natural log). The merge reads a plan row's list of partial rows.
