// gdn_gating: g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), element by element.
//
// A thread owns neighbouring heads, whose parameters it keeps, and goes through tokens. Reads 2 elements of act and
// writes 8 bytes per token and head; the exponentials take about as long as the memory.
#include "opshim.cuh"

namespace {

constexpr int kThreads = 256, kHeads = 4;  // heads per thread, where four can be loaded at once
constexpr int kBlocksPerSM = 8;            // all of them at once: beyond, threads take several tokens

// log(1 + e^x), without overflow, and without losing e^x where it is small
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0) + log1pf(expf(-fabsf(x))); }

__device__ __forceinline__ float sigmoid(float x) { return 1 / (1 + expf(-x)); }

template <class T, int N>
__global__ void __launch_bounds__(kThreads) gating_kernel(
    const T* a, const T* b, const float* A_log, const float* dt_bias, float* g, float* beta, int64_t tokens,
    int64_t heads, int64_t a_stride, int64_t b_stride) {
  start_early();
  const int64_t head = (int64_t(blockIdx.y) * blockDim.x + threadIdx.x) * N, step = int64_t(gridDim.x) * blockDim.y;
  int64_t t = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (head >= heads || t >= tokens) return;
  using Chunk = Pack<T, N>;
  Chunk as = *(const Chunk*)(a + t * a_stride + head), bs = *(const Chunk*)(b + t * b_stride + head);
  float rate[N], shift[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    rate[i] = -expf(A_log[head + i]);
    shift[i] = dt_bias[head + i];
  }
  while (true) {
    Pack<float, N> gs, betas;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      gs.at[i] = rate[i] * softplus(to_f32(as.at[i]) + shift[i]);
      betas.at[i] = sigmoid(to_f32(bs.at[i]));
    }
    *(Pack<float, N>*)(g + t * heads + head) = gs;
    *(Pack<float, N>*)(beta + t * heads + head) = betas;
    t += step;
    if (t >= tokens) return;
    as = *(const Chunk*)(a + t * a_stride + head);
    bs = *(const Chunk*)(b + t * b_stride + head);
  }
}

}  // namespace

// a, b [T,HV] with row strides; A_log, dt_bias [HV] -> g, beta [T,HV] contiguous
extern "C" int OPSHIM(gdn_gating)(
    const void* a, const void* b, const float* A_log, const float* dt_bias, float* g, float* beta, int64_t T,
    int64_t HV, int64_t a_stride, int64_t b_stride, int64_t dtype, int64_t device, void* stream) {
  OnDevice on(device);
  return by_dtype(dtype, [&](auto act) {
    using A = decltype(act);
    constexpr int size = sizeof(A);
    const bool packs = HV % kHeads == 0 && aligned(kHeads * size, size, a, a_stride) &&
                       aligned(kHeads * size, size, b, b_stride) && aligned(16, 1, g) && aligned(16, 1, beta);
    const int64_t width = ceil_div<int64_t>(HV, packs ? kHeads : 1);
    int across = 1;
    while (across < width && across < kThreads) across *= 2;
    const dim3 block(across, kThreads / across);
    const int64_t rows = ceil_div<int64_t>(T, block.y), most = int64_t(kBlocksPerSM) * sm_count();
    const dim3 grid(rows < most ? rows : most, ceil_div<int64_t>(width, across));
    return launch_early(packs ? gating_kernel<A, kHeads> : gating_kernel<A, 1>, grid, block, 0, stream, (const A*)a,
                  (const A*)b, A_log, dt_bias, g, beta, T, HV, a_stride, b_stride);
  });
}
