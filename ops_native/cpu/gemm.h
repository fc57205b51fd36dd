// The matrix product that linear layers and experts share: c = weights [rows, inner] x panel [inner, columns].
//
// A panel is up to 32 tokens' activations in the form that the product wants, packed once and used by every row of
// weights; weights [N, inner] are read where they lie, in blocks of 32 rows, once per panel. Few columns are bound by
// the weights' traffic: float32 FMA on weights converted in registers keeps up with memory. Many are bound by
// arithmetic: AMX where there is any (gemm_amx.h), else the same FMA in blocks of 4 rows by 4 columns.
// A column's result depends on nothing but that column, and on whether its panel has few columns or many.
#pragma once
#include "gemm_amx.h"
#include "opshim.h"

namespace OPSHIM_ISA {

constexpr int kRows = 32, kColumns = 32;  // of a block of results, float[kRows][kColumns]
constexpr int kFewColumns = 4;  // up to here FMA is as fast as AMX

// exact: the columns are values of T as they are, not results in float32.
template <class T>
inline Panel make_panel(int columns, int64_t inner, bool exact) {
  const bool amx = have_amx() && columns > kFewColumns;
  const int planes = exact || kWeightPlanes<T> == 3 ? kWeightPlanes<T> : 2;
  return {nullptr, inner, columns, amx ? planes : 0};
}

// Before packing: columns that fill up the last tile count as zero.
inline void clear(const Panel& x) {
  if (x.planes && x.columns % kTile) std::memset(x.data, 0, x.bytes());
}

// out[rows] = column j of a block of results, times `scale`.
inline void take_column(const float* c, int rows, int j, float scale, float* out) {
  for (int i = 0; i < rows; ++i) out[i] = c[i * kColumns + j] * scale;
}

// Packs one column of `inner` values of T, each times `scale`.
template <class T>
inline void put_column(const Panel& x, int column, const T* from, float scale = 1) {
  for (int64_t k = 0; k < x.inner; k += kTileInner) {
    const int here = x.inner - k < kTileInner ? int(x.inner - k) : kTileInner;
    float values[kTileInner] = {};
    for (int i = 0; i < here; i += W) {
      const vf v = here - i >= W ? load(from + k + i) : load(from + k + i, here - i);
      store(values + i, v * scale);
    }
#if defined(OPSHIM_AMX)
    if (x.planes) {
      put_values<T>(x, column, k, values);
      continue;
    }
#endif
    std::memcpy((float*)x.data + column * x.inner + k, values, here * sizeof(float));
  }
}

// Packs a block of results: its rows become inner values k to k + rows - 1 (k a multiple of 32) of every column.
template <class T>
inline void put_block(const Panel& x, int64_t k, int rows, const float* c) {
#if defined(OPSHIM_AMX)
  if (x.planes) return put_rows<T>(x, k, rows, c);
#endif
  for (int j = 0; j < x.columns; ++j) take_column(c, rows, j, 1, (float*)x.data + j * x.inner + k);
}

inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return bits<vf>(_mm512_fmadd_ps(bits<__m512>(a), bits<__m512>(b), bits<__m512>(c)));
#elif defined(__FMA__)
  return bits<vf>(_mm256_fmadd_ps(bits<__m256>(a), bits<__m256>(b), bits<__m256>(c)));
#else
  return a * b + c;
#endif
}

// c[Rows][Columns] = dot products of rows of weights and rows of float32.
template <class T, int Rows, int Columns>
inline void fma_dots(const T* w, int64_t stride, const float* x, int64_t inner, float* c) {
  vf acc[Rows][Columns] = {};
  const auto step = [&](auto&& load_w, auto&& load_x) __attribute__((always_inline)) {
    vf xs[Columns];
#pragma GCC unroll 8
    for (int j = 0; j < Columns; ++j) xs[j] = load_x(x + j * inner);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      const vf ws = load_w(w + i * stride);
#pragma GCC unroll 8
      for (int j = 0; j < Columns; ++j) acc[i][j] = fma(ws, xs[j], acc[i][j]);
    }
  };
  int64_t k = 0;
  for (; k + W <= inner; k += W) {
    const auto whole = [&](auto* p) __attribute__((always_inline)) { return load(p + k); };
    step(whole, whole);
  }
  if (k < inner) {
    const auto part = [&](auto* p) __attribute__((always_inline)) { return load(p + k, int(inner - k)); };
    step(part, part);
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < Columns; ++j) c[i * kColumns + j] = sum(acc[i][j]);
}

