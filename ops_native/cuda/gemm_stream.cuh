// Up to 16 tokens per tile: every weight is used once or twice, so all that counts is how fast memory delivers. A warp
// owns 16 or 32 weight rows and a part of k, and copies what it needs into a ring in shared memory of its own: no
// barrier of the block in the loop, and copies run ahead across items, so that memory never waits for an epilogue.
// Fragments come from the ring 16 bytes at a time, since a product does not care about the order of k as long as both
// sides agree: lane (r, c) of an operand takes k = 8 c ... 8 c + 7 of each 32, where the fragments of two times 16
// would have 2 c, 2 c + 1, 2 c + 8, 2 c + 9. Warps that share rows add up through shared memory, in fixed order.
#pragma once
#include "gemm.cuh"

namespace {

// A warp's ring: of each stage, 64 of k of 16 kM weight rows and 8 kN tokens. Lane l copies piece l % 8 (16 bytes) of
// rows l / 8, l / 8 + 4 and so on. Rows that nobody has are left as they are: they meet no other row's result.
template <class T, int kM, int kN> class Ring {
 public:
  static constexpr int kStages = kN == 1 ? 4 : 3, kStageK = 64;
  static constexpr int kStageBytes = (16 * kM + 8 * kN) * kStageK * 2, kBytes = kStages * kStageBytes;

  __device__ __forceinline__ explicit Ring(char* memory) : memory_(memory + threadIdx.x / kWarp * kBytes) {}

  // A stage's copies; row_of(i): where this lane's i-th row begins, or null. k: the lane's first; beyond `end`, zeros.
  template <class F> __device__ __forceinline__ void copy_weights(int stage, int k, int end, F row_of) const {
    copy_rows<4 * kM>(stage, 0, k, end, row_of);
  }
  template <class F> __device__ __forceinline__ void copy_tokens(int stage, int k, int end, F row_of) const {
    copy_rows<2 * kN>(stage, 16 * kM, k, end, row_of);
  }

  // All lanes' copies of the stage are complete, and __syncwarp() has been called since.
  __device__ __forceinline__ void multiply(int stage, float (&sum)[kM][kN][4]) const {
    const int r = threadIdx.x % kWarp / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 low[kM], high[kM], token[kN];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        low[m] = *(const uint4*)at(stage, 16 * m + r, 4 * half + c);
        high[m] = *(const uint4*)at(stage, 16 * m + 8 + r, 4 * half + c);
      }
#pragma unroll
      for (int n = 0; n < kN; ++n) token[n] = *(const uint4*)at(stage, 16 * kM + 8 * n + r, 4 * half + c);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          mma<T>(sum[m][n], low[m].x, high[m].x, low[m].y, high[m].y, token[n].x, token[n].y);
          mma<T>(sum[m][n], low[m].z, high[m].z, low[m].w, high[m].w, token[n].z, token[n].w);
        }
    }
  }

 private:
  // Two neighbouring rows' four pieces each, which eight lanes read at once, meet all banks.
  __device__ __forceinline__ char* at(int stage, int row, int piece) const {
    return memory_ + stage * kStageBytes + row * (kStageK * 2) + (piece ^ row % 2 * 4) * 16;
  }
  template <int kRows, class F>
  __device__ __forceinline__ void copy_rows(int stage, int first, int k, int end, F row_of) const {
    const int row = threadIdx.x % kWarp / 8, piece = threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const T* const from = row_of(i);
      if (from) copy_async(shared_address(at(stage, first + row + 4 * i, piece)), k < end ? from + k : from, k < end);
    }
  }
  char* const memory_;
};

