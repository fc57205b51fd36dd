// topk_softmax of 16-bit logits without a bias: what a lane holds of a row, packed and sorted; a warp, or eight lanes, per
// row.
#pragma once
#include <type_traits>

#include "opshim.cuh"

namespace {

constexpr int kThreads = 128, kMaxExperts = 1024;
constexpr int kRowsPerSM = 64;  // from so many rows on, a warp takes several: more independent work in each
constexpr int kDepth = 4;       // experts that a lane sorts

struct Problem {
  const void* logits;
  const float* bias;  // or null
  float* weights;
  int32_t* ids;
  int64_t rows, row_stride, stride, bias_stride;
  int experts, top_k, dtype;
  bool renormalize;
  bool wide;  // a lane's chunks may be loaded whole
};

// A lane holds V experts of a row, in chunks of up to N neighbours that are one load; chunks go round the row's lanes.
template <int V, int N, int kLanes = kWarp> __device__ __forceinline__ int expert_at(int i, int lane) {
  return (i / N * kLanes + lane) * N + i % N;
}

__device__ __forceinline__ int64_t first_row(int rows_per_warp) {
  return (int64_t(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp) * rows_per_warp;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = kWarp / 2; offset; offset /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}

// The largest of those x that are less than `last`; 0 where there are none. Minus `last`, modulo 2^32, they are the
// larger the closer they come, and whatever is not less is smaller than that: an addition and a maximum each.
template <int V> __device__ __forceinline__ uint32_t next_below(const uint32_t (&x)[V], uint32_t last) {
  uint32_t most = 0 - last;
#pragma unroll
  for (int i = 0; i < V; ++i) most = __viaddmax_u32(x[i], 0 - last, most);
  return most + last;
}

// ---- the packing ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t plus_zero(uint32_t pair, f16) {
  const __half2 sum = __hadd2(reinterpret_cast<const __half2&>(pair), __float2half2_rn(0));
  return reinterpret_cast<const uint32_t&>(sum);
}
__device__ __forceinline__ uint32_t plus_zero(uint32_t pair, bf16) {
  const __nv_bfloat162 sum = __hadd2(reinterpret_cast<const __nv_bfloat162&>(pair), __float2bfloat162_rn(0));
  return reinterpret_cast<const uint32_t&>(sum);
}

// Of two logits the 16-bit numbers that order like them, above 0: sign flipped, negatives all bits. The sum with zero
// makes one zero of both and one NaN of all, which ranks above infinity.
template <class T> __device__ __forceinline__ uint32_t ordered(uint32_t pair) {
  pair = plus_zero(pair, T{});
  uint32_t negative;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(negative) : "r"(pair));  // the sign of each half, in all of its bits
  return pair ^ (negative | 0x80008000);
}

template <class T> __device__ __forceinline__ float logit_of(uint32_t packed) {
  const uint16_t number = packed >> 16, bits = number & 0x8000 ? number ^ 0x8000 : ~number;
  return to_f32(reinterpret_cast<const T&>(bits));
}

__device__ __forceinline__ int expert_of(uint32_t packed) { return kMaxExperts - 1 - int(packed & 0xffff); }

// Two neighbours' logits and ranks.
template <class T>
__device__ __forceinline__ void pack_pair(uint32_t& first, uint32_t& second, uint32_t logits, int expert) {
  const uint32_t rank = kMaxExperts - 1 - expert, ranks = (rank - 1) << 16 | rank;  // lower for higher indices
  const uint32_t numbers = ordered<T>(logits);
  first = __byte_perm(numbers, ranks, 0x1054);
  second = __byte_perm(numbers, ranks, 0x3276);
}

template <class T> constexpr uint32_t kMinusInf = (std::is_same_v<T, f16> ? 0xfc00 : 0xff80) * 0x10001u;  // two

