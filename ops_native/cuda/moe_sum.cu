// moe_sum: out[t] = sum over k of y[t,k], in float32, without the slots of negative ids.
//
// Bound by reading y once: T k N elements. Each thread owns 16 bytes of a row's columns and walks over the k slots; the
// loads of all slots are independent, so eight experts are eight loads in flight.
#include "opshim.cuh"

namespace {

constexpr int kThreads = 128;

template <class T, int N>
__global__ void __launch_bounds__(kThreads) sum_kernel(
    const T* y, const int32_t* ids, T* out, int top_k, int64_t features, int64_t token_stride, int64_t slot_stride) {
  const int64_t token = blockIdx.x, column = (int64_t(blockIdx.y) * kThreads + threadIdx.x) * N;
  if (column >= features) return;
  float sum[N] = {};
  const T* row = y + token * token_stride + column;
#pragma unroll 8
  for (int j = 0; j < top_k; ++j) {
    if (ids && ids[token * top_k + j] < 0) continue;
    const Pack<T, N> values = *(const Pack<T, N>*)(row + j * slot_stride);
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] += to_f32(values.at[i]);
  }
  Pack<T, N> result;
#pragma unroll
  for (int i = 0; i < N; ++i) result.at[i] = from_f32<T>(sum[i]);
  *(Pack<T, N>*)(out + token * features + column) = result;
}

}  // namespace

extern "C" int OPSHIM(moe_sum)(
    const void* y, const int32_t* topk_ids, void* out, int64_t dtype, int64_t tokens, int64_t top_k, int64_t features,
    int64_t token_stride, int64_t slot_stride, int64_t device, void* stream) {
  OnDevice on(device);
  return by_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    constexpr int wide = 16 / sizeof(T);
    const bool packs = aligned(16, sizeof(T), y, token_stride, slot_stride, features) && aligned(16, 1, out);
    const int n = packs ? wide : 1;
    const dim3 grid(tokens, ceil_div<int64_t>(ceil_div<int64_t>(features, n), kThreads));
    return launch(packs ? sum_kernel<T, wide> : sum_kernel<T, 1>, grid, dim3(kThreads), 0, stream, (const T*)y,
                  topk_ids, (T*)out, top_k, features, token_stride, slot_stride);
  });
}