// row_warps warps beside each other have 16 kM rows each; the block's other warps share k with them.
template <class T, class Out, int kM, int kN, bool kPairs, Source kSource>
__global__ void __launch_bounds__(kM == 1 ? 512 : 256, 1) stream_kernel(const Gemm given, const int row_warps) {
  using Stages = Ring<T, kM, kN>;
  constexpr int kTokens = 8 * kN, kRows = 16 * kM, kAhead = Stages::kStages - 1;
  Gemm g = given;
  g.source = kSource;  // which the compiler knows: a short way to the first copy is worth much where there are few
  extern __shared__ float4 shared_memory[];
  __shared__ float scales[2][kTokens];
  __shared__ int64_t places[2][kTokens];  // rows of out, -1: none

  const int warps = int(blockDim.x) / kWarp, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int k_warps = warps / row_warps, row_warp = warp % row_warps, k_warp = warp / row_warps;
  const int block_rows = row_warps * kRows, block_columns = kPairs ? block_rows / 2 : block_rows;
  const int pitch = block_rows + 4;  // 2 * pitch = 8 modulo 32 banks: a warp's sums go to banks of their own
  const int steps = max(kAhead, ceil_div(ceil_div(g.k, Stages::kStageK), k_warps));
  const Stages ring((char*)shared_memory);
  float* const all_sums = (float*)((char*)shared_memory + warps * Stages::kBytes);
  const int blocks = row_blocks<kPairs>(g, block_rows);

  const bool early = kSource == Source::kTable && g.early;
  if (!early) start_early();
  Tile after = {};  // of the item after `next`: of the first one, loaded before it is known whether there is one
  if (kSource == Source::kTable) after = g.tiles[blockIdx.x / blocks];
  const int tiles = count_tiles(g, kTokens), items = tiles * blocks;

  // When memory is busy a load takes microseconds. So an item's tile is loaded two items before it is needed and its
  // slots one before, and neither is looked at until the next item's turn. That is done behind the copies of the step
  // kLookStep: the first one, or where there is next to nothing to load, the last one that is copied ahead.
  constexpr int kLookStep = kSource == Source::kTable || kSource == Source::kBlocks ? 0 : kAhead - 1;
  Work next = {{-1}};
  int slots[2 * kN] = {};  // of this lane: two of every 8
  const auto look_ahead = [&](int item) {
    if (item >= items) return;
    next = work_at(g, item, after, tiles, blocks, kTokens);
#pragma unroll
    for (int i = 0; i < 2 * kN; ++i) {
      const int token = lane / 8 + 4 * i, position = next.tile.first + token;
      slots[i] = next.tile.expert < 0 || token >= next.tile.count ? -1 : g.slots ? g.slots[position] : position;
    }
    const int later = item + int(gridDim.x);
    if (kSource == Source::kTable && later < items) after = g.tiles[later / blocks];
  };

  // What is being copied, kAhead steps before it is multiplied. This lane's rows: `weights` (the first 8 of 16 for
  // pairs: the gate) and `ups` (the other 8), from column n on, and the slots' tokens.
  int ahead_item = blockIdx.x, ahead_step = 0, ahead_stage = 0, n = 0;
  const T *weights = nullptr, *ups = nullptr, *tokens[2 * kN] = {};
  const auto begin_item = [&] {
    const int64_t row = int64_t(next.block) * block_rows + row_warp * kRows;
    n = next.tile.expert < 0 ? g.n : int(kPairs ? row / 2 : row) + lane / 8;
    weights = (const T*)g.w + next.tile.expert * g.w_stride + n * g.row_stride;
    ups = (const T*)g.up + next.tile.expert * g.up_stride + n * g.row_stride;
#pragma unroll
    for (int i = 0; i < 2 * kN; ++i) {
      const int from = g.by_slot_in ? slots[i] / g.top_k : next.tile.first + lane / 8 + 4 * i;
      tokens[i] = slots[i] < 0 || slots[i] >= g.slot_count ? nullptr : (const T*)g.x + from * g.x_stride;
    }
  };
  const auto lane_k = [&](int step) { return (step * k_warps + k_warp) * Stages::kStageK + lane % 8 * 8; };  // in turns
  const auto copy_weights = [&](int stage, int step) {
    ring.copy_weights(stage, lane_k(step), g.k, [&](int i) {
      const int on = kPairs ? i / 4 * 8 + i % 2 * 4 : 4 * i;
      const T* const from = kPairs && i % 4 >= 2 ? ups : weights;
      return n + on < g.n ? from + on * g.row_stride : nullptr;
    });
  };
  const auto copy_next = [&](bool with_weights) {
    if (ahead_item < items) {
      if (with_weights) {
        if (ahead_step == 0) begin_item();
        copy_weights(ahead_stage, ahead_step);
      }
      ring.copy_tokens(ahead_stage, lane_k(ahead_step), g.k, [&](int i) { return tokens[i]; });
      if (ahead_step == kLookStep) look_ahead(ahead_item + int(gridDim.x));
      ahead_stage = (ahead_stage + 1) % Stages::kStages;
      if (++ahead_step == steps) {
        ahead_step = 0;
        ahead_item += gridDim.x;
      }
    }
    commit_copies();
  };
  look_ahead(ahead_item);
  if (early) {  // the first weights need not wait for the kernel before
    if (ahead_item < items) {
      begin_item();
#pragma unroll 1
      for (int i = 0; i < kAhead; ++i) copy_weights(i, i);
    }
    start_early();
  }
#pragma unroll 1
  for (int i = 0; i < kAhead; ++i) copy_next(!early);

  int stage = 0, turn = 0;  // turn: which half of the sums' memory; with two, one barrier per item is enough
  for (int item = blockIdx.x; item < items; item += gridDim.x, turn ^= 1) {
    const Work work = work_at(g, item, tiles, blocks, kTokens);
    const Tile& tile = work.tile;
    Note note = {};
    if (threadIdx.x < kTokens) note = note_of(g, tile, threadIdx.x);
    float sum[kM][kN][4] = {};
    for (int step = 0; step < steps; ++step) {
      wait_copies<kAhead - 1>();
      __syncwarp();  // for the copies of the other lanes, and their reading of the stage that is copied to next
      copy_next(true);
      ring.multiply(stage, sum);
      stage = (stage + 1) % Stages::kStages;
    }

    if (threadIdx.x < kTokens) {
      places[turn][threadIdx.x] = note.place;
      scales[turn][threadIdx.x] = note.scale;
    }
    float* sums = all_sums + turn * k_warps * kTokens * pitch;  // [k_warps][kTokens][pitch]
    float* mine = sums + (k_warp * kTokens + lane % 4 * 2) * pitch + row_warp * kRows + lane / 4;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 4 * kN; ++i)
        mine[(i / 4 * 8 + i % 2) * pitch + 16 * m + i % 4 / 2 * 8] = sum[m][i / 4][i % 4];
    __syncthreads();
    for (int i = threadIdx.x; i < tile.count * block_columns; i += int(blockDim.x)) {
      const int token = i / block_columns, column = i % block_columns;
      const int64_t at = int64_t(work.block) * block_columns + column, place = places[turn][token];
      if (at >= g.n || place < 0) continue;
      const float* from = sums + token * pitch + (kPairs ? column / 8 * 16 + column % 8 : column);
      float total = 0, up = 0;
      for (int w = 0; w < k_warps; ++w) {
        total += from[w * kTokens * pitch];
        if (kPairs) up += from[w * kTokens * pitch + 8];
      }
      const float scale = scales[turn][token];
      ((Out*)g.out)[place * g.out_stride + at] =
          from_f32<Out>(kPairs ? finish_pair(total, up, scale) : finish<T>(g, total, scale, at));
    }
  }
}

