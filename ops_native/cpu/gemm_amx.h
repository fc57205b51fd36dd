// Matrix products in AMX tiles (Sapphire Rapids and later): 16 x 16 results of 32 products each in 16 cycles, 8 times
// the float32 FMA rate, on pairs of bfloat16 with float32 accumulation.
//
// Products of bfloat16 are exact in float32, so wider values are served as sums of bfloat16 planes, cut off from the
// top: float16 is exactly two (11 bits = 8 + 3), float32 three (8 + 8 + 8). Products of planes i and j with i + j > 2
// are rounding errors of float32 and left out: 1 tile product for bfloat16, 4 for float16, 6 for float32.
//
// Weights are the left operand: 16 rows as they lie in memory, so that bfloat16 weights stream through without a copy.
// Activations are the right one, packed once: [inner / 32][plane][columns / 16] tiles of [16 pairs][16 columns][2].
// Magnitudes below 2^-126 count as zero; no float16 is that small.
#pragma once
#include "amx.h"

namespace OPSHIM_ISA {

template <class T> constexpr int kWeightPlanes = 3;
template <> constexpr int kWeightPlanes<f16> = 2;
template <> constexpr int kWeightPlanes<bf16> = 1;
constexpr int kTileBytes = 1024, kTileInner = 32, kTile = 16;

// Up to 32 columns of activations, in the form that a product wants.
struct Panel {
  char* data;
  int64_t inner;
  int columns;
  int planes;  // of bfloat16, for AMX; 0: rows of float32, for FMA

  int tiles() const { return (columns + kTile - 1) / kTile; }
  int64_t block_bytes() const { return int64_t(planes) * tiles() * kTileBytes; }  // of 32 inner values
  int64_t bytes() const {
    if (planes) return (inner + kTileInner - 1) / kTileInner * block_bytes();
    return (inner * columns * int64_t(sizeof(float)) + 63) / 64 * 64;
  }
};

#ifdef OPSHIM_AMX

// The uppermost plane of two vectors, in pairs; what remains stays in the vectors.
inline vu cut_plane(vf& a, vf& b) {
  const vu high = bits<vu>(a) & 0xffff0000u, low = bits<vu>(b) & 0xffff0000u;
  a -= bits<vf>(high);
  b -= bits<vf>(low);
  return (high >> 16) | low;
}

// The last plane: rounded to nearest even, for values that the planes do not hold exactly.
inline vu round_plane(vf a, vf b) {
  const vu low = bits<vu>(a), high = bits<vu>(b);
  return (low + 0x7fffu + ((low >> 16) & 1u)) >> 16 | ((high + 0x7fffu + ((high >> 16) & 1u)) & 0xffff0000u);
}

// The inner indices that share pair p of a tile: neighbours for bfloat16, whose weights are not converted; else 16
// apart, which spares the conversion a shuffle. Weights and activations only have to agree.
template <class T> constexpr bool kNeighbours = kWeightPlanes<T> == 1;
template <class T> constexpr int first_of_pair(int p) { return kNeighbours<T> ? 2 * p : p; }
template <class T> constexpr int second_of_pair(int p) { return kNeighbours<T> ? 2 * p + 1 : p + kTile; }

inline uint32_t* tile_of(const Panel& x, int column, int64_t k) {  // the column's first pair, in the first plane
  return (uint32_t*)(x.data + k / kTileInner * x.block_bytes() + column / kTile * kTileBytes) + column % kTile;
}

// Stores 32 values of one column, from inner index k on (a multiple of 32).
template <class T>
inline void put_values(const Panel& x, int column, int64_t k, const float* values) {
  vf a = load(values), b = load(values + W);
  if (kNeighbours<T>) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const __m512 low = bits<__m512>(a), high = bits<__m512>(b);
    a = bits<vf>(_mm512_permutex2var_ps(low, even, high));
    b = bits<vf>(_mm512_permutex2var_ps(low, odd, high));
  }
  const __m512i rows = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                          _mm512_set1_epi32(kTile));
  uint32_t* tile = tile_of(x, column, k);
  for (int i = 0; i < x.planes; ++i, tile += x.tiles() * kTileBytes / 4) {
    const vu pairs = i + 1 < x.planes ? cut_plane(a, b) : round_plane(a, b);
    _mm512_i32scatter_epi32(tile, rows, bits<__m512i>(pairs), 4);
  }
}

// Stores a block c[rows][32] of results as inner values k to k + 31 of every column; rows that are not there are zero.
template <class T>
inline void put_rows(const Panel& x, int64_t k, int rows, const float* c) {
  for (int t = 0; t < x.tiles(); ++t)
    for (int p = 0; p < kTile; ++p) {
      const int first = first_of_pair<T>(p), second = second_of_pair<T>(p);
      vf a = first < rows ? load(c + first * 2 * kTile + t * kTile) : vf{};
      vf b = second < rows ? load(c + second * 2 * kTile + t * kTile) : vf{};
      uint32_t* tile = tile_of(x, t * kTile, k) + p * kTile;
      for (int i = 0; i < x.planes; ++i, tile += x.tiles() * kTileBytes / 4)
        *(vu*)tile = i + 1 < x.planes ? cut_plane(a, b) : round_plane(a, b);
    }
}