// What a lane holds of R rows. Where there is no expert: a logit of -inf behind all experts.
template <class T, int V, int R>
__device__ __forceinline__ void load_packed(uint32_t (&x)[R][V], const Problem& p, int64_t first, int lane) {
  constexpr int N = V < 8 ? V : 8;
  using Chunk = Pack<uint32_t, N / 2>;
  Chunk chunks[R][V / N];
  const auto* row = (const uint16_t*)p.logits + first * p.row_stride;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (r > 0 && first + r < p.rows) row += p.row_stride;  // past the end, the last row again
#pragma unroll
    for (int i = 0; i < V; i += N) {
      Chunk& chunk = chunks[r][i / N];
#pragma unroll
      for (int n = 0; n < N / 2; ++n) chunk.at[n] = kMinusInf<T>;
      const int expert = expert_at<V, N>(i, lane);
      if (R > 1 || p.wide) {
        if (expert < p.experts) chunk = *(const Chunk*)(row + expert);
      } else {
#pragma unroll
        for (int n = 0; n < N; ++n)
          if (expert + n < p.experts) {
            const uint32_t bits = row[(expert + n) * p.stride];
            chunk.at[n / 2] = n % 2 ? (chunk.at[n / 2] & 0xffff) | bits << 16 : (chunk.at[n / 2] & 0xffff0000) | bits;
          }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < V; i += 2)
#pragma unroll
    for (int r = 0; r < R; ++r)
      pack_pair<T>(x[r][i], x[r][i + 1], chunks[r][i / N].at[i % N / 2], expert_at<V, N>(i, lane));
}

__device__ __forceinline__ void in_order(uint32_t& a, uint32_t& b) {
  const uint32_t more = max(a, b);
  b = min(a, b);
  a = more;
}

// The first D in order, of any order; 2, 4 or 8 (Batcher's networks).
template <int D> __device__ __forceinline__ void sort(uint32_t* a) {
  if constexpr (D > 2) {
    sort<D / 2>(a);
    sort<D / 2>(a + D / 2);
  }
#pragma unroll
  for (int d = 0; d < D / 2; ++d) in_order(a[d], a[d + D / 2]);
  if constexpr (D == 4) in_order(a[1], a[2]);
  if constexpr (D == 8) {
    in_order(a[2], a[4]), in_order(a[3], a[5]);
    in_order(a[1], a[2]), in_order(a[3], a[4]), in_order(a[5], a[6]);
  }
}
// The same, of what first falls and then rises, or the other way round.
template <int D> __device__ __forceinline__ void sort_valley(uint32_t* a) {
#pragma unroll
  for (int half = D / 2; half; half /= 2)
#pragma unroll
    for (int d = 0; d < D; ++d)
      if (d % (2 * half) < half) in_order(a[d], a[d + half]);
}

// best: the largest D of x, in order; 2, 4 or 8
template <int V, int D> __device__ __forceinline__ void sort_best(const uint32_t (&x)[V], uint32_t (&best)[D]) {
#pragma unroll
  for (int i = 0; i < V; i += D) {
    uint32_t a[D];
#pragma unroll
    for (int d = 0; d < D; ++d) a[d] = x[i + d];
    sort<D>(a);
#pragma unroll
    for (int d = 0; d < D; ++d) best[d] = i == 0 ? a[d] : max(best[d], a[D - 1 - d]);  // the best of both, up and down
    if (i) sort_valley<D>(best);
  }
}

// R rows per warp, k up to 32 / R: lane r * 32 / R + j ends with the j-th best of row r.
template <class T, int V, int R> __global__ void __launch_bounds__(kThreads) packed_kernel(const Problem p) {
  constexpr int kSegment = kWarp / R, D = V < kDepth ? V : kDepth;
  start_early();
  const int lane = threadIdx.x % kWarp, j = lane % kSegment;
  const int64_t first = first_row(R), row = first + lane / kSegment;
  if (first >= p.rows) return;
  uint32_t x[R][V], best[R][D], kept[R] = {};
  load_packed<T>(x, p, first, lane);
#pragma unroll
  for (int r = 0; r < R; ++r) sort_best(x[r], best[r]);

#pragma unroll 1
  for (int step = 0; step < p.top_k; ++step) {
    uint32_t taken[R], least = ~0u;
#pragma unroll
    for (int r = 0; r < R; ++r) taken[r] = __reduce_max_sync(kAllLanes, best[r][0]);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (j == step) kept[r] = taken[r];
      const bool given = best[r][0] == taken[r];
#pragma unroll
      for (int d = 0; d < D; ++d) best[r][d] = !given ? best[r][d] : d + 1 < D ? best[r][d + 1] : 0;
      least = min(least, best[r][0]);
    }
    if (V > D && least == 0) {  // a lane gave all that it sorted, and looks for its next one
#pragma unroll
      for (int r = 0; r < R; ++r)
        if (best[r][0] == 0) best[r][0] = next_below(x[r], taken[r]);
    }
  }
  uint32_t mine = kept[0];
#pragma unroll
  for (int r = 1; r < R; ++r)
    if (lane / kSegment == r) mine = kept[r];

  const bool used = j < p.top_k;
  const float logit = logit_of<T>(mine), most = __shfl_sync(kAllLanes, logit, 0, kSegment);
  const float weight = used ? expf(logit - most) : 0;
  float total = weight;
  if (p.renormalize) {
#pragma unroll
    for (int offset = kSegment / 2; offset; offset /= 2) total += __shfl_xor_sync(kAllLanes, total, offset);
  } else {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float shift = __shfl_sync(kAllLanes, most, r * kSegment);
      float sum = 0;
#pragma unroll
      for (int i = 0; i < V; ++i) sum += expf(logit_of<T>(x[r][i]) - shift);
      sum = warp_sum(sum);
      if (lane / kSegment == r) total = sum;
    }
  }
  if (!used || row >= p.rows) return;
  p.weights[row * p.top_k + j] = weight / total;
  p.ids[row * p.top_k + j] = isfinite(most) ? expert_of(mine) : j;  // NaN, +inf or only -inf: p has no order
}