// kSource: the problem's. most_tiles: how many there are at most, which the host knows without reading the device.
// Warps split k as long as each has 256 of it; with 16 rows per warp, blocks are of 16 warps where there is not one for
// each multiprocessor.
template <class T, class Out, int kM, int kN, bool kPairs, Source kSource>
int launch_stream(const Gemm& g, int64_t most_tiles, void* stream) {
  const int64_t rows = rows_in_all<kPairs>(g);
  int warps = kM == 1 && most_tiles * ceil_div<int64_t>(rows, 16) <= sm_count() ? 16 : 8, row_warps = 1;
  const auto shared = [&] {
    return warps * Ring<T, kM, kN>::kBytes + 2 * warps / row_warps * 8 * kN * (row_warps * 16 * kM + 4) * 4;
  };
  while (warps > 1 && shared() + 1024 > shared_memory_limit()) warps /= 2;
  while (row_warps < warps && warps / row_warps * 256 > g.k) row_warps *= 2;
  const int64_t items = most_tiles * ceil_div<int64_t>(rows, row_warps * 16 * kM);
  if (items > INT32_MAX / 2) return kBadArgument;
  const int64_t blocks = int64_t(sm_count()) * max(1, shared_memory_limit() / (shared() + 2048));
  return launch_early(stream_kernel<T, Out, kM, kN, kPairs, kSource>, dim3(unsigned(min(items, blocks))),
                      dim3(warps * kWarp), shared(), stream, g, row_warps);
}

}  // namespace
