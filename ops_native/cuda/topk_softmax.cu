// topk_softmax: a warp takes one row, or several, and keeps their logits in registers.
//
// Half types without a bias, the usual call: p orders like the logits, so a logit's 16 bits and its index pack into one
// integer that no other of the row equals, more for the better expert. Each lane sorts its best four; k times the
// warp's maximum is taken off the head of the lane that has it (one REDUX and a few moves). The weights come from the
// k best alone where they are renormalized: the other experts' p cancels out.
// Anything else (float32, a bias, k above 32) ranks 32 bits: a lane keeps its best key, and a mask of what it gave.
//
// Reads each logit once, writes 8 bytes per slot: T (2 E + 8 k) bytes. The arithmetic takes about as long.
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

// A lane holds V experts of a row, in chunks of up to N neighbours that are one load; chunks go round the lanes.
template <int V, int N> __device__ __forceinline__ int expert_at(int i, int lane) {
  return (i / N * kWarp + lane) * N + i % N;
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

// ---- 16-bit logits without a bias -----------------------------------------------------------------------------------

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

// What a lane holds of R rows. Where there is no expert: a logit of -inf behind all experts.
template <class T, int V, int R>
__device__ __forceinline__ void load_packed(uint32_t (&x)[R][V], const Problem& p, int64_t first, int lane) {
  constexpr int N = V < 8 ? V : 8;
  using Chunk = Pack<uint32_t, N / 2>;
  constexpr uint32_t kMinusInf = std::is_same_v<T, f16> ? 0xfc00 : 0xff80;
  Chunk chunks[R][V / N];
  const auto* row = (const uint16_t*)p.logits + first * p.row_stride;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (r > 0 && first + r < p.rows) row += p.row_stride;  // past the end, the last row again
#pragma unroll
    for (int i = 0; i < V; i += N) {
      Chunk& chunk = chunks[r][i / N];
#pragma unroll
      for (int n = 0; n < N / 2; ++n) chunk.at[n] = kMinusInf * 0x10001;
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
  for (int i = 0; i < V; i += 2) {
    const uint32_t rank = kMaxExperts - 1 - expert_at<V, N>(i, lane);  // lower for higher indices
    const uint32_t ranks = (rank - 1) << 16 | rank;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const uint32_t numbers = ordered<T>(chunks[r][i / N].at[i % N / 2]);
      x[r][i] = __byte_perm(numbers, ranks, 0x1054);
      x[r][i + 1] = __byte_perm(numbers, ranks, 0x3276);
    }
  }
}

__device__ __forceinline__ void in_order(uint32_t& a, uint32_t& b) {
  const uint32_t more = max(a, b);
  b = min(a, b);
  a = more;
}

// best: the largest D of x, in order; 2 or 4 (by Batcher's networks).
template <int V, int D> __device__ __forceinline__ void sort_best(const uint32_t (&x)[V], uint32_t (&best)[D]) {
#pragma unroll
  for (int i = 0; i < V; i += D) {
    uint32_t a[D];
#pragma unroll
    for (int d = 0; d < D; ++d) a[d] = x[i + d];
    in_order(a[0], a[1]);
    if constexpr (D == 4) {
      in_order(a[2], a[3]);
      in_order(a[0], a[2]);
      in_order(a[1], a[3]);
      in_order(a[1], a[2]);
    }
    if (i == 0) {
#pragma unroll
      for (int d = 0; d < D; ++d) best[d] = a[d];
    } else {
#pragma unroll
      for (int d = 0; d < D; ++d) best[d] = max(best[d], a[D - 1 - d]);  // the best of both, up and down
      in_order(best[0], best[2]);
      in_order(best[1], best[3]);
      in_order(best[0], best[1]);
      in_order(best[2], best[3]);
    }
  }
}

// R rows per warp, k up to 32 / R: lane r * 32 / R + j ends with the j-th best of row r.
template <class T, int V, int R> __global__ void __launch_bounds__(kThreads) packed_kernel(const Problem p) {
  constexpr int kSegment = kWarp / R, D = V < kDepth ? V : kDepth;
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

// ---- everything else ------------------------------------------------------------------------------------------------

__device__ __forceinline__ float logit_at(const Problem& p, int64_t offset) {
  switch (p.dtype) {
    case kF32: return ((const float*)p.logits)[offset];
    case kF16: return to_f32(((const f16*)p.logits)[offset]);
    default: return to_f32(((const bf16*)p.logits)[offset]);
  }
}

template <class T, int V, int N>
__device__ __forceinline__ void load_chunks(float (&x)[V], const T* row, int experts, int lane) {
#pragma unroll
  for (int c = 0; c < V; c += N) {
    const int expert = expert_at<V, N>(c, lane);
    if (expert >= experts) continue;
    const Pack<T, N> chunk = *(const Pack<T, N>*)(row + expert);
#pragma unroll
    for (int i = 0; i < N; ++i) x[c + i] = to_f32(chunk.at[i]);
  }
}

// Orders like the score, above 0; NaN ranks with -inf.
__device__ __forceinline__ uint32_t key_of(float score) {
  const uint32_t bits = __float_as_uint(isnan(score) ? -INFINITY : score + 0.0f);
  return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

template <int V> __global__ void __launch_bounds__(kThreads) general_kernel(const Problem p) {
  constexpr int N = V < 4 ? V : 4;
  const int lane = threadIdx.x % kWarp;
  const int64_t row = first_row(1), start = row * p.row_stride;
  if (row >= p.rows) return;

  float x[V];
#pragma unroll
  for (int i = 0; i < V; ++i) x[i] = -INFINITY;
  if (p.wide && p.dtype == kF32) {
    load_chunks<float, V, N>(x, (const float*)p.logits + start, p.experts, lane);
  } else if (p.wide && p.dtype == kF16) {
    load_chunks<f16, V, N>(x, (const f16*)p.logits + start, p.experts, lane);
  } else if (p.wide) {
    load_chunks<bf16, V, N>(x, (const bf16*)p.logits + start, p.experts, lane);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const int expert = expert_at<V, N>(i, lane);
      if (expert < p.experts) x[i] = logit_at(p, start + expert * p.stride);
    }
  }

  float most = x[0], all = 0, powers[V];
#pragma unroll
  for (int i = 1; i < V; ++i) most = fmaxf(most, x[i]);
  most = warp_max(most);
#pragma unroll
  for (int i = 0; i < V; ++i) all += powers[i] = expf(x[i] - most);
  all = warp_sum(all);
  const float scale = 1 / all;
  const bool sound = all >= 1;  // else it is NaN: a NaN or +inf among the logits, or only -inf

  uint32_t key[V], best = 0;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const int expert = expert_at<V, N>(i, lane);
    key[i] = 0;
    if (expert < p.experts) key[i] = key_of(p.bias ? powers[i] * scale + p.bias[expert * p.bias_stride] : x[i]);
    best = max(best, key[i]);
  }

  uint32_t open = ~0u;  // a bit for each of the lane's experts that is not taken
  float total = 0;
  for (int begin = 0; begin < p.top_k; begin += kWarp) {
    const int count = min(kWarp, p.top_k - begin);
    int mine = begin + lane;
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
      const uint32_t taken = __reduce_max_sync(kAllLanes, best);
      uint32_t equal = 0;
#pragma unroll
      for (int i = 0; i < V; ++i) equal |= uint32_t(key[i] == taken) << i;
      equal &= open;
      const uint32_t candidate = equal ? expert_at<V, N>(__ffs(equal) - 1, lane) : kMaxExperts;
      const uint32_t expert = __reduce_min_sync(kAllLanes, candidate);
      if (candidate == expert) {
        open &= ~(equal & (0 - equal));
        if ((equal & (equal - 1)) == 0) best = next_below(key, taken);
      }
      if (lane == step && sound) mine = expert;
    }

    const bool used = lane < count;
    const float logit = used ? logit_at(p, start + mine * p.stride) : -INFINITY;
    // Chosen by their bias, experts may all be far below the row's maximum: p would underflow, their ratios do not.
    const float shift = p.renormalize && p.top_k <= kWarp ? warp_max(logit) : most;
    const float weight = used ? expf(logit - shift) : 0;
    total = p.renormalize ? total + warp_sum(weight) : all;
    if (!used) continue;
    const bool last = !p.renormalize || p.top_k <= kWarp;
    p.weights[row * p.top_k + begin + lane] = !sound ? NAN : last ? weight / total : weight;
    p.ids[row * p.top_k + begin + lane] = mine;
  }
  if (p.renormalize && p.top_k > kWarp)
#pragma unroll 1
    for (int j = lane; j < p.top_k; j += kWarp) p.weights[row * p.top_k + j] /= total;
}

