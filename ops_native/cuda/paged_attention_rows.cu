// Attention of any dtype, head size and alignment: float32, and halves that are no multiple of 16 bytes.
//
// A block takes one row of one head; its warps take the row's keys in turns and are joined in order. Rows that read the
// same keys share nothing but what the caches hold. It is for being right, not for speed.
#include "attention.cuh"

namespace {

constexpr int kWarps = 4;

// The sequence that holds row `row` of q, or -1
__device__ int sequence_of(const Attention& p, int64_t row) {
  int low = -1, high = p.sequences + 1;  // bounds[low] <= row < bounds[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (p.bounds[middle] <= row ? low : high) = middle;
  }
  return low < p.sequences ? low : -1;
}

template <class T>
__global__ void __launch_bounds__(kWarps* kWarp) rows_kernel(const __grid_constant__ Attention p) {
  __shared__ float outs[kWarps][kMaxSize], highs[kWarps], totals[kWarps];
  start_early();
  const int64_t row = blockIdx.x / p.heads;
  const int head = int(blockIdx.x % p.heads), warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  T* out = (T*)p.out + int64_t(blockIdx.x) * p.size;

  const int sequence = p.bounds ? sequence_of(p, row) : int(row);
  int position = -1;
  if (sequence >= 0) position = p.lengths[sequence] - (p.bounds ? int(p.bounds[sequence + 1] - row) : 1);
  if (position < 0) {
    for (int d = threadIdx.x; d < p.size; d += kWarps * kWarp) out[d] = from_f32<T>(0);
    return;
  }
  RowSum sum;
  attend_row(p, (const T*)p.q + row * p.q_token + head * p.q_head, p.tables + sequence * p.table_row, head, position,
             p.first_seen(position), position + 1, warp, kWarps, sum);
#pragma unroll
  for (int i = 0; i < kMaxSize / kWarp; ++i) outs[warp][lane + i * kWarp] = sum.out[i];
  if (lane == 0) {
    highs[warp] = sum.high;
    totals[warp] = sum.total;
  }
  __syncthreads();
  float high = -INFINITY, total = 0, weight[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) high = fmaxf(high, highs[w]);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    weight[w] = exp2f(highs[w] - shift_of(high));
    total += weight[w] * totals[w];
  }
  for (int d = threadIdx.x; d < p.size; d += kWarps * kWarp) {
    float x = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) x += weight[w] * outs[w][d];
    out[d] = from_f32<T>(x / total);
  }
}

}  // namespace

int opshim::attend_rows(const Attention& p, int64_t dtype, void* stream) {
  return by_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    return launch_early(rows_kernel<T>, dim3(p.rows * p.heads), dim3(kWarps * kWarp), 0, stream, p);
  });
}
