// sm_90a: 256 weight rows by up to 128 tokens, wgmma. One group of four warps copies, two multiply, half of the
// rows each, as many columns wide as the tile has tokens, in steps of 64. Blocks stay and take the next item from a
// counter, as items differ in width. Nobody who copies or multiplies waits for a load: when memory is busy, and it
// should be, a load takes microseconds. So of the copying warps
//
//     0      finds items, up to kItems ahead: claims them, reads their tiles, slots and scales into shared memory
//     1      has the copy engine bring weights, as boxes (gemm_boxes.cuh): one thread, as soon as an item is found
//     2, 3   copy tokens: as boxes too where they lie in a row, else 16 bytes at a time, wherever they lie
//
// Barriers in shared memory, by phases, each waited for by parity. Who arrives:
//
//     full[stage]    the thread of the weights and the one of the tokens, each with its boxes' bytes; or the former and
//                    64 threads once their copies have come. Both wait for empty[] on their own: neither can be two
//                    phases ahead, since a phase that lacks the other's arrival keeps the stage from being emptied.
//     empty[stage]   the eight multiplying warps, once wgmma has read the stage
//     found[i]       warp 0: work[i] is written
//     noted[i]       the lanes of warp 0: rows[i], places[i] and scales[i] are written, and so is work[i]
//     done[i]        the eight multiplying warps, once an item's results are stored. By then the copying warps are done
//                    with the item as well: all of its stages were full.
//
// A barrier of what is filled is waited for with the parity of its round, 0 first; one of what is emptied with the
// opposite, so that the first round finds it open.
#pragma once
#include "gemm.cuh"
#include "gemm_boxes.cuh"
#include "gemm_wgmma.cuh"

namespace {

constexpr int kHopperK = kBoxK, kHopperRows = 256, kUnits = kHopperRows / 128;  // kUnits: of 64 rows, per group
constexpr int kHopperTokens = 128, kHopperStages = 8;                          // at most
constexpr int kItems = 3, kTokenBox = 16, kTokenThreads = 2 * kWarp;
constexpr int kHopperThreads = 3 * kWarpgroup;
constexpr int kHopperRowBytes = kHopperK * 2, kHopperOutBytes = 8192;  // kHopperOutBytes: where a group turns results

struct HopperShared {
  uint64_t full[kHopperStages], empty[kHopperStages];
  uint64_t found[kItems], noted[kItems], done[kItems];
  alignas(16) float scales[kItems][kHopperTokens];
  int32_t rows[kItems][kHopperTokens];    // of x, -1: none
  int32_t places[kItems][kHopperTokens];  // of out, -1: none
  Work work[kItems];                      // expert -1: no more
};

// Shared memory: stages of the weight rows and `width` tokens each, results of the two groups, HopperShared.
struct HopperShape {
  int width, stages;
  bool boxed;  // tokens come as boxes
  __host__ __device__ int stage_bytes() const { return (kHopperRows + width) * kHopperRowBytes; }
  __host__ __device__ int bytes() const { return stages * stage_bytes() + 2 * kHopperOutBytes + sizeof(HopperShared); }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct RingPlace {  // of the stages
  int stage = 0, parity = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++stage < stages) return;
    stage = 0;
    parity ^= 1;
  }
};

__device__ __forceinline__ uint32_t hopper_piece(int row, int piece) {
  return row * kHopperRowBytes + (piece ^ row % 8) * 16;
}

// ---- the warps that copy --------------------------------------------------------------------------------------------