template <class T, int Columns>
inline void fma_rows(const T* w, int64_t stride, int rows, const float* x, int64_t inner, float* c) {
  constexpr int block = Columns == 1 ? 8 : W == 16 ? 4 : 2;  // as many accumulators as there are registers for
  int i = 0;
  for (; i + block <= rows; i += block) fma_dots<T, block, Columns>(w + i * stride, stride, x, inner, c + i * kColumns);
  for (; i < rows; ++i) fma_dots<T, 1, Columns>(w + i * stride, stride, x, inner, c + i * kColumns);
}

template <class T>
void fma_product(const T* w, int64_t stride, int rows, const Panel& panel, float* c) {
  const float* x = (const float*)panel.data;
  const int64_t inner = panel.inner;
  int j = 0;
  for (; j + 4 <= panel.columns; j += 4) fma_rows<T, 4>(w, stride, rows, x + j * inner, inner, c + j);
  switch (panel.columns - j) {
    case 3: return fma_rows<T, 3>(w, stride, rows, x + j * inner, inner, c + j);
    case 2: return fma_rows<T, 2>(w, stride, rows, x + j * inner, inner, c + j);
    case 1: return fma_rows<T, 1>(w, stride, rows, x + j * inner, inner, c + j);
  }
}

#if defined(OPSHIM_AMX)
// Planes of an infinity do not behave as their sum does (inf - inf, inf * 0): an infinite input would show as NaN.
// Results that are not finite are computed again, from whole values.
template <class T>
void repair(const T* w, int64_t stride, int rows, const Panel& x, float* c) {
  vf odd = {};
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < x.tiles() * kTile; j += W) {
      const vf v = load(c + i * kColumns + j);
      odd += v - v;
    }
  if (sum(odd) == 0) return;
  float* column = scratch<struct Repair, float>(x.inner);
  for (int j = 0; column && j < x.columns; ++j) {
    bool finite = true, number = true;
    for (int i = 0; i < rows; ++i) finite &= std::isfinite(c[i * kColumns + j]);
    if (finite) continue;
    for (int64_t k = 0; k < x.inner; ++k) number &= !std::isnan(column[k] = get_value<T>(x, j, k));
    for (int i = 0; number && i < rows; ++i)
      if (!std::isfinite(c[i * kColumns + j]))
        fma_dots<T, 1, 1>(w + i * stride, stride, column, x.inner, c + i * kColumns + j);
  }
}
#endif

// Up to 32 rows of weights [rows, inner], `stride` apart.
template <class T>
struct Weights {
  const T* data;
  int64_t stride;
  int rows;
  const void* ready = nullptr;  // Staged, for AMX

  // Converts the weights once for several panels. Costs a copy in the cache, so not for one.
  void prepare(int64_t inner) {
#if defined(OPSHIM_AMX)
    if (!have_amx() || kWeightPlanes<T> == 1) return;
    Staged<T>* staged = scratch<struct Prepared, Staged<T>>((inner + kTileInner - 1) / kTileInner);
    for (int64_t k = 0; staged && k < inner; k += kTileInner)
      stage(data + k, stride, rows, inner - k < kTileInner ? int(inner - k) : kTileInner, staged[k / kTileInner]);
    ready = staged;
#else
    (void)inner;
#endif
  }
};

// c = weights times a panel. The thread holds a TileScope.
template <class T>
inline void multiply(const Weights<T>& w, const Panel& x, float* c) {
  if (!x.planes) return fma_product(w.data, w.stride, w.rows, x, c);
#if defined(OPSHIM_AMX)
  amx_product(w.data, w.stride, w.rows, x, (const Staged<T>*)w.ready, c);
  if (kWeightPlanes<T> > 1 || x.planes > 1) repair(w.data, w.stride, w.rows, x, c);
#endif
}

}  // namespace OPSHIM_ISA