// Many rows, k up to 8, chunks of eight that can be loaded whole: four or eight lanes per row, each of which sorts its
// best eight, so that none ever looks for more. The j-th best ends in lane j % kLanes.
template <class T, int V, int kLanes> __global__ void __launch_bounds__(kThreads) sorted_kernel(const Problem p) {
  constexpr int N = 8, kKept = N / kLanes;
  start_early();
  const int lane = threadIdx.x % kLanes;
  const int64_t row = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
  const auto* logits = (const uint16_t*)p.logits + min(row, p.rows - 1) * p.row_stride;  // past the end, the last again
  Pack<uint32_t, N / 2> chunks[V / N];
#pragma unroll
  for (int i = 0; i < V; i += N) {
    const int expert = expert_at<V, N, kLanes>(i, lane);
#pragma unroll
    for (int n = 0; n < N / 2; ++n) chunks[i / N].at[n] = kMinusInf<T>;
    if (expert < p.experts) chunks[i / N] = *(const Pack<uint32_t, N / 2>*)(logits + expert);
  }
  uint32_t x[V], best[N], mine[kKept] = {};
#pragma unroll
  for (int i = 0; i < V; i += 2)
    pack_pair<T>(x[i], x[i + 1], chunks[i / N].at[i % N / 2], expert_at<V, N, kLanes>(i, lane));
  sort_best(x, best);

#pragma unroll
  for (int step = 0; step < N; ++step) {
    if (step >= p.top_k) break;
    uint32_t taken = best[0];
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2) taken = max(taken, __shfl_xor_sync(kAllLanes, taken, offset));
    if (lane == step % kLanes) mine[step / kLanes] = taken;
    const bool given = best[0] == taken;
#pragma unroll
    for (int d = 0; d + 1 < N - step; ++d) best[d] = given ? best[d + 1] : best[d];
  }

  const float most = __shfl_sync(kAllLanes, logit_of<T>(mine[0]), 0, kLanes);
  float weights[kKept], total = 0;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    weights[i] = lane + i * kLanes < p.top_k ? expf(logit_of<T>(mine[i]) - most) : 0;
    total += weights[i];
  }
  if (!p.renormalize) {
    total = 0;
#pragma unroll
    for (int i = 0; i < V; ++i) total += expf(logit_of<T>(x[i]) - most);
  }
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) total += __shfl_xor_sync(kAllLanes, total, offset);
  if (row >= p.rows) return;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int j = lane + i * kLanes;
    if (j >= p.top_k) continue;
    p.weights[row * p.top_k + j] = weights[i] / total;
    p.ids[row * p.top_k + j] = isfinite(most) ? expert_of(mine[i]) : j;  // NaN, +inf or only -inf: p has no order
  }
}

}  // namespace