// Warp 0. Claims are made as late as the depth of the ring allows: what a block has claimed, no idle one can take.
template <bool kPairs>
__device__ __forceinline__ void find_items(const Gemm& g, HopperShared& shared, HopperShape shape) {
  const int lane = threadIdx.x % kWarp;
  if (!g.early) start_early();
  const int tiles = count_tiles(g, shape.width), blocks = row_blocks<kPairs>(g, kHopperRows);
  const int items = tiles * blocks;
  RingPlace place;
  int next = blockIdx.x;
  for (bool first = true;; first = false, place.advance(kItems)) {
    const int at = place.stage;
    wait_barrier(&shared.done[at], place.parity ^ 1);
    if (!first && lane == 0) next = int(gridDim.x) + (g.counter ? atomicAdd(g.counter, 1) : next);
    next = __shfl_sync(kAllLanes, next, 0);
    Work work = {{-1}};
    for (; next < items; next += int(gridDim.x)) {  // past what is to be skipped, which no counted item is
      work = work_at(g, next, tiles, blocks, shape.width);
      if (work.tile.expert >= 0 && work.tile.count > 0) break;
      work.tile.expert = -1;
    }
    if (lane == 0) {
      shared.work[at] = work;
      arrive(&shared.found[at]);
    }
    if (first && g.early) start_early();
    if (work.tile.expert >= 0) {
      int slots[kHopperTokens / kWarp];
#pragma unroll
      for (int i = 0; i < kHopperTokens / kWarp; ++i) slots[i] = slot_at(g, work.tile, lane + i * kWarp);
#pragma unroll
      for (int i = 0; i < kHopperTokens / kWarp; ++i) {
        const int token = lane + i * kWarp, position = work.tile.first + token, slot = slots[i];
        shared.rows[at][token] = slot < 0 ? -1 : g.by_slot_in ? slot / g.top_k : position;
        shared.places[at][token] = slot < 0 ? -1 : g.by_slot_out ? slot : position;
        shared.scales[at][token] = slot >= 0 && g.scale ? g.scale[slot] : 1.0f;
      }
    }
    arrive(&shared.noted[at]);
    if (work.tile.expert < 0) return;
  }
}

// f(the stage's barrier, its address, k) for an item's steps, each once its stage is empty.
template <class F>
__device__ __forceinline__ void for_each_step(const Gemm& g, char* memory, HopperShared& shared, HopperShape shape,
                                              RingPlace& place, F f) {
  for (int k = 0; k < g.k; k += kHopperK, place.advance(shape.stages)) {
    wait_barrier(&shared.empty[place.stage], place.parity ^ 1);
    f(&shared.full[place.stage], shared_address(memory) + place.stage * shape.stage_bytes(), k);
  }
}

// One thread.
template <bool kPairs>
__device__ __forceinline__ void copy_weights(const Gemm& g, const CUtensorMap& boxes, char* memory,
                                             HopperShared& shared, HopperShape shape) {
  prepare(boxes);
  if (!g.early) start_early();
  RingPlace place, item;
  for (;; item.advance(kItems)) {
    wait_barrier(&shared.found[item.stage], item.parity);
    const int expert = shared.work[item.stage].tile.expert, row = shared.work[item.stage].block * kHopperRows;
    if (expert < 0) return;
    for_each_step(g, memory, shared, shape, place, [&](uint64_t* full, uint32_t to, int k) {
      arrive_expecting(full, kHopperRows * kHopperRowBytes);
      copy_box<kPairs>(boxes, to, full, k, row, expert);
    });
  }
}

// One thread. Of rows in a row, those behind the tile's last meet nothing real.
__device__ __forceinline__ void copy_token_boxes(const Gemm& g, const CUtensorMap& boxes, char* memory,
                                                 HopperShared& shared, HopperShape shape) {
  prepare(boxes);
  start_early();
  RingPlace place, item;
  for (;; item.advance(kItems)) {
    wait_barrier(&shared.found[item.stage], item.parity);
    if (shared.work[item.stage].tile.expert < 0) return;
    const int first = shared.work[item.stage].tile.first;
    const int parts = ceil_div(shared.work[item.stage].tile.count, kTokenBox);
    for_each_step(g, memory, shared, shape, place, [&](uint64_t* full, uint32_t to, int k) {
      arrive_expecting(full, parts * kTokenBox * kHopperRowBytes);
      for (int i = 0; i < parts; ++i)
        copy_row_box(boxes, to + (kHopperRows + i * kTokenBox) * kHopperRowBytes, full, k, first + i * kTokenBox);
    });
  }
}

