// The products of attention in float32, from FMA: for every machine and dtype.
//
// One register-blocked kernel does both: 12 rows by 2 vectors on AVX-512, 6 by 2 elsewhere. Each element is a sum of
// short sums (one long chain would round worse), in ascending order whatever the blocking. Keys are transposed as they
// come out of their pages.
#pragma once
#include "attention_tile.h"

namespace OPSHIM_ISA {
namespace {

constexpr int kBlock = W == 16 ? 12 : 6;  // rows that the product works on at once: what the registers hold
constexpr int64_t kChain = 32;            // products that a score adds up in one go; a weighted value: a tile's 64

// ---- c[rows,columns] (+)= a[rows,depth] b[depth,columns], columns in panels -----------------------------------------
template <int R, int kStride>
void product_block(const float* a, const float* b, int64_t b_stride, float* c, int64_t c_stride, int64_t depth,
                   bool add) {
  vf sum[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = vf{};
  for (int64_t k = 0; k < depth; ++k) {
    const vf b0 = load(b + k * b_stride), b1 = load(b + k * b_stride + W);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const float x = a[r * kStride + k];
      sum[r][0] += x * b0;
      sum[r][1] += x * b1;
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r, c += c_stride) {
    store(c, add ? load(c) + sum[r][0] : sum[r][0]);
    store(c + W, add ? load(c + W) + sum[r][1] : sum[r][1]);
  }
}

template <int R, int kStride, class... Rest>
void product_rows(int64_t rows, const float* a, Rest... rest) {
  if (rows == R) return product_block<R, kStride>(a, rest...);
  if constexpr (R > 1) product_rows<R - 1, kStride>(rows, a, rest...);
}

// kStride: row stride of a, a constant so that one register addresses all rows of a block
template <int kStride, int64_t kDepth>
void product(int64_t rows, int64_t columns, int64_t depth, const float* a, const float* b, int64_t b_stride,
             int64_t b_panel, float* c, int64_t c_stride, bool add) {
  const int64_t blocks = (rows + kBlock - 1) / kBlock;
  for (int64_t p = 0; p * kPanel < columns; ++p)
    for (int64_t k = 0; k < depth; k += kDepth)
      for (int64_t i = 0; i < blocks; ++i) {
        const int64_t r = rows * i / blocks, end = rows * (i + 1) / blocks;
        product_rows<kBlock, kStride>(end - r, a + r * kStride + k, b + p * b_panel + k * b_stride, b_stride,
                                      c + r * c_stride + p * kPanel, c_stride, least(kDepth, depth - k), add || k > 0);
      }
}

// ---- tiles out of pages ---------------------------------------------------------------------------------------------
// Queries are tile.queries[row][kMaxSize], keys tile.keys[panel][dimension][lane], values tile.values[key][width].
template <class T>
struct FmaEngine {
  const Problem<T>& p;
  Tile& tile;
  const int64_t rows, depth;

  FmaEngine(const Problem<T>& problem, const Queries<T>& queries, Tile& tile)
      : p(problem), tile(tile), rows(queries.count * p.group()), depth(round_up(p.size, W)) {
    for (int64_t r = 0; r < rows; ++r) {
      const T* from = queries.row(p, r);
      for (int64_t d = 0; d < p.size; d += W) store(tile.queries + r * kMaxSize + d, load_part(from + d, p.size - d));
    }
  }

  // tile.scores = Q K^T for the tile's keys; 0 for columns that are none
  void scores(const Span& span, int64_t columns) {
    for (int64_t c = 0; c < columns; c += W) {
      const T* token[W];
      for (int i = 0; i < W; ++i) {
        const int64_t t = span.start + c + i;
        token[i] = t >= span.low && t < span.high ? span.token(p, p.keys, t) : nullptr;
      }
      float* to = tile.keys + c / kPanel * depth * kPanel + c % kPanel;
      for (int64_t d = 0; d < depth; d += W) {
        vf v[W];
        for (int i = 0; i < W; ++i) v[i] = token[i] ? load_part(token[i] + d, p.size - d) : vf{};
        transpose(v);
        for (int i = 0; i < W; ++i) store(to + (d + i) * kPanel, v[i]);
      }
    }
    product<kMaxSize, kChain>(rows, columns, p.size, tile.queries, tile.keys, kPanel, depth * kPanel, tile.scores,
                              kKeys, false);
  }

  // Values into tile.values, 0 where there are none; those that are not finite are left out, and returned as bits.
  uint64_t take_values(const Span& span) {
    uint64_t odd = 0;
    std::memset(tile.values, 0, (span.low - span.start) * tile.width * sizeof(float));
    for (int64_t t = span.low; t < span.high; ++t) {
      const T* from = span.token(p, p.values, t);
      float* to = tile.values + (t - span.start) * tile.width;
      for (int64_t d = 0; d < tile.width; d += W) store(to + d, d < p.size ? load_part(from + d, p.size - d) : vf{});
      if (finite(to, tile.width)) continue;
      std::memset(to, 0, tile.width * sizeof(float));
      odd |= uint64_t(1) << (t - span.start);
    }
    return odd;
  }

  // tile.out += P V
  void add_values(int64_t keys) {
    product<kKeys, kKeys>(rows, p.size, keys, tile.scores, tile.values, tile.width, kPanel, tile.out, tile.width,
                          true);
  }
};

}  // namespace
}  // namespace OPSHIM_ISA
