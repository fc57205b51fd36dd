// What fused_moe does beside its two products: slots sorted by expert, float16's hidden rows scaled, a token's slots
// added up; and for a handful of slots the second product itself.
#pragma once
#include "gemm_stream.cuh"

namespace {

// ---- grouping -------------------------------------------------------------------------------------------------------

// Sorts slots by expert, stably, and cuts each expert's slots into tiles of at most `width`, about equal. Each block
// takes a chunk of consecutive slots, and each of its warps a run of these; counts [warps][experts] first holds how
// many of each expert the warp has, then where they go. Of several chunks, count_kernel counts first what each has:
// of_chunks [chunks][experts].
constexpr int kGroupThreads = 1024, kMostChunks = 128, kChunkSlots = 1024;

struct Totals {
  int32_t tiles, slots;  // slots: those with an expert
  int32_t counters[2];   // of the products' items
};

// f(slot, its expert, the lanes of the same expert) for the slots of a warp's run; a lane beyond has expert -1.
template <class F>
__device__ __forceinline__ void for_each_slot(const int32_t* ids, const int32_t* map, int begin, int end, int experts,
                                              int map_size, F f) {
  constexpr int kAtOnce = 8;  // loads
  const int lane = threadIdx.x % kWarp;
  for (int first = begin; first < end; first += kAtOnce * kWarp) {
    int expert[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) expert[i] = first + i * kWarp + lane < end ? ids[first + i * kWarp + lane] : -1;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) expert[i] = local_expert(expert[i], map, map_size, experts);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i * kWarp < end)
        f(first + i * kWarp + lane, expert[i], __match_any_sync(kAllLanes, expert[i]));
  }
}

__global__ void __launch_bounds__(kGroupThreads) count_kernel(
    const int32_t* ids, const int32_t* map, int slots, int experts, int map_size, int chunk, int32_t* of_chunks) {
  extern __shared__ int32_t counts[];
  for (int i = threadIdx.x; i < experts; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  start_early();
  const int begin = blockIdx.x * chunk, end = min(slots, begin + chunk);
#pragma unroll 4
  for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
    const int expert = local_expert(ids[i], map, map_size, experts);
    if (expert >= 0) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < experts; i += blockDim.x) of_chunks[blockIdx.x * experts + i] = counts[i];
}

__global__ void __launch_bounds__(kGroupThreads) group_kernel(
    const int32_t* ids, const int32_t* map, int slots, int experts, int map_size, int width, int warps, int chunk,
    const int32_t* of_chunks, int32_t* sorted, Tile* tiles, Totals* totals) {
  constexpr int kAtOnce = 8;  // loads
  extern __shared__ int32_t counts[];
  __shared__ int2 of_warp[kGroupThreads / kWarp];
  __shared__ int2 so_far;  // slots and tiles of the experts before
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int run = ceil_div(ceil_div(chunk, kWarp), warps) * kWarp, chunk_end = min(slots, int(blockIdx.x + 1) * chunk);
  const int begin = min(chunk_end, int(blockIdx.x) * chunk + warp * run);
  const int end = warp < warps ? min(chunk_end, begin + run) : begin;
  int32_t* mine = counts + warp * experts;

  start_early();
  for (int i = threadIdx.x; i < warps * experts; i += blockDim.x) counts[i] = 0;
  if (threadIdx.x == 0) so_far = make_int2(0, 0);
  __syncthreads();
  for_each_slot(ids, map, begin, end, experts, map_size, [&](int, int expert, unsigned peers) {
    if (expert >= 0 && lane == __ffs(peers) - 1) mine[expert] += __popc(peers);
    __syncwarp();
  });
  __syncthreads();

  for (int base = 0; base < experts; base += blockDim.x) {
    const int expert = base + threadIdx.x;
    int total = 0;
    if (expert < experts)
      for (int w = 0; w < warps; w += kAtOnce) {
        int count[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) count[i] = w + i < warps ? counts[(w + i) * experts + expert] : 0;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (w + i < warps) counts[(w + i) * experts + expert] = total;
          total += count[i];
        }
      }
    int earlier = 0;  // in the chunks before
    if (gridDim.x > 1 && expert < experts) {
      total = 0;
#pragma unroll 8
      for (int c = 0; c < int(gridDim.x); ++c) {
        const int count = of_chunks[c * experts + expert];
        earlier += c < int(blockIdx.x) ? count : 0;
        total += count;
      }
    }
    const int cut = ceil_div(total, width), grain = width % 8 ? 1 : 8;  // of the matrix units
    const int size = ceil_div(ceil_div(total, max(cut, 1)), grain) * grain;
    int2 through = make_int2(total, cut);  // of this thread's expert and those before it
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int slots_before = __shfl_up_sync(kAllLanes, through.x, offset);
      const int tiles_before = __shfl_up_sync(kAllLanes, through.y, offset);
      if (lane >= offset) through = make_int2(through.x + slots_before, through.y + tiles_before);
    }
    if (lane == kWarp - 1) of_warp[warp] = through;
    __syncthreads();
    int2 before = so_far;