template <class T>
__device__ __forceinline__ void copy_tokens(const Gemm& g, char* memory, HopperShared& shared, HopperShape shape) {
  constexpr int kApart = kTokenThreads / 8, kTokenRows = kHopperTokens / kApart;
  const int thread = threadIdx.x % kTokenThreads, row = thread / 8, piece = thread % 8;
  start_early();
  RingPlace place, item;
  for (;; item.advance(kItems)) {
    wait_barrier(&shared.noted[item.stage], item.parity);
    if (shared.work[item.stage].tile.expert < 0) return;
    const T* tokens[kTokenRows];
#pragma unroll
    for (int i = 0; i < kTokenRows; ++i) {
      const int from = shared.rows[item.stage][row + kApart * i];
      tokens[i] = from < 0 ? nullptr : (const T*)g.x + from * g.x_stride;
    }
    for_each_step(g, memory, shared, shape, place, [&](uint64_t* full, uint32_t to, int step) {
      const int k = step + piece * 8;
      const bool inside = k < g.k;  // beyond, zeros; rows that nobody has stay as they are: they meet nothing real
#pragma unroll
      for (int i = 0; i < kTokenRows; ++i)
        if (tokens[i])
          copy_async(to + hopper_piece(kHopperRows + row + kApart * i, piece), inside ? tokens[i] + k : tokens[i],
                     inside);
      arrive_after_copies(full);
    });
  }
}

// ---- the warps that multiply ----------------------------------------------------------------------------------------

// Results of 64 weight rows, the unit-th, of 2 bytes each: turned by stmatrix, so that 16 bytes of a token's columns
// leave at once. barrier: the group's.
template <class T, class Out, bool kPairs, int kTokens>
__device__ __forceinline__ void store_turned(const Gemm& g, const float (&sum)[kTokens / 2], const HopperShared& shared,
                                             char* memory, int turn, int barrier, int64_t unit, int count,
                                             bool wide_out) {
  constexpr int kPieces = kPairs ? 4 : 8;  // of a token, 8 columns each
  constexpr int kRound = kHopperOutBytes / 16 / kPieces;
  const int warp = threadIdx.x / kWarp % 4, lane = threadIdx.x % kWarp, c = lane % 4;
  const uint32_t to = shared_address(memory);
  float bias[2] = {};  // of this lane's rows
  if (!kPairs && g.bias)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t n = unit * 64 + 16 * warp + lane / 4 + 8 * h;
      if (n < g.n) bias[h] = to_f32(((const T*)g.bias)[n]);
    }
  const auto piece_of = [](int token, int piece) {  // eight tokens' pieces meet all banks
    return (token * kPieces + (piece ^ (kPairs ? token / 2 % 4 : token % 8))) * 16;
  };
#pragma unroll
  for (int first = 0; first < kTokens; first += kRound) {
#pragma unroll
    for (int t = first; t < min(first + kRound, kTokens); t += 32) {
      uint32_t low[4], high[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float* v = sum + (t / 8 + m) * 4;
        const float2 scale = *(const float2*)&shared.scales[turn][t + 8 * m + 2 * c];
        if (kPairs) {
          const bool swap = g.up_first;  // values, not addresses: what has an address goes to local memory
          low[m] = pack<Out>(finish_pair(swap ? v[2] : v[0], swap ? v[0] : v[2], scale.x),
                             finish_pair(swap ? v[3] : v[1], swap ? v[1] : v[3], scale.y));
        } else {
          low[m] = pack<Out>(fmaf(v[0], scale.x, bias[0]), fmaf(v[1], scale.y, bias[0]));
          high[m] = pack<Out>(fmaf(v[2], scale.x, bias[1]), fmaf(v[3], scale.y, bias[1]));
        }
      }
      store_transposed(to + piece_of(t - first + lane, kPairs ? warp : 2 * warp), low);
      if (!kPairs) store_transposed(to + piece_of(t - first + lane, 2 * warp + 1), high);
    }
    sync_warpgroup(barrier);
#pragma unroll 4
    for (int i = threadIdx.x % kWarpgroup; i < kRound * kPieces; i += kWarpgroup) {
      const int token = first + i / kPieces, piece = i % kPieces;
      if (token >= count) break;
      const int64_t n = unit * (8 * kPieces) + 8 * piece, row = shared.places[turn][token];
      if (n >= g.n || row < 0) continue;
      const Out* const values = (const Out*)(memory + piece_of(i / kPieces, piece));
      Out* const at = (Out*)g.out + row * g.out_stride + n;
      if (wide_out && n + 8 <= g.n) {
        *(Pack<Out, 8>*)at = *(const Pack<Out, 8>*)values;
      } else {
#pragma unroll 1
        for (int j = 0; j < 8 && n + j < g.n; ++j) at[j] = values[j];
      }
    }
    sync_warpgroup(barrier);
  }
}

