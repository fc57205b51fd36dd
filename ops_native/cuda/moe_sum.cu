// moe_sum: out[t] = sum over k of y[t,k], in float32, without the slots of negative ids.
//
// Bound by reading y once: T k N elements. Each thread owns 16 bytes of a row's columns. It loads them from a batch of
// slots before it adds the first, so that all are in flight at once; a slot that does not count is not read.
#include "opshim.cuh"

namespace {

constexpr int kThreads = 128, kBatch = 8;  // slots in flight per thread
constexpr int kBlocksPerSM = 7;            // leaves the registers for them

template <class T, int N>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM) sum_kernel(
    const T* y, const int32_t* ids, T* out, int top_k, int64_t features, int64_t token_stride, int64_t slot_stride) {
  using Chunk = Pack<T, N>;
  start_early();
  const int64_t token = blockIdx.x, column = (int64_t(blockIdx.y) * kThreads + threadIdx.x) * N;
  if (column >= features) return;
  const T* slot = y + token * token_stride + column;
  if (ids) ids += token * top_k;
  float sum[N] = {};
  for (int begin = 0; begin < top_k; begin += kBatch) {
    int id[kBatch];
    Chunk values[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      id[j] = begin + j < top_k ? 0 : -1;
      if (ids && begin + j < top_k) id[j] = ids[begin + j];
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      values[j] = Chunk{};
      if (id[j] >= 0) values[j] = *(const Chunk*)slot;
      slot += slot_stride;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += to_f32(values[j].at[i]);
  }
  Chunk result;
#pragma unroll
  for (int i = 0; i < N; ++i) result.at[i] = from_f32<T>(sum[i]);
  T* to = out + token * features + column;
  if constexpr (sizeof(Chunk) == 16) {
    __stwb((uint4*)to, reinterpret_cast<const uint4&>(result));  // one store; the compiler would make it four
  } else {
    *(Chunk*)to = result;
  }
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
    return launch_early(packs ? sum_kernel<T, wide> : sum_kernel<T, 1>, grid, dim3(kThreads), 0, stream, (const T*)y,
                  topk_ids, (T*)out, top_k, features, token_stride, slot_stride);
  });
}
