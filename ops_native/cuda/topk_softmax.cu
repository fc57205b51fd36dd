// topk_softmax: a warp takes one row, or several, and keeps their logits in registers.
//
// Half types without a bias, the usual call: p orders like the logits, so a logit's 16 bits and its index pack into one
// integer that no other of the row equals, more for the better expert. Each lane sorts its best four; k times the
// warp's maximum is taken off the head of the lane that has it (one REDUX and a few moves). Of many rows and k up to 8,
// four or eight lanes take a row, and sort eight (topk_packed.cuh has both). The weights come from the k best alone where they
// are renormalized: the other experts' p cancels out.
// Anything else (float32, a bias, k above 32) ranks 32 bits: a lane keeps its best key, and a mask of what it gave.
//
// Reads each logit once, writes 8 bytes per slot: T (2 E + 8 k) bytes. The arithmetic takes about as long.
#include "topk_packed.cuh"

namespace {

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
  start_early();
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
  return launch_early(kernel, dim3(ceil_div<int64_t>(warps, kThreads / kWarp)), dim3(kThreads), 0, stream, p);
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
  if constexpr (V <= 8) {
    constexpr int kLanes = V <= 4 ? 4 : 8;
    if (p.top_k <= 8 && wide(p, 8))
      return launch_rows(sorted_kernel<T, kWarp / kLanes * V, kLanes>, p, kWarp / kLanes, stream);
  }
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
