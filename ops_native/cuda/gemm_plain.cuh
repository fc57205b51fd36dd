// Float32, and half precision at any alignment: 64 weight rows by 64 tokens, 16 of k at a time, multiplied and added in
// float32 by four rows and four tokens per thread. For SwiGLU a thread's rows are two of the gate and two of up.
#pragma once
#include "gemm.cuh"

namespace {

constexpr int kPlainRows = 64, kPlainTokens = 64, kPlainK = 16, kPlainPitch = 64 + 4;
constexpr int kPlainRun = 8;  // times kPlainK

// X: the type of x's elements, T: of the weights'.
template <class X, class T, class Out, bool kPairs> __global__ void __launch_bounds__(256) plain_kernel(const Gemm g) {
  __shared__ float w[kPlainK][kPlainPitch], x[kPlainK][kPlainPitch];
  constexpr int kColumns = kPairs ? kPlainRows / 2 : kPlainRows;
  const int copied = threadIdx.x / 4, copied_k = threadIdx.x % 4 * 4;  // this thread's row and the first of its k
  // four rows in two neighbouring pairs, 8 apart; tokens 16 apart
  const int row = threadIdx.x % 16 / 4 * 16 + threadIdx.x % 4 * 2, token = threadIdx.x / 16;

  start_early();
  const int tiles = count_tiles(g, kPlainTokens), blocks = row_blocks<kPairs>(g, kPlainRows);
  for (int item = blockIdx.x; item < tiles * blocks; item += gridDim.x) {
    const Work work = work_at(g, item, tiles, blocks, kPlainTokens);
    const Tile& tile = work.tile;
    if (tile.expert < 0) continue;
    const T* from_w = row_of_w<T, kPairs>(g, tile.expert, int64_t(work.block) * kPlainRows + copied);
    const X* from_x = row_of_x<X>(g, tile, copied);

    float sum[4][4] = {}, part[4][4] = {};  // [row][token]; part: of a run of k, since short sums round less
    for (int first = 0; first < g.k; first += kPlainK) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int k = first + copied_k + i;
        w[copied_k + i][copied] = from_w && k < g.k ? to_f32(from_w[k]) : 0.0f;
        x[copied_k + i][copied] = from_x && k < g.k ? to_f32(from_x[k]) : 0.0f;
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kPlainK; ++k) {
        float a[4], b[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a[i] = w[k][row + i % 2 + i / 2 * 8];
          b[i] = x[k][token + 16 * i];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) part[i][j] = fmaf(a[i], b[j], part[i][j]);
      }
      if ((first / kPlainK + 1) % kPlainRun == 0 || first + kPlainK >= g.k)
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          sum[i / 4][i % 4] += part[i / 4][i % 4];
          part[i / 4][i % 4] = 0;
        }
      __syncthreads();
    }

#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int slot = slot_at(g, tile, token + 16 * j);
      if (slot < 0) continue;
      const int64_t place = g.by_slot_out ? slot : tile.first + token + 16 * j;
      const float scale = g.scale ? g.scale[slot] : 1.0f;
      Out* to = (Out*)g.out + place * g.out_stride;
#pragma unroll
      for (int i = 0; i < (kPairs ? 2 : 4); ++i) {
        const int column = kPairs ? row / 16 * 8 + row % 8 + i : row + i % 2 + i / 2 * 8;
        const int64_t n = int64_t(work.block) * kColumns + column;
        if (n >= g.n) continue;
        to[n] = from_f32<Out>(kPairs ? exact_pair(sum[i][j], sum[i + 2][j], scale)
                                     : finish<T>(g, sum[i][j], scale, n));
      }
    }
  }
}

template <class X, class T, class Out, bool kPairs> int launch_plain(const Gemm& g, int64_t most_tiles, void* stream) {
  const int64_t items = most_tiles * ceil_div<int64_t>(rows_in_all<kPairs>(g), kPlainRows);
  if (items > INT32_MAX) return kBadArgument;
  const int64_t blocks = min(items, 4 * int64_t(sm_count()));
  return launch_early(plain_kernel<X, T, Out, kPairs>, dim3(unsigned(blocks)), dim3(256), 0, stream, g);
}

}  // namespace