// ---- the choice -----------------------------------------------------------------------------------------------------

template <int N> using Count = std::integral_constant<int, N>;

// f(Count<V>{}) with the experts that each lane holds.
template <class F> int by_experts(int64_t experts, F f) {
  if (experts <= 64) return f(Count<2>{});
  if (experts <= 128) return f(Count<4>{});
  if (experts <= 256) return f(Count<8>{});
  if (experts <= 512) return f(Count<16>{});
  return f(Count<32>{});
}

int launch_rows(void (*kernel)(Problem), const Problem& p, int rows_per_warp, void* stream) {
  const int64_t warps = ceil_div<int64_t>(p.rows, rows_per_warp);
  return launch(kernel, dim3(ceil_div<int64_t>(warps, kThreads / kWarp)), dim3(kThreads), 0, stream, p);
}

// Whether chunks of that many elements may be loaded whole.
bool wide(const Problem& p, int chunk) {
  const int size = p.dtype == kF32 ? 4 : 2;
  return p.stride == 1 && p.experts % chunk == 0 && aligned(chunk * size, size, p.logits, p.row_stride);
}

template <class T, int V> int launch_packed(Problem p, void* stream) {
  p.wide = wide(p, V < 8 ? V : 8);
  if (!p.wide || p.top_k > 16 || p.rows < kRowsPerSM * sm_count())
    return launch_rows(packed_kernel<T, V, 1>, p, 1, stream);
  if (p.top_k > 8 || V > 16) return launch_rows(packed_kernel<T, V, 2>, p, 2, stream);
  return launch_rows(packed_kernel<T, V, (V > 16 ? 2 : 4)>, p, 4, stream);
}

}  // namespace

// logits [rows,experts] and bias [experts] (or null) at any strides -> weights, ids [rows,topk], contiguous
extern "C" int OPSHIM(topk_softmax)(
    const void* logits, const float* bias, float* weights, int32_t* ids, int64_t dtype, int64_t rows, int64_t experts,
    int64_t row_stride, int64_t stride, int64_t bias_stride, int64_t topk, int64_t renormalize, int64_t device,
    void* stream) {
  if (experts > kMaxExperts || topk > experts) return kBadArgument;
  if (dtype != kF32 && dtype != kF16 && dtype != kBF16) return kBadDtype;
  OnDevice on(device);
  Problem p{logits,      bias,         weights,   ids,        rows, row_stride, stride,
            bias_stride, int(experts), int(topk), int(dtype), renormalize != 0};
  return by_experts(experts, [&](auto count) {
    constexpr int V = count.value;
    if (dtype != kF32 && !bias && topk <= kWarp)
      return dtype == kF16 ? launch_packed<f16, V>(p, stream) : launch_packed<bf16, V>(p, stream);
    p.wide = wide(p, V < 4 ? V : 4);
    return launch_rows(general_kernel<V>, p, 1, stream);
  });
}