// Float32 results: eight lanes are eight neighbouring columns already.
template <bool kPairs, int kTokens>
__device__ __forceinline__ void store_floats(const Gemm& g, const float (&sum)[kTokens / 2], const HopperShared& shared,
                                             int turn, int64_t unit) {
  const int warp = threadIdx.x / kWarp % 4, lane = threadIdx.x % kWarp;
  const int64_t n = unit * (kPairs ? 32 : 64) + warp * (kPairs ? 8 : 16) + lane / 4;
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    asm volatile("" ::: "memory");  // else all tokens' places are loaded at once, and spilled
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 8 * j + lane % 4 * 2 + i;
      const int64_t row = shared.places[turn][token];
      const float scale = shared.scales[turn][token];
      float* const at = (float*)g.out + row * g.out_stride;
      if (row < 0) continue;
      if (kPairs) {
        const float first = sum[4 * j + i], second = sum[4 * j + 2 + i];
        if (n < g.n) at[n] = g.up_first ? finish_pair(second, first, scale) : finish_pair(first, second, scale);
      } else {
        if (n < g.n) at[n] = sum[4 * j + i] * scale;
        if (n + 8 < g.n) at[n + 8] = sum[4 * j + 2 + i] * scale;
      }
    }
  }
}

template <class T, class Out, bool kPairs, int kTokens>
__device__ __forceinline__ void multiply_item(const Gemm& g, char* memory, HopperShared& shared, HopperShape shape,
                                              RingPlace& place, int turn, const Work& work, bool wide_out) {
  constexpr int kUnitBytes = 64 * kHopperRowBytes;
  const int group = threadIdx.x / kWarpgroup - 1, steps = ceil_div(g.k, kHopperK);
  const bool speaks = threadIdx.x % kWarp == 0;
  float sum[kUnits][kTokens / 2] = {};
#pragma unroll
  for (int m = 0; m < kUnits; ++m) pin(sum[m]);
  int before = 0;
  for (int step = 0; step < steps; ++step) {
    wait_barrier(&shared.full[place.stage], place.parity);
    if (!shape.boxed) fence_shared_for_wgmma();
    const uint32_t from = shared_address(memory) + place.stage * shape.stage_bytes();
    const uint64_t a = descriptor(from + group * kUnits * kUnitBytes);
    const uint64_t b = descriptor(from + kHopperRows * kHopperRowBytes);
    begin_wgmma();
#pragma unroll
    for (int k = 0; k < kHopperK / 16; ++k)  // 32 bytes on, in units of 16
#pragma unroll
      for (int m = 0; m < kUnits; ++m) Wgmma<T>::run(sum[m], a + 2 * k + m * (kUnitBytes / 16), b + 2 * k);
    commit_wgmma();
    if (step > 0) {
      wait_wgmma<1>();
      if (speaks) arrive(&shared.empty[before]);
    }
    before = place.stage;
    place.advance(shape.stages);
  }
  wait_wgmma<0>();
#pragma unroll
  for (int m = 0; m < kUnits; ++m) pin(sum[m]);
  if (speaks) arrive(&shared.empty[before]);
  char* const turned = memory + shape.stages * shape.stage_bytes() + group * kHopperOutBytes;
#pragma unroll
  for (int m = 0; m < kUnits; ++m) {
    const int64_t unit = (int64_t(work.block) * 2 + group) * kUnits + m;
    if constexpr (sizeof(Out) == 2)
      store_turned<T, Out, kPairs, kTokens>(g, sum[m], shared, turned, turn, 1 + group, unit, work.tile.count,
                                            wide_out);
    else
      store_floats<kPairs, kTokens>(g, sum[m], shared, turn, unit);
  }
}
#endif

