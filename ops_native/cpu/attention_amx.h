// The products of attention in AMX tiles, for bfloat16: 16 x 16 results of 32 products each in 16 cycles, with float32
// accumulation.
//
// Scores are exact products of bfloat16. Weights are float32: each goes in as the sum of three bfloat16, cut off from
// the top, which together hold all of its 24 bits. Per 16 rows, 16 keys and 32 dimensions that is 4 tile products (64
// cycles) where FMA takes 512.
#pragma once
#include "attention_fma.h"
#include "gemm_amx.h"

namespace OPSHIM_ISA {
namespace {

#ifdef OPSHIM_AMX

constexpr int kPlanes = 3;  // of bfloat16, in a weight

// One side of a product; distances in bytes
struct Operand {
  const char* data;
  int64_t stride;  // from row to row of a tile
  int64_t next;    // from plane to plane (left side), from column tile to column tile (right side)
  int64_t block;   // from 32 inner values to the next
};

// c[16 * kRowTiles,32] (+)= a b over blocks of 32 inner values
template <int kRowTiles, bool kAdd>
inline void tile_block(const Operand& a, int planes, const Operand& b, int64_t blocks, float* c, int64_t c_stride) {
  const int64_t row = c_stride * int64_t(sizeof(float));
  float* below = c + kTile * c_stride;
  if (kAdd) {
    TILE_LOAD(0, c, row);
    TILE_LOAD(1, c + kTile, row);
    if (kRowTiles == 2) {
      TILE_LOAD(2, below, row);
      TILE_LOAD(3, below + kTile, row);
    }
  } else {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
  }
  for (int64_t k = 0; k < blocks; ++k) {
    TILE_LOAD(6, b.data + k * b.block, b.stride);
    TILE_LOAD(7, b.data + k * b.block + b.next, b.stride);
    for (int i = 0; i < planes; ++i) {
      const char* from = a.data + k * a.block + i * a.next;
      TILE_LOAD(4, from, a.stride);
      TILE_DOT(0, 4, 6);
      TILE_DOT(1, 4, 7);
      if (kRowTiles == 2) {
        TILE_LOAD(5, from + kTile * a.stride, a.stride);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
      }
    }
  }
  TILE_STORE(0, c, row);
  TILE_STORE(1, c + kTile, row);
  if (kRowTiles == 2) {
    TILE_STORE(2, below, row);
    TILE_STORE(3, below + kTile, row);
  }
}

// Queries are tile.queries[row][depth] of bfloat16; keys tile.keys[column tile][block][16 pairs][16][2]; values
// tile.values[block of 32 keys][16 pairs][width][2]; weights tile.weights[plane][row][64].
struct AmxEngine {
  const Problem<bf16>& p;
  Tile& tile;
  const int64_t rows, depth;
  const TileScope scope;

  AmxEngine(const Problem<bf16>& problem, const Queries<bf16>& queries, Tile& tile)
      : p(problem), tile(tile), rows(queries.count * p.group()), depth(round_up(p.size, kTileInner)) {
    bf16* to = reinterpret_cast<bf16*>(tile.queries);
    for (int64_t r = 0; r < rows; ++r, to += depth) {
      std::memcpy(to, queries.row(p, r), p.size * sizeof(bf16));
      std::memset(to + p.size, 0, (depth - p.size) * sizeof(bf16));
    }
    std::memset(to, 0, (round_up(rows, kTile) - rows) * depth * sizeof(bf16));
    std::memset(tile.weights, 0, kPlanes * round_up(rows, kTile) * kKeys * sizeof(bf16));
  }

  template <bool kAdd>
  void product(Operand a, int planes, const Operand& b, int64_t blocks, float* c, int64_t c_stride) {
    for (int64_t r = 0; r < rows; r += 2 * kTile, a.data += 2 * kTile * a.stride, c += 2 * kTile * c_stride)
      if (rows - r > kTile)
        tile_block<2, kAdd>(a, planes, b, blocks, c, c_stride);
      else
        tile_block<1, kAdd>(a, planes, b, blocks, c, c_stride);
  }