#pragma unroll 8
    for (int w = 0; w < warp; ++w) before = make_int2(before.x + of_warp[w].x, before.y + of_warp[w].y);
    const int first = before.x + through.x - total, lead = before.y + through.y - cut;
    if (expert < experts) {
      for (int w = 0; w < warps; ++w) atomicAdd(&counts[w * experts + expert], first + earlier);  // nobody waits
      for (int t = 0; t < cut && blockIdx.x == 0; ++t)
        tiles[lead + t] = {expert, first + t * size, min(size, total - t * size), lead, cut};
    }
    __syncthreads();
    if (threadIdx.x == blockDim.x - 1) so_far = make_int2(before.x + through.x, before.y + through.y);
    __syncthreads();
  }

  for_each_slot(ids, map, begin, end, experts, map_size, [&](int slot, int expert, unsigned peers) {
    const int place = expert >= 0 ? mine[expert] + __popc(peers & ((1u << lane) - 1)) : 0;
    __syncwarp();
    if (expert >= 0) {
      sorted[place] = slot;
      if (lane == __ffs(peers) - 1) mine[expert] += __popc(peers);
    }
    __syncwarp();
  });
  if (threadIdx.x == 0 && blockIdx.x == 0) *totals = {so_far.y, so_far.x, {0, 0}};
}

// ---- float16's hidden rows ------------------------------------------------------------------------------------------

// to[row] = from[row] 2^-e, weights_to[slot] = weights[slot] 2^e, where e brings the row's largest value to about 2^14;
// a warp per row. Rows are those of the grouped slots, or where `sorted` is null of all slots that have an expert.
__global__ void __launch_bounds__(256) narrow_kernel(
    const float* from, f16* to, const float* weights, float* weights_to, const int32_t* sorted, const Totals* totals,
    const int32_t* ids, const int32_t* map, int slots, int experts, int map_size, int64_t width) {
  start_early();
  const int rows = sorted ? totals->slots : slots, lane = threadIdx.x % kWarp;
  for (int row = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp; row < rows;
       row += gridDim.x * (blockDim.x / kWarp)) {
    const int slot = sorted ? sorted[row] : row;
    if (local_expert(ids[slot], map, map_size, experts) < 0) continue;
    float largest = 0;
    for (int64_t i = lane; i < width; i += kWarp) {
      const float value = fabsf(from[row * width + i]);
      if (value < INFINITY) largest = fmaxf(largest, value);
    }
#pragma unroll
    for (int offset = kWarp / 2; offset; offset /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, offset));
    const int exponent = largest > 0 ? ilogbf(largest) - 14 : 0;
    for (int64_t i = lane; i < width; i += kWarp)
      to[row * width + i] = __float2half_rn(scalbnf(from[row * width + i], -exponent));
    if (lane == 0) weights_to[slot] = scalbnf(weights ? weights[slot] : 1.0f, exponent);
  }
}

// ---- the second product of a few slots, and the sum -----------------------------------------------------------------

// A block has 16 columns of one token's output. What is summed there, over the token's slots and then k, is cut into
// steps of a ring's stage, and its warps have a run of steps each.
template <class T> struct Combine {
  const T *hidden, *w;  // hidden: a row of k values per slot
  const float* weights;
  const int32_t *ids, *map;
  T* out;
  int64_t w_stride, columns;
  int32_t k, top_k, experts, map_size;
};

