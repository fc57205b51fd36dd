// matmul_fp16: a linear layer on float16, accumulated in float32.
//
// Idea: gemm.h. Every block of 32 rows of weights is one task and meets all panels of activations while it is in the
// cache, so weights are read from memory once. Floor: N*K*2 bytes of weights for few rows of a, for many M*N*K FMAs.
#include "gemm.h"

using namespace OPSHIM_ISA;

extern "C" int OPSHIM(matmul_fp16)(const void* a_, const void* b_, const void* bias_, void* y_, int64_t m, int64_t n,
                                   int64_t inner, int64_t a_stride, int64_t b_stride, int64_t threads) {
  using T = f16;
  const T *a = (const T*)a_, *b = (const T*)b_, *bias = (const T*)bias_;
  T* y = (T*)y_;
  const int64_t panels = (m + kColumns - 1) / kColumns, blocks = (n + kRows - 1) / kRows;
  const auto panel_of = [&](int64_t p) {
    return make_panel<T>(int(m - p * kColumns < kColumns ? m - p * kColumns : kColumns), inner, true);
  };
  const int64_t panel_bytes = panels ? panel_of(0).bytes() : 0;
  char* packed = scratch<struct Packed, char>(panels * panel_bytes);
  if (!packed) return kNoMemory;

  parallel_for(panels, threads, [&](int64_t p) {
    Panel x = panel_of(p);
    x.data = packed + p * panel_bytes;
    clear(x);
    for (int j = 0; j < x.columns; ++j) put_column(x, j, a + (p * kColumns + j) * a_stride);
  });
  parallel_for(blocks, threads, [&](int64_t block) {
    const TileScope tiles;
    const int64_t first = block * kRows;
    const int rows = int(n - first < kRows ? n - first : kRows);
    float c[kRows * kColumns], row[kRows], add[kRows] = {};
    for (int i = 0; bias && i < rows; ++i) add[i] = to_f32(bias[first + i]);
    Weights<T> w{b + first * b_stride, b_stride, rows};
    if (panels > 1) w.prepare(inner);
    for (int64_t p = 0; p < panels; ++p) {
      Panel x = panel_of(p);
      x.data = packed + p * panel_bytes;
      multiply(w, x, c);
      for (int j = 0; j < x.columns; ++j) {
        take_column(c, rows, j, 1, row);
        T* out = y + (p * kColumns + j) * n + first;
        for (int i = 0; i < rows; i += W) {
          const vf v = load(row + i) + load(add + i);
          rows - i >= W ? store(out + i, v) : store(out + i, v, rows - i);
        }
      }
    }
  });
  return kOk;
}
