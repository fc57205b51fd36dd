// grouped_gemm: each slot's row times its expert's weights, over the blocks of moe_align_block_size.
//
// Every block is a tile (or several), so that nothing has to be sorted or counted; neighbouring blocks are worked at
// together, and where they share an expert its weights come from memory once. Slots that stand in no block are found by
// zero_kernel, which looks for them in the list of the blocks' entries, and alone are cleared.
// Floor: the chosen experts' weights once, N K elements each; from some 200 rows per expert on, arithmetic.
#include "gemm_hopper.cuh"
#include "gemm_plain.cuh"
#include "gemm_stream.cuh"
#include "gemm_tile.cuh"

namespace {

constexpr int kZeroThreads = 1024;  // and as many slots per block

template <class T>
__global__ void __launch_bounds__(kZeroThreads) zero_kernel(
    const int32_t* sorted, const int32_t* experts, const int32_t* entries, T* y, int slots, int64_t capacity,
    int block_size, int expert_count, int64_t width) {
  __shared__ unsigned present[kZeroThreads / kWarp];
  const int first = blockIdx.x * kZeroThreads, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  start_early();
  if (lane == 0) present[warp] = 0;
  __syncthreads();
  const int64_t used = min(int64_t(*entries), capacity);
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < used; i += kZeroThreads) {
    const int64_t at = int64_t(sorted[i]) - first;
    if (at < 0 || at >= kZeroThreads) continue;
    const int expert = experts[i / block_size];
    if (expert >= 0 && expert < expert_count) atomicOr(&present[at / kWarp], 1u << at % kWarp);
  }
  __syncthreads();
  const int here = min(kWarp, slots - first - warp * kWarp);  // of this warp's slots
  for (int i = 0; i < here; ++i) {
    if (present[warp] >> i & 1) continue;
    T* row = y + int64_t(first + warp * kWarp + i) * width;
    for (int64_t column = lane; column < width; column += kWarp) row[column] = from_f32<T>(0.0f);
  }
}

template <class T> int grouped(const Gemm& g, int64_t blocks, bool wide, void* stream) {
  const auto tiles = [&](int width) { return blocks * ceil_div(g.block_size, width); };
  if constexpr (sizeof(T) == 2)
    if (wide) {
      if (g.block_size <= 8) return launch_stream<T, T, 2, 1, false, Source::kBlocks>(g, tiles(8), stream);
      if (g.block_size <= 16) return launch_stream<T, T, 2, 2, false, Source::kBlocks>(g, tiles(16), stream);
      CUtensorMap boxes;
      if (!hopper_takes<false>(g, boxes)) return launch_tile<T, T, false>(g, tiles(kTileTokens), stream);
      const int width = g.block_size <= 64 ? 64 : 128;
      return launch_hopper<T, T, false>(g, boxes, width, tiles(width), stream);
    }
  return launch_plain<T, T, T, false>(g, tiles(kPlainTokens), stream);
}

}  // namespace

// rows: N. padded: the count of entries that are blocks, at most `capacity`.
extern "C" int OPSHIM(grouped_gemm)(
    const void* x, const void* w, const int32_t* sorted, const int32_t* experts, const int32_t* padded,
    const float* weights, void* y, int64_t dtype, int64_t slots, int64_t capacity, int64_t block_size, int64_t top_k,
    int64_t expert_count, int64_t rows, int64_t inner, int64_t x_stride, int64_t w_stride, int64_t device,
    void* stream) {
  OnDevice on(device);
  if (slots == 0 || rows == 0) return kOk;
  if (max(slots, capacity) > INT32_MAX || max(rows, inner) > INT32_MAX / 2) return kBadArgument;
  block_size = min(block_size, max(capacity, int64_t(1)));
  Gemm g = {};
  g.x = x;
  g.w = w;
  g.out = y;
  g.scale = weights;
  g.slots = sorted;
  g.experts = experts;
  g.entries = padded;
  g.x_stride = x_stride;
  g.out_stride = rows;
  g.w_stride = w_stride;
  g.row_stride = inner;
  g.positions = int32_t(capacity);
  g.slot_count = int32_t(slots);
  g.n = int32_t(rows);
  g.k = int32_t(inner);
  g.top_k = int32_t(top_k);
  g.expert_count = int32_t(expert_count);
  g.block_size = int32_t(block_size);
  g.source = Source::kBlocks;
  g.by_slot_in = g.by_slot_out = true;
  return by_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    const int status =
        launch_early(zero_kernel<T>, dim3(unsigned(ceil_div<int64_t>(slots, kZeroThreads))), dim3(kZeroThreads), 0,
                     stream, sorted, experts, padded, (T*)y, slots, capacity, block_size, expert_count, rows);
    if (status != kOk || capacity == 0) return status;
    const bool wide = inner > 0 && aligned(16, sizeof(T), x, x_stride, inner) && aligned(16, sizeof(T), w, w_stride);
    return grouped<T>(g, ceil_div<int64_t>(capacity, block_size), wide, stream);
  });
}