template <class T> __global__ void __launch_bounds__(512) combine_kernel(const Combine<T> g) {
  using Stages = Ring<T, 1, 1>;
  constexpr int kAhead = Stages::kStages - 1;
  extern __shared__ float4 shared_memory[];
  __shared__ float sums[16][16];  // [warp][column]
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = int(blockDim.x) / kWarp;
  const int64_t first_slot = int64_t(blockIdx.y) * g.top_k, first_column = int64_t(blockIdx.x) * 16;
  const int parts = ceil_div(g.k, Stages::kStageK), steps = g.top_k * parts, run = ceil_div(steps, warps);
  const int begin = min(steps, warp * run), end = min(steps, begin + run);
  const Stages ring((char*)shared_memory);
  const auto expert_of = [&](int step) {
    return local_expert(g.ids[first_slot + step / parts], g.map, g.map_size, g.experts);
  };
  const auto copy_weights = [&](int step) {
    const int expert = step < end ? expert_of(step) : -1;
    if (expert < 0) return;
    const int64_t column = first_column + lane / 8;
    const T* const from = g.w + expert * g.w_stride + column * g.k;
    ring.copy_weights((step - begin) % Stages::kStages, step % parts * Stages::kStageK + lane % 8 * 8, g.k, [&](int i) {
      return column + 4 * i < g.columns ? from + 4 * i * g.k : nullptr;
    });
  };
  const auto copy_hidden = [&](int step) {
    if (step < end) {
      const T* const from = g.hidden + (first_slot + step / parts) * g.k;
      ring.copy_tokens((step - begin) % Stages::kStages, step % parts * Stages::kStageK + lane % 8 * 8, g.k,
                       [&](int i) { return i == 0 && lane < 8 ? from : nullptr; });
    }
    commit_copies();
  };

  let_next_start();
  for (int i = 0; i < kAhead; ++i) copy_weights(begin + i);
  wait_for_previous();  // the hidden rows and, for float16, the weights come from the kernel before
  for (int i = 0; i < kAhead; ++i) copy_hidden(begin + i);
  float total[2] = {};  // in every fourth lane: columns lane / 4 and + 8
  for (int step = begin; step < end; ++step) {
    wait_copies<kAhead - 1>();
    __syncwarp();
    copy_weights(step + kAhead);
    copy_hidden(step + kAhead);
    if (expert_of(step) < 0) continue;
    float sum[1][1][4] = {};
    ring.multiply((step - begin) % Stages::kStages, sum);
    const float scale = g.weights ? g.weights[first_slot + step / parts] : 1.0f;
    total[0] = fmaf(scale, sum[0][0][0], total[0]);
    total[1] = fmaf(scale, sum[0][0][2], total[1]);
  }
  if (lane % 4 == 0) {
    sums[warp][lane / 4] = total[0];
    sums[warp][lane / 4 + 8] = total[1];
  }
  __syncthreads();
  const int64_t n = int64_t(blockIdx.x) * 16 + threadIdx.x;
  if (threadIdx.x >= 16 || n >= g.columns) return;
  float all = 0;
  for (int w = 0; w < warps; ++w) all += sums[w][threadIdx.x];
  g.out[blockIdx.y * g.columns + n] = from_f32<T>(all);
}

// ---- the sum --------------------------------------------------------------------------------------------------------

template <class Y, class T, int N>
__global__ void __launch_bounds__(128) sum_kernel(
    const Y* y, const int32_t* ids, const int32_t* map, T* out, int top_k, int experts, int map_size, int64_t width) {
  constexpr int kAtOnce = 8;  // slots
  const int64_t token = blockIdx.x, column = (int64_t(blockIdx.y) * blockDim.x + threadIdx.x) * N;
  start_early();
  if (column >= width) return;
  float sum[N] = {};
  for (int first = 0; first < top_k; first += kAtOnce) {
    const int64_t slot = token * top_k + first;
    bool real[kAtOnce];
    Pack<Y, N> values[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      real[j] = first + j < top_k && local_expert(ids[slot + j], map, map_size, experts) >= 0;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (real[j]) values[j] = *(const Pack<Y, N>*)(y + (slot + j) * width + column);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (real[j])
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] += to_f32(values[j].at[i]);
  }
  Pack<T, N> result;
#pragma unroll
  for (int i = 0; i < N; ++i) result.at[i] = from_f32<T>(sum[i]);
  *(Pack<T, N>*)(out + token * width + column) = result;
}

}  // namespace
