// Up to 8 rows by one matrix of float16, K-major. What counts is that memory delivers weights without a pause, as in
// gemm_stream.cuh, whose way with weights this is: a warp owns 16 or 32 of their rows and a part of k, and copies them
// into a ring of its own. But there are no tiles and slots to look up, and the rows of x are copied once and stay in
// shared memory, each warp's part of k beside its ring: from the second item on, weights are all that comes. Where a
// block has one item, all its copies are under way at once.
#pragma once
#include "gemm_mma.cuh"

namespace {

struct FewRows {
  const f16 *x, *w, *bias;  // bias: null for 0
  f16* out;                 // [m,n], contiguous
  int64_t x_stride, w_stride;
  int m, n, k;
};

// An item is 16 kM rows of w: the block's warps share k, 64 at a time, in turns. kOnce: one item per block, and no more
// steps than stages.
template <int kM, int kStages, bool kOnce, int kThreads>
__global__ void __launch_bounds__(kThreads, 1) few_rows_kernel(const FewRows p) {
  constexpr int kRows = 16 * kM, kStepK = 64, kRowBytes = kStepK * 2, kStageBytes = kRows * kRowBytes;
  extern __shared__ float4 shared_memory[];
  constexpr int kWarps = kThreads / kWarp, kPitch = kRows + 4;  // 2 kPitch = 8 modulo 32 banks
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int steps = ceil_div(ceil_div(p.k, kStepK), kWarps), items = ceil_div(p.n, kRows);
  char* const ring = (char*)shared_memory + warp * kStages * kStageBytes;
  char* const x = (char*)shared_memory + kWarps * kStages * kStageBytes + warp * steps * p.m * kRowBytes;
  float* const all_sums = (float*)((char*)shared_memory + kWarps * (kStages * kStageBytes + steps * p.m * kRowBytes));
  float* const all_biases = all_sums + 2 * kWarps * p.m * kPitch;  // [2][kRows]

  start_early();

  // Two neighbouring rows' four pieces each, which eight lanes read at once, meet all banks.
  const auto at = [](char* base, int row, int piece) { return base + row * kRowBytes + (piece ^ row % 2 * 4) * 16; };
  int ahead_item = blockIdx.x, ahead_step = 0, ahead_stage = 0, n = 0;
  const f16* weights = nullptr;
  const auto copy_next = [&] {
    if (ahead_item < items && !(kOnce && ahead_step == steps)) {
      if (ahead_step == 0) {
        n = ahead_item * kRows + lane / 8;
        weights = p.w + n * p.w_stride;
      }
      const int piece = lane % 8, k = (ahead_step * kWarps + warp) * kStepK + piece * 8;
      const bool real = k < p.k;  // beyond: zeros
      char* const stage = ring + ahead_stage * kStageBytes;
#pragma unroll
      for (int i = 0; i < 4 * kM; ++i) {
        const f16* const from = weights + 4 * i * p.w_stride;
        if (n + 4 * i >= p.n) continue;
        copy_async(shared_address(at(stage, lane / 8 + 4 * i, piece)), real ? from + k : from, real);
      }
      if (kOnce || ahead_item == int(blockIdx.x))
        for (int row = lane / 8; row < p.m; row += 4) {
          const f16* const from = p.x + row * p.x_stride;
          copy_async(shared_address(at(x + ahead_step * p.m * kRowBytes, row, piece)), real ? from + k : from, real);
        }
      ahead_stage = ahead_stage + 1 == kStages ? 0 : ahead_stage + 1;
      ++ahead_step;
      if (!kOnce && ahead_step == steps) {
        ahead_step = 0;
        ahead_item += gridDim.x;
      }
    }
    commit_copies();
  };
  // All lanes' copies are complete, and __syncwarp() has been called since. Columns from m on are no results.
  const auto multiply = [&](int stage_index, int step, float (&sum)[kM][4]) {
    const int r = lane / 4, c = lane % 4;
    char* const stage = ring + stage_index * kStageBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 token = *(const uint4*)at(x + step * p.m * kRowBytes, min(r, p.m - 1), 4 * half + c);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const uint4 low = *(const uint4*)at(stage, 16 * m + r, 4 * half + c);
        const uint4 high = *(const uint4*)at(stage, 16 * m + 8 + r, 4 * half + c);
        mma<f16>(sum[m], low.x, high.x, low.y, high.y, token.x, token.y);
        mma<f16>(sum[m], low.z, high.z, low.w, high.w, token.z, token.w);
      }
    }
  };

  constexpr int kAhead = kOnce ? kStages : kStages - 1;
