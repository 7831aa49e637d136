// Parameters of one launch of the wide kernel, beside the tensor maps of K and V.
#pragma once

#include "common/types.cuh"
#include "common/work.cuh"
#include "visible/visible.cuh"

struct WideParams {
  const void* q;                      // [rows, num_qo_heads, head_dim] Element
  void* o;                            // same
  float* lse;                         // [rows, num_qo_heads], natural log
  const uint32* mask_bits;            // padded by 32 readable bytes
  const int64* mask_row_offsets;      // by plan row
  float* partial_o;
  float* partial_lse;
  float* partial_sum;                 // fixed splits: the sum of a running state's weights
  const float* sinks;                 // natural; null: none
  int sinks_of_rows;                  // 1: of each head of each row; 0: of each head
  int head_blocks;                    // a kv head's share of the map's third coordinate (NHD) ...
  int head_groups;                    // ... or to its fourth (HND); the other one is 0
  const WorkItem* items;
  const int* kv_indices;              // page ids; unused for ragged keys
  const int* order;                   // plan row -> row of q and o
  const int* positions;               // by plan row
  const VisibleTiles* visible;        // visible_words for each item
  float* running;                     // fixed splits: running states, kRunningFloats for each consumer thread
  uint32* schedule;                 // two counters, zero between launches
  float scale;                        // of a product (of its tanh, if capped) to base 2
  float cap_scale;                    // of a product to what tanh is taken of; 0: no cap
  int window_left;
  int num_items;
  int own_units;                      // CTAs whose first unit has their own number: all, or 0
  int num_kv_heads;
  int group_size;
  int head_block;                     // kv heads worked on together; divides num_kv_heads
  int num_pages;                      // pages of one layer: outer map index = layer * num_pages + page
  int visible_words;
  int split_keys;                     // fixed splits: at multiples of this number of keys
  int page_size;                      // 1 for ragged keys
  int first_split;                    // fixed splits: once before the first of those; 0: not
  int late;                           // 1: a unit is taken as late as its loads allow, if kMayBeLate
};

// Where the wide kernel finds K and V of an fp8 pool, or of pages of any size; of others it has tensor maps.
struct StoredKv {
  const void* k;      // K of page 0 of the launch's base layer
  const void* v;      // V of the same page
  uint32 layer_rows;  // strides in rows of kHeadDim stored elements
  uint32 page_rows;
  uint32 token_rows;
  uint32 head_rows;
  int page_size;
  float v_scale;
};