// The value at inner index k of a column: the sum of its planes.
template <class T>
inline float get_value(const Panel& x, int column, int64_t k) {
  const int at = int(k % kTileInner), pair = kNeighbours<T> ? at / 2 : at % kTile;
  const bool second = kNeighbours<T> ? at % 2 : at >= kTile;
  const uint32_t* tile = tile_of(x, column, k) + pair * kTile;
  float value = 0;
  for (int i = 0; i < x.planes && std::isfinite(value); ++i, tile += x.tiles() * kTileBytes / 4)
    value += bits<float>(second ? *tile & 0xffff0000u : *tile << 16);
  return value;
}

// 32 rows by 32 inner values of weights, in planes.
template <class T>
struct alignas(64) Staged {
  uint32_t plane[kWeightPlanes<T>][2 * kTile][kTile];
};

// Rows and values that are not there become zero.
template <class T>
inline void stage(const T* w, int64_t stride, int rows, int inner, Staged<T>& staged) {
  auto& planes = staged.plane;
  for (int r = 0; r < rows; ++r, w += stride) {
    if (kWeightPlanes<T> == 1) {
      std::memset(planes[0][r], 0, sizeof planes[0][r]);
      std::memcpy(planes[0][r], w, inner * sizeof(T));
      continue;
    }
    vf a = inner >= W ? load(w) : load(w, inner);
    vf b = inner >= 2 * W ? load(w + W) : inner > W ? load(w + W, inner - W) : vf{};
    for (int i = 0; i < kWeightPlanes<T>; ++i) {
      const vu plane = cut_plane(a, b);
      std::memcpy(planes[i][r], &plane, sizeof plane);
    }
  }
  for (int i = 0; i < kWeightPlanes<T>; ++i)
    std::memset(planes[i][rows], 0, (2 * kTile - rows) * sizeof planes[i][0]);
}

// c[32][32] = 32 rows of weights times Tiles tiles of packed columns, from tile `first` on. `ready`: staged weights.
// float32 sums what its lower planes contribute apart from the rest, where it would add rounding errors of the whole.
template <class T, int Tiles>
void tile_product(const T* w, int64_t stride, int rows, const Panel& panel, int first, const Staged<T>* ready,
                  float* c) {
  constexpr bool apart = kWeightPlanes<T> == 3;
  static_assert(Tiles == 1 || !apart, "tiles 1 and 3 hold either more columns or the lower planes");
  const char* x = panel.data + first * kTileBytes;
  Staged<T> own;
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int64_t k = 0; k < panel.inner; k += kTileInner, x += panel.block_bytes()) {
    const int here = panel.inner - k < kTileInner ? int(panel.inner - k) : kTileInner;
    const bool direct = kNeighbours<T> && rows == 2 * kTile && here == kTileInner;
    if (!direct && !ready) stage(w + k, stride, rows, here, own);
    const Staged<T>& staged = ready ? *ready++ : own;
    for (int i = 0; i < kWeightPlanes<T>; ++i) {
      const char* a = direct ? (const char*)(w + k) : (const char*)staged.plane[i];
      const int64_t row_bytes = direct ? stride * int64_t(sizeof(T)) : kTile * 4;
      TILE_LOAD(4, a, row_bytes);
      TILE_LOAD(5, a + kTile * row_bytes, row_bytes);
      for (int j = 0; j < panel.planes && i + j <= 2; ++j) {
        const char* b = x + j * panel.tiles() * kTileBytes;
        TILE_LOAD(6, b, 64);
        if (apart && i + j) {
          TILE_DOT(1, 4, 6);
          TILE_DOT(3, 5, 6);
          continue;
        }
        TILE_DOT(0, 4, 6);
        TILE_DOT(2, 5, 6);
        if (Tiles == 2) {
          TILE_LOAD(7, b + kTileBytes, 64);
          TILE_DOT(1, 4, 7);
          TILE_DOT(3, 5, 7);
        }
      }
    }
  }
  constexpr int row = 2 * kTile * sizeof(float), half = 2 * kTile * kTile;
  TILE_STORE(0, c, row);
  TILE_STORE(2, c + half, row);
  if (Tiles == 2) {
    TILE_STORE(1, c + kTile, row);
    TILE_STORE(3, c + half + kTile, row);
  } else if (apart) {
    alignas(64) float lower[2 * kTile][kTile];
    TILE_STORE(1, lower[0], 64);
    TILE_STORE(3, lower[kTile], 64);
    for (int r = 0; r < rows; ++r) store(c + r * 2 * kTile, load(c + r * 2 * kTile) + load(lower[r]));
  }
}

// c[32][32] = 32 rows of weights times a panel.
template <class T>
void amx_product(const T* w, int64_t stride, int rows, const Panel& x, const Staged<T>* ready, float* c) {
  if constexpr (kWeightPlanes<T> == 3) {
    for (int t = 0; t < x.tiles(); ++t) tile_product<T, 1>(w, stride, rows, x, t, ready, c + t * kTile);
  } else {
    const auto product = x.tiles() == 1 ? tile_product<T, 1> : tile_product<T, 2>;
    product(w, stride, rows, x, 0, ready, c);
  }
}

#endif

}  // namespace OPSHIM_ISA