  void scores(const Span& span, int64_t columns) {
    const int64_t blocks = depth / kTileInner, column_tile = blocks * kTileBytes;
    char* keys = reinterpret_cast<char*>(tile.keys);
    for (int64_t c = 0; c < columns; c += kTile) {
      const bf16* token[kTile];
      for (int i = 0; i < kTile; ++i) {
        const int64_t t = span.start + c + i;
        token[i] = t >= span.low && t < span.high ? span.token(p, p.keys, t) : nullptr;
      }
      float* to = reinterpret_cast<float*>(keys + c / kTile * column_tile);
      for (int64_t d = 0; d < depth; d += kTileInner, to += kTileBytes / 4) {
        vf v[kTile];  // pairs of bfloat16, as if they were float32
        const int64_t here = least(kTileInner, p.size - d);
        for (int i = 0; i < kTile; ++i) {
          v[i] = vf{};
          if (!token[i]) continue;
          if (here == kTileInner)
            v[i] = load(reinterpret_cast<const float*>(token[i] + d));
          else
            std::memcpy(&v[i], token[i] + d, here * sizeof(bf16));
        }
        transpose(v);
        for (int i = 0; i < kTile; ++i) store(to + i * kTile, v[i]);
      }
    }
    const Operand a{reinterpret_cast<const char*>(tile.queries), depth * int64_t(sizeof(bf16)), 0, 64};
    for (int64_t c = 0; c < columns; c += 2 * kTile)
      product<false>(a, 1, {keys + c / kTile * column_tile, 64, column_tile, kTileBytes}, blocks, tile.scores + c,
                     kKeys);
  }

  uint64_t take_values(const Span& span) {
    uint64_t odd = 0;
    for (int64_t t = span.start; t < round_up(span.high, kTileInner); t += 2) {
      const bf16* pair[2];
      for (int i = 0; i < 2; ++i) {
        pair[i] = t + i >= span.low && t + i < span.high ? span.token(p, p.values, t + i) : nullptr;
        if (!pair[i] || finite(pair[i])) continue;
        pair[i] = nullptr;
        odd |= uint64_t(1) << (t + i - span.start);
      }
      uint32_t* to = reinterpret_cast<uint32_t*>(tile.values) + (t - span.start) / 2 * tile.width;
      for (int64_t d = 0; d < tile.width; d += W) {
        const vu low = pair[0] && d < p.size ? bits<vu>(load_part(pair[0] + d, p.size - d)) : vu{};
        const vu high = pair[1] && d < p.size ? bits<vu>(load_part(pair[1] + d, p.size - d)) : vu{};
        *(vu*)(to + d) = low >> 16 | high;
      }
    }
    return odd;
  }

  bool finite(const bf16* value) const {
    vi odd{};
    for (int64_t d = 0; d < p.size; d += W)
      odd |= vi((bits<vi>(load_part(value + d, p.size - d)) & 0x7f800000) == 0x7f800000);
    return _mm512_test_epi32_mask(bits<__m512i>(odd), bits<__m512i>(odd)) == 0;
  }

  void add_values(int64_t keys) {
    const int64_t plane = round_up(rows, kTile) * kKeys;
    bf16* to = reinterpret_cast<bf16*>(tile.weights);
    for (int64_t i = 0; i < rows * kKeys; i += W, to += W) {
      vf rest = load(tile.scores + i);
      for (int j = 0; j < kPlanes; ++j) {
        const vu high = bits<vu>(rest) & 0xffff0000u;
        *(vh*)(to + j * plane) = __builtin_convertvector(high >> 16, vh);
        rest -= bits<vf>(high);
      }
    }
    const Operand a{reinterpret_cast<const char*>(tile.weights), kKeys * int64_t(sizeof(bf16)),
                    plane * int64_t(sizeof(bf16)), 64};
    const int64_t row = tile.width * 4, blocks = (keys + kTileInner - 1) / kTileInner;
    for (int64_t d = 0; d < tile.width; d += 2 * kTile)
      product<true>(a, kPlanes, {reinterpret_cast<const char*>(tile.values + d), row, 64, kTile * row}, blocks,
                    tile.out + d, tile.width);
  }
};

#endif

// Attends with the best engine that there is for the dtype.
template <class T>
void attend_with_best(const Problem<T>& p, const Queries<T>& queries, const int32_t* table, int64_t begin, int64_t end,
                      Tile& tile) {
#ifdef OPSHIM_AMX
  if constexpr (kWeightPlanes<T> == 1)
    if (have_amx()) return attend<AmxEngine>(p, queries, table, begin, end, tile);
#endif
  attend<FmaEngine<T>>(p, queries, table, begin, end, tile);
}

}  // namespace
}  // namespace OPSHIM_ISA