#pragma unroll
  for (int i = 0; i < kAhead; ++i) copy_next();
  int stage = 0, turn = 0;  // turn: which half of the sums' memory; with two, one barrier per item is enough
  for (int item = blockIdx.x; item < items; item += gridDim.x, turn ^= 1) {
    const int first = item * kRows;
    const int column_of_bias = first + int(threadIdx.x);
    float bias = 0;  // asked for long before it is needed
    if (p.bias && int(threadIdx.x) < kRows && column_of_bias < p.n) bias = to_f32(p.bias[column_of_bias]);
    float sum[kM][4] = {};
    if constexpr (kOnce) {
#pragma unroll
      for (int step = 0; step < kStages; ++step) {
        if (step == 0) wait_copies<kStages - 1>();
        if (step == 1) wait_copies<kStages - 2>();
        if (step == 2) wait_copies<kStages - 3>();
        if (step >= 3) wait_copies<0>();
        __syncwarp();
        if (step < steps) multiply(step, step, sum);
      }
    } else {
      for (int step = 0; step < steps; ++step) {
        wait_copies<kAhead - 1>();
        __syncwarp();  // for the copies of the other lanes, and their reading of the stage that is copied to next
        copy_next();
        multiply(stage, step, sum);
        stage = stage + 1 == kStages ? 0 : stage + 1;
      }
    }

    float* const sums = all_sums + turn * kWarps * p.m * kPitch;  // [kWarps][m][kPitch]
    float* const biases = all_biases + turn * kRows;
    if (int(threadIdx.x) < kRows) biases[threadIdx.x] = bias;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = lane % 4 * 2 + i;
      if (token >= p.m) continue;
      float* const mine = sums + (warp * p.m + token) * kPitch + lane / 4;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mine[16 * m] = sum[m][i];
        mine[16 * m + 8] = sum[m][i + 2];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.m * kRows; i += int(blockDim.x)) {
      const int token = i / kRows, column = i % kRows;
      if (first + column >= p.n) continue;
      float total = 0;
#pragma unroll 8
      for (int w = 0; w < kWarps; ++w) total += sums[(w * p.m + token) * kPitch + column];
      p.out[int64_t(token) * p.n + first + column] = from_f32<f16>(total + biases[column]);
    }
    if (kOnce) return;
  }
}

// done: whether it fits; else nothing was launched.
template <int kM, int kStages, bool kOnce, int kThreads>
int launch_few_rows(const FewRows& p, bool& done, void* stream) {
  constexpr int kRows = 16 * kM, warps = kThreads / kWarp;
  const int64_t steps = ceil_div(ceil_div(p.k, 64), warps), items = ceil_div(p.n, kRows);
  const int64_t shared = warps * (kStages * kRows + steps * p.m) * 128 + 2 * (warps * p.m * (kRows + 4) + kRows) * 4;
  done = shared <= shared_memory_limit() && (!kOnce || steps <= kStages);
  if (!done) return kOk;
  return launch_early(few_rows_kernel<kM, kStages, kOnce, kThreads>,
                      dim3(unsigned(kOnce ? items : min(items, int64_t(sm_count())))), dim3(kThreads), size_t(shared),
                      stream, p);
}

// Where there is enough of k for 16 warps, and of rows for every multiprocessor: one item each, or two and more.
inline int launch_few_rows(const FewRows& p, bool& done, void* stream) {
  done = false;
  if (p.k < 2048) return kOk;
  if (ceil_div(p.n, 16) <= sm_count()) {
    const int status = launch_few_rows<1, 4, true, 512>(p, done, stream);
    if (done) return status;
  }
  return ceil_div(p.n, 32) < 2 * sm_count() ? int(kOk) : launch_few_rows<2, 5, false, 256>(p, done, stream);
}

}  // namespace