template <class T, class Out, bool kPairs>
__global__ void __launch_bounds__(kHopperThreads, 1) hopper_kernel(
    const Gemm g, const __grid_constant__ CUtensorMap boxes, const __grid_constant__ CUtensorMap token_boxes,
    const HopperShape shape, const bool wide_out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char memory[];
  HopperShared& shared = *(HopperShared*)(memory + shape.stages * shape.stage_bytes() + 2 * kHopperOutBytes);
  constexpr int kMultiplying = 2 * kWarpgroup / kWarp;
  if (threadIdx.x == 0) {
    for (int i = 0; i < shape.stages; ++i) {
      init_barrier(&shared.full[i], shape.boxed ? 2 : 1 + kTokenThreads);
      init_barrier(&shared.empty[i], kMultiplying);
    }
    for (int i = 0; i < kItems; ++i) {
      init_barrier(&shared.found[i], 1);
      init_barrier(&shared.noted[i], kWarp);
      init_barrier(&shared.done[i], kMultiplying);
    }
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    give_registers<104>();
    const int warp = threadIdx.x / kWarp;
    if (warp == 0) return find_items<kPairs>(g, shared, shape);
    if (warp == 1) {
      if (threadIdx.x % kWarp == 0) copy_weights<kPairs>(g, boxes, memory, shared, shape);
      return;
    }
    if (!shape.boxed) return copy_tokens<T>(g, memory, shared, shape);
    if (threadIdx.x == kTokenThreads) copy_token_boxes(g, token_boxes, memory, shared, shape);
    return;
  }
  take_registers<200>();
  start_early();
  RingPlace place, item;
  for (;; item.advance(kItems)) {
    wait_barrier(&shared.noted[item.stage], item.parity);
    const Work work = shared.work[item.stage];
    if (work.tile.expert < 0) break;
    if (work.tile.count <= 64)
      multiply_item<T, Out, kPairs, 64>(g, memory, shared, shape, place, item.stage, work, wide_out);
    else if (work.tile.count <= 96)
      multiply_item<T, Out, kPairs, 96>(g, memory, shared, shape, place, item.stage, work, wide_out);
    else
      multiply_item<T, Out, kPairs, 128>(g, memory, shared, shape, place, item.stage, work, wide_out);
    __syncwarp();
    if (threadIdx.x % kWarp == 0) arrive(&shared.done[item.stage]);
  }
#else
  __trap();  // gemm_tile.cuh has the other archs
#endif
}

// Whether launch_hopper() takes it, with boxes of its weights; else gemm_tile.cuh does.
template <bool kPairs> bool hopper_takes(const Gemm& g, CUtensorMap& boxes) {
  return capability() == 90 && describe_boxes<kPairs>(g, kHopperRows, boxes);
}

// Items of 256 weight rows and `width` tokens: 64 or 128.
template <class T, class Out, bool kPairs>
int launch_hopper(Gemm g, const CUtensorMap& boxes, int width, int64_t most_tiles, void* stream) {
  CUtensorMap token_boxes = {};
  HopperShape shape = {width, kHopperStages, describe_row_boxes(g, kTokenBox, token_boxes)};
  while (shape.bytes() > shared_memory_limit()) --shape.stages;
  const int64_t items = most_tiles * ceil_div<int64_t>(rows_in_all<kPairs>(g), kHopperRows);
  if (items > INT32_MAX) return kBadArgument;
  g.up_first = kPairs && g.up < g.w;
  return launch_early(hopper_kernel<T, Out, kPairs>, dim3(unsigned(min(items, int64_t(sm_count())))),
                      dim3(kHopperThreads), size_t(shape.bytes()), stream, g, boxes, token_boxes, shape,
                      aligned(16, sizeof(Out), g.out, g.out_stride));
}

}  // namespace
