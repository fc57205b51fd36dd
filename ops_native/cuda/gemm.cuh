// Products of rows with the weights of their experts: what the variants share. For each row of a tile of one expert,
//
//     out[row][n] = scale * sum_k x[row][k] w[expert][n][k] + bias[n]           or, as SwiGLU's first half,
//     out[row][n] = silu(scale * x w_n) * (scale * x u_n)                       u: the `up` half, w: the gate
//
// Weights are the rows of the matrix units' tiles and tokens the columns, since there are few tokens: columns come in
// eights. For SwiGLU a tile holds gate and up in turns of eight rows, so that both meet in the thread that
// has row r and row r + 8 of a fragment.
//
//     gemm_stream.cuh   up to 16 tokens per tile: weights go from memory to registers, as fast as memory gives them
//     gemm_tile.cuh     more tokens: tiles in shared memory, mma.sync
//     gemm_hopper.cuh   the same for sm_90a: wgmma
//     gemm_plain.cuh    float32, and whatever the others cannot load 16 bytes at a time
#pragma once
#include "gemm_mma.cuh"

namespace {

struct Tile {  // tokens at positions first ... first + count - 1, all of one expert (negative: a tile to skip)
  int32_t expert, first, count;
  int32_t lead, siblings;  // tiles lead ... lead + siblings - 1 share weights, and are worked at together
  int32_t unused[3];
};

enum class Source {
  kTable,   // `tiles`, of which there are *tile_count
  kBlocks,  // moe_align_block_size's blocks: an expert of `experts` for each `block_size` of the *entries positions
  kSlots,   // every slot is a tile; its expert is in `experts`, by way of `map`
  kRows,    // `positions` rows and one matrix
};

struct Gemm {
  const void* x;
  const void* w;
  const void* up;
  void* out;
  const void* bias;            // null: 0
  const float* scale;          // of slots; null: 1
  const int32_t* slots;        // of positions; null: a position is its own slot
  const Tile* tiles;
  const int32_t* tile_count;
  const int32_t* experts;
  const int32_t* map;
  const int32_t* entries;
  int32_t* counter;            // 0 before the kernel starts; null: blocks take every gridDim.x-th item
  int64_t x_stride, out_stride;       // of rows
  int64_t w_stride, up_stride;        // of experts
  int64_t row_stride;                 // of rows within an expert
  int32_t positions;                  // of kBlocks and kRows: how many there may be
  int32_t slot_count;                 // other slots are filling
  int32_t n, k;                       // n: for SwiGLU the columns of out
  int32_t top_k;                      // slots of a row of x, where `by_slot_in`
  int32_t expert_count, map_size, block_size;
  Source source;
  bool by_slot_in, by_slot_out;       // rows of x, rows of out: numbered by slot (in: / top_k), or else by position
  bool early;                         // only `x` and `scale` are of the kernel before this one
  bool up_first;                      // gemm_boxes.cuh: gate and up have changed places
};

// An expert's number here: -1 for none.
__device__ __forceinline__ int local_expert(int id, const int32_t* map, int map_size, int expert_count) {
  if (id < 0) return -1;
  if (map) id = id < map_size ? map[id] : -1;
  return id < expert_count ? id : -1;
}

__device__ __forceinline__ int count_tiles(const Gemm& g, int width) {
  switch (g.source) {
    case Source::kTable: return *g.tile_count;
    case Source::kBlocks: {
      const int used = min(*g.entries, g.positions);
      return used <= 0 ? 0 : ceil_div(used, g.block_size) * ceil_div(g.block_size, width);
    }
    case Source::kSlots: return g.slot_count;
    case Source::kRows: return ceil_div(g.positions, width);
  }
  return 0;
}

__device__ __forceinline__ Tile tile_at(const Gemm& g, int index, int width) {
  switch (g.source) {
    case Source::kTable: return g.tiles[index];
    case Source::kBlocks: {
      const int parts = ceil_div(g.block_size, width), block = index / parts, part = index % parts;
      const int first = block * g.block_size + part * width, end = min(*g.entries, g.positions);
      const int expert = g.experts[block];
      return {expert < g.expert_count ? expert : -1, first, min(min(g.block_size - part * width, width), end - first)};
    }
    case Source::kSlots: return {local_expert(g.experts[index], g.map, g.map_size, g.expert_count), index, 1};
    case Source::kRows: return {0, index * width, min(width, g.positions - index * width)};
  }
  return {-1};
}

// Work comes as (tile, block of weight rows). Blocks of siblings alternate, so that the second reads its weights from
// the L2 cache; where no table knows siblings, neighbours are taken for them.
struct Work {
  Tile tile;
  int block;
};
constexpr int kNeighbours = 8;

// tile: the (item / blocks)-th of the table, if there is one.
__device__ __forceinline__ Work work_at(const Gemm& g, int item, const Tile& tile, int tiles, int blocks, int width) {
  const int index = item / blocks;
  int lead = index - index % kNeighbours, siblings = min(tiles - lead, kNeighbours);
  if (g.source == Source::kTable) {
    if (tile.siblings == 1) return {tile, item - index * blocks};
    lead = tile.lead;
    siblings = tile.siblings;
  }
  const int local = item - lead * blocks;
  return {tile_at(g, lead + local % siblings, width), local / siblings};
}
__device__ __forceinline__ Work work_at(const Gemm& g, int item, int tiles, int blocks, int width) {
  return work_at(g, item, g.source == Source::kTable ? g.tiles[item / blocks] : Tile{}, tiles, blocks, width);
}

// The slot at a tile's position, -1 for filling.
__device__ __forceinline__ int slot_at(const Gemm& g, const Tile& tile, int i) {
  if (i >= tile.count) return -1;
  const int slot = g.slots ? g.slots[tile.first + i] : tile.first + i;
  return slot < g.slot_count ? slot : -1;
}

// Where a tile's i-th row of x begins, null for filling.
template <class T> __device__ __forceinline__ const T* row_of_x(const Gemm& g, const Tile& tile, int i) {
  const int slot = slot_at(g, tile, i);
  if (slot < 0) return nullptr;
  const int row = g.by_slot_in ? slot / g.top_k : tile.first + i;
  return (const T*)g.x + row * g.x_stride;
}

// Where a row of the matrix units' tile begins, null beyond the last. Pairs: gate and up by turns of eight rows.
template <class T, bool kPairs> __device__ __forceinline__ const T* row_of_w(const Gemm& g, int expert, int64_t row) {
  const int64_t n = kPairs ? row / 16 * 8 + row % 8 : row;
  if (n >= g.n) return nullptr;
  if (kPairs && row % 16 >= 8) return (const T*)g.up + expert * g.up_stride + n * g.row_stride;
  return (const T*)g.w + expert * g.w_stride + n * g.row_stride;
}
template <bool kPairs> __host__ __device__ int64_t rows_in_all(const Gemm& g) {
  return kPairs ? ceil_div<int64_t>(g.n, 8) * 16 : g.n;
}
template <bool kPairs> __device__ __forceinline__ int row_blocks(const Gemm& g, int rows) {  // of 32 bits: quicker
  return int(ceil_div(unsigned(rows_in_all<kPairs>(g)), unsigned(rows)));
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// What becomes of a sum, or of two.
template <class T> __device__ __forceinline__ float finish(const Gemm& g, float sum, float scale, int64_t n) {
  return sum * scale + (g.bias ? to_f32(((const T*)g.bias)[n]) : 0.0f);
}
__device__ __forceinline__ float finish_pair(float gate, float up, float scale) {
  return silu(gate * scale) * (up * scale);
}
__device__ __forceinline__ float exact_pair(float gate, float up, float scale) {
  return gate * scale / (1.0f + expf(-gate * scale)) * (up * scale);
}

// Where in out the result of a tile's i-th token goes (-1: nowhere), and its scale.
struct Note {
  int64_t place;
  float scale;
};
__device__ __forceinline__ Note note_of(const Gemm& g, const Tile& tile, int i) {
  const int slot = tile.expert < 0 ? -1 : slot_at(g, tile, i);
  return {slot < 0 ? -1 : g.by_slot_out ? slot : tile.first + i, slot >= 0 && g.scale ? g.scale[slot] : 1.0f};
}
__device__ __forceinline__ void note_token(const Gemm& g, const Tile& tile, int i, int64_t* places, float* scales) {
  const Note note = note_of(g, tile, i);
  places[i] = note.place;
  scales[i] = note.scale;
}

// Stores a block's sums [token][row of the tile], which lie in shared memory, eight columns of out per thread and turn.
template <class T, class Out, bool kPairs>
__device__ __forceinline__ void store_sums(const Gemm& g, const float* sums, int pitch, int columns, int count,
                                           int64_t first_column, const int64_t* places, const float* scales,
                                           bool wide) {
  constexpr int kAtOnce = 16 / sizeof(Out);
  for (int i = threadIdx.x; i < count * (columns / 8); i += blockDim.x) {
    const int token = i / (columns / 8), column = i % (columns / 8) * 8;
    const int64_t n = first_column + column, place = places[token];
    if (n >= g.n || place < 0) continue;
    const float* from = sums + token * pitch + (kPairs ? 2 * column : column);
    const float scale = scales[token];
    Out* to = (Out*)g.out + place * g.out_stride + n;
    const int here = int(min(int64_t(8), g.n - n));
    Pack<Out, kAtOnce> result[8 / kAtOnce];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j >= here) break;
      const float value = kPairs ? finish_pair(from[j], from[j + 8], scale) : finish<T>(g, from[j], scale, n + j);
      result[j / kAtOnce].at[j % kAtOnce] = from_f32<Out>(value);
    }
    if (wide && here == 8) {
#pragma unroll
      for (int j = 0; j < 8 / kAtOnce; ++j) ((Pack<Out, kAtOnce>*)to)[j] = result[j];
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (j < here) to[j] = result[j / kAtOnce].at[j % kAtOnce];
    }
  }
}

}  // namespace
