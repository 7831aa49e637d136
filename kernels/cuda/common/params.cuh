// Arguments of one attention launch, passed by value.
#pragma once

#include "common/types.cuh"
#include "common/work.cuh"

// Scoring of the general kind: a soft cap, a custom mask, or a scale that is not positive.
constexpr bool kGeneral = GENERAL != 0;

struct AttendParams {
  const void* q;       // compute type [n, num_kv_heads * group_size, kHeadDim]
  void* o;             // as q
  float* lse;          // [n, num_kv_heads * group_size]
  const void* k;       // K of page 0 of the launch's base layer
  const void* v;       // V of the same page
  const void* new_k;   // narrow kernel: compute type [n, num_kv_heads, kHeadDim], each row's last key; null: is stored
  const void* new_v;
  const uint8* mask_bits;         // null: no custom mask
  const int64* mask_row_offsets;  // per plan row, in bits
  float* partial_o;
  float* partial_lse;
  const float* sinks;  // natural; null: none
  int sinks_of_rows;   // 1: of each head of each row; 0: of each head
  const WorkItem* items;
  const int* worker_begin;   // narrow kernel: team w owns items worker_begin[w] : worker_begin[w + 1]
  const int* kv_indices;     // page ids; null: page id = its index
  const int* order;          // plan row -> row of q, o, lse
  const int* positions;      // per plan row
  // Strides in rows of kHeadDim stored elements: 32 bits reach any pool that fits a device.
  uint32 layer_rows;
  uint32 page_rows;
  uint32 token_rows;
  uint32 head_rows;
  int page_size;
  int num_workers;     // narrow kernel: teams per kv head
  int num_kv_heads;
  int group_size;
  float scale;         // sm_scale * k_scale, natural
  float scale2;        // the same times log2(e)
  float headroom;      // kFp16Top in units of the scores that weights are of; 0 where these are bf16
  float soft_cap;      // 0: none
  float v_scale;
  int window_left;     // meaningful where an item asks for kHideWindow
  int alone;           // narrow kernel: nothing runs beside it, what comes next waits for its end
  int team;            // narrow kernel: warps that share an item; divides the block's
};
