// More than a few tokens per tile, where gemm_hopper.cuh does not serve: 128 weight rows by 64 tokens, mma.sync on tiles
// in shared memory. Rows of 64 values are 128 bytes, eight pieces of 16; piece p of row r lies at p ^ (r % 8), so that
// ldmatrix's eight rows and the copies' eight pieces both meet all banks. Copies run kTileStages - 1 tiles ahead.
#pragma once
#include "gemm.cuh"

namespace {

constexpr int kTileRows = 128, kTileTokens = 64, kTileK = 64, kTileStages = 3, kRowBytes = kTileK * 2;
constexpr int kTileBytes = kTileStages * (kTileRows + kTileTokens) * kRowBytes;

__device__ __forceinline__ uint32_t piece_at(int row, int piece) { return row * kRowBytes + (piece ^ row % 8) * 16; }

template <class T, class Out, bool kPairs>
__global__ void __launch_bounds__(256, 2) tile_kernel(const Gemm g, const bool wide_out) {
  constexpr int kM = 2, kN = 4;  // fragments of a warp: 32 rows, 32 tokens
  constexpr int kColumns = kPairs ? kTileRows / 2 : kTileRows, kPitch = kTileRows + 4;
  static_assert(kTileTokens * kPitch * sizeof(float) <= kTileBytes, "the sums take the tiles' place");
  extern __shared__ float4 shared_memory[];
  __shared__ float scales[kTileTokens];
  __shared__ int64_t places[kTileTokens];

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int warp_row = warp / 2 * 32, warp_token = warp % 2 * 32;
  const int piece = threadIdx.x % 8, row = threadIdx.x / 8;  // what this thread copies: rows row, row + 32, ...
  const uint32_t shared = shared_address(shared_memory);
  const int steps = ceil_div(g.k, kTileK);

  start_early();
  const int tiles = count_tiles(g, kTileTokens), blocks = row_blocks<kPairs>(g, kTileRows);
  for (int item = blockIdx.x; item < tiles * blocks; item += gridDim.x) {
    const Work work = work_at(g, item, tiles, blocks, kTileTokens);
    const Tile& tile = work.tile;
    if (tile.expert < 0) continue;

    const T* weights[kTileRows / 32];
    const T* tokens[kTileTokens / 32];
#pragma unroll
    for (int i = 0; i < kTileRows / 32; ++i)
      weights[i] = row_of_w<T, kPairs>(g, tile.expert, int64_t(work.block) * kTileRows + row + 32 * i);
#pragma unroll
    for (int i = 0; i < kTileTokens / 32; ++i) tokens[i] = row_of_x<T>(g, tile, row + 32 * i);
    const auto copy = [&](int step) {
      const int k = step * kTileK + piece * 8;
      const uint32_t to = shared + step % kTileStages * (kTileBytes / kTileStages);
      if (step < steps) {
#pragma unroll
        for (int i = 0; i < kTileRows / 32; ++i) {
          const bool real = weights[i] && k < g.k;
          copy_async(to + piece_at(row + 32 * i, piece), real ? weights[i] + k : g.w, real);
        }
#pragma unroll
        for (int i = 0; i < kTileTokens / 32; ++i) {
          const bool real = tokens[i] && k < g.k;
          copy_async(to + piece_at(kTileRows + row + 32 * i, piece), real ? tokens[i] + k : g.x, real);
        }
      }
      commit_copies();
    };

    for (int step = 0; step < kTileStages - 1; ++step) copy(step);
    if (threadIdx.x < kTileTokens) note_token(g, tile, threadIdx.x, places, scales);
    float sum[kM][kN][4] = {};
    for (int step = 0; step < steps; ++step) {
      wait_copies<kTileStages - 2>();
      __syncthreads();
      copy(step + kTileStages - 1);
      const uint32_t from = shared + step % kTileStages * (kTileBytes / kTileStages);
#pragma unroll
      for (int kk = 0; kk < kTileK / 16; ++kk) {
        uint32_t a[kM][4], b[kN / 2][4];
#pragma unroll
        for (int m = 0; m < kM; ++m)
          load_matrices(a[m], from + piece_at(warp_row + 16 * m + lane % 16, 2 * kk + lane / 16));
#pragma unroll
        for (int n = 0; n < kN / 2; ++n)
          load_matrices(b[n], from + piece_at(kTileRows + warp_token + 16 * n + lane / 16 * 8 + lane % 8,
                                              2 * kk + lane / 8 % 2));
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int n = 0; n < kN; ++n)
            mma<T>(sum[m][n], a[m][0], a[m][1], a[m][2], a[m][3], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
      }
    }
    wait_copies<0>();
    __syncthreads();

    float* sums = (float*)shared_memory;  // [kTileTokens][kPitch]
    float* mine = sums + (warp_token + lane % 4 * 2) * kPitch + warp_row + lane / 4;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) mine[(8 * n + i % 2) * kPitch + 16 * m + i / 2 * 8] = sum[m][n][i];
    __syncthreads();
    store_sums<T, Out, kPairs>(g, sums, kPitch, kColumns, tile.count, int64_t(work.block) * kColumns, places, scales,
                               wide_out);
    __syncthreads();
  }
}

template <class T, class Out, bool kPairs> int launch_tile(const Gemm& g, int64_t most_tiles, void* stream) {
  const int64_t items = most_tiles * ceil_div<int64_t>(rows_in_all<kPairs>(g), kTileRows);
  if (items > INT32_MAX) return kBadArgument;
  const int64_t blocks = min(items, 2 * int64_t(sm_count()));
  return launch_early(tile_kernel<T, Out, kPairs>, dim3(unsigned(blocks)), dim3(256), kTileBytes, stream, g,
                      aligned(16, sizeof(Out), g.out, g.out_stride));
}

}  // namespace
