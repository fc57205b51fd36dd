// sm_90a: 256 weight rows by up to 128 tokens, wgmma. One group of four warps copies, two multiply, half of the
// rows each, as many columns wide as the tile has tokens, in steps of 64. Weights come as boxes by the copy engine
// (gemm_boxes.cuh), which takes one thread and lets memory never wait; tokens, which lie anywhere, 16 bytes at a time.
// Stages of 64 of k pass between the warps by barriers in shared memory; what an item is (its tile, where its results
// go) passes the same way, so that the multiplying warps never wait for memory. Blocks stay and take the next item from
// a counter, as items differ in width. The copying warps look up the next item, its tile, its slots and their scales,
// step by step, while copies of the current one run.
#pragma once
#include "gemm.cuh"
#include "gemm_boxes.cuh"
#include "gemm_wgmma.cuh"

namespace {

constexpr int kHopperK = kBoxK, kHopperRows = 256, kUnits = kHopperRows / 128;  // kUnits: of 64 rows, per group
constexpr int kHopperTokens = 128, kHopperStages = 8;                          // at most
constexpr int kHopperGroup = 128, kHopperThreads = 3 * kHopperGroup;
constexpr int kHopperRowBytes = kHopperK * 2, kHopperOutBytes = 8192;  // kHopperOutBytes: where a group turns results

struct HopperShared {
  uint64_t full[kHopperStages], empty[kHopperStages];
  uint64_t told[2];  // the multiplying warps are done with an item's entries below
  Work work[2];      // expert -1: no more
  int64_t places[2][kHopperTokens];
  float scales[2][kHopperTokens];
  int next[2];
};

// Shared memory: stages of the weight rows and `width` tokens each, results of the two groups, HopperShared.
struct HopperShape {
  int width, stages;
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

template <class T, bool kPairs>
__device__ __forceinline__ void copy_items(const Gemm& g, const CUtensorMap& boxes, char* memory, HopperShared& shared,
                                           HopperShape shape, int tiles, int blocks) {
  constexpr int kTokenRows = kHopperTokens / 16;  // of a thread: every 16th
  const int row = threadIdx.x / 8, piece = threadIdx.x % 8;
  const int items = tiles * blocks, steps = ceil_div(g.k, kHopperK);

  // The next item, found out in five steps, each of which only needs what the one before has loaded.
  constexpr int kLookUps = 5;
  int next = blockIdx.x, taken = 0, slot, rows[kTokenRows];
  float scale;
  Work work;
  const auto row_of = [&](int i) {
    const int slot = slot_at(g, work.tile, i);
    return slot < 0 ? -1 : g.by_slot_in ? slot / g.top_k : work.tile.first + i;
  };
  const auto look_up = [&](int step, int turn) {
    switch (step) {
      case 0:
        if (threadIdx.x == 0) taken = g.counter ? atomicAdd(g.counter, 1) + int(gridDim.x) : next + int(gridDim.x);
        break;
      case 1:
        if (threadIdx.x == 0) shared.next[turn] = taken;
        meet<kHopperGroup>(1);
        next = shared.next[turn];
        break;
      case 2:
        for (; next < items; next += gridDim.x) {  // past what is to be skipped, which no counted item is
          work = work_at(g, next, tiles, blocks, shape.width);
          if (work.tile.expert >= 0 && work.tile.count > 0) break;
        }
        break;
      case 3:
        if (next >= items) break;
        slot = slot_at(g, work.tile, threadIdx.x);
#pragma unroll
        for (int i = 0; i < kTokenRows; ++i) rows[i] = row_of(row + 16 * i);
        break;
      case 4:
        if (next < items) scale = slot >= 0 && g.scale ? g.scale[slot] : 1.0f;
        break;
    }
  };
  for (int i = 2; i < kLookUps; ++i) look_up(i, 0);

  RingPlace place;
  const auto publish = [&] {
    arrive_after_copies(&shared.full[place.stage]);
    __syncwarp();
    if (threadIdx.x % kWarp == 0) arrive(&shared.full[place.stage]);
    place.advance(shape.stages);
  };
  int turn = 0, told_parity = 1;
  for (;; turn ^= 1) {
    wait_for(&shared.told[turn], told_parity);
    if (turn) told_parity ^= 1;
    if (next >= items) break;
    if (threadIdx.x == 0) shared.work[turn] = work;
    shared.places[turn][threadIdx.x] = slot < 0 ? -1 : g.by_slot_out ? slot : work.tile.first + int(threadIdx.x);
    shared.scales[turn][threadIdx.x] = scale;
    const int first_row = work.block * kHopperRows, expert = work.tile.expert;
    const T* tokens[kTokenRows];
#pragma unroll
    for (int i = 0; i < kTokenRows; ++i) tokens[i] = rows[i] < 0 ? nullptr : (const T*)g.x + rows[i] * g.x_stride;

    for (int step = 0; step < max(steps, kLookUps); ++step) {
      if (step < steps) {
        wait_for(&shared.empty[place.stage], place.parity ^ 1);
        const uint32_t to = shared_address(memory) + place.stage * shape.stage_bytes();
        if (threadIdx.x == 0) {
          expect_bytes(&shared.full[place.stage], kHopperRows * kHopperRowBytes);
          copy_box<kPairs>(boxes, to, &shared.full[place.stage], step * kHopperK, first_row, expert);
        }
        const int k = step * kHopperK + piece * 8;
        const bool inside = k < g.k;  // beyond, zeros; rows that nobody has stay as they are: they meet nothing real
#pragma unroll
        for (int i = 0; i < kTokenRows; ++i)
          if (tokens[i])
            copy_async(to + hopper_piece(kHopperRows + row + 16 * i, piece), inside ? tokens[i] + k : tokens[i], inside);
        publish();
      }
      if (step < kLookUps) look_up(step, turn);
    }
  }
  if (threadIdx.x == 0) shared.work[turn].tile.expert = -1;
  wait_for(&shared.empty[place.stage], place.parity ^ 1);
  publish();
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
    meet<kHopperGroup>(barrier);
#pragma unroll 4
    for (int i = threadIdx.x % kHopperGroup; i < kRound * kPieces; i += kHopperGroup) {
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
    meet<kHopperGroup>(barrier);
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
  const int group = threadIdx.x / kHopperGroup - 1, steps = ceil_div(g.k, kHopperK);
  const bool speaks = threadIdx.x % kWarp == 0;
  float sum[kUnits][kTokens / 2] = {};
#pragma unroll
  for (int m = 0; m < kUnits; ++m) hold(sum[m]);
  int before = 0;
  for (int step = 0; step < steps; ++step) {
    wait_for(&shared.full[place.stage], place.parity);
    show_to_wgmma();
    const uint32_t from = shared_address(memory) + place.stage * shape.stage_bytes();
    const uint64_t a = descriptor(from + group * kUnits * kUnitBytes), b = descriptor(from + kHopperRows * kHopperRowBytes);
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
  for (int m = 0; m < kUnits; ++m) hold(sum[m]);
  if (speaks) arrive(&shared.empty[before]);
  char* const turned = memory + shape.stages * shape.stage_bytes() + group * kHopperOutBytes;
#pragma unroll
  for (int m = 0; m < kUnits; ++m) {
    const int64_t unit = (int64_t(work.block) * 2 + group) * kUnits + m;
    if constexpr (sizeof(Out) == 2)
      store_turned<T, Out, kPairs, kTokens>(g, sum[m], shared, turned, turn, 2 + group, unit, work.tile.count,
                                            wide_out);
    else
      store_floats<kPairs, kTokens>(g, sum[m], shared, turn, unit);
  }
}
#endif

template <class T, class Out, bool kPairs>
__global__ void __launch_bounds__(kHopperThreads, 1) hopper_kernel(
    const Gemm g, const __grid_constant__ CUtensorMap boxes, const HopperShape shape, const bool wide_out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char memory[];
  HopperShared& shared = *(HopperShared*)(memory + shape.stages * shape.stage_bytes() + 2 * kHopperOutBytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < shape.stages; ++i) {
      init_barrier(&shared.full[i], kHopperGroup + kHopperGroup / kWarp);
      init_barrier(&shared.empty[i], 2 * kHopperGroup / kWarp);
    }
    for (int i = 0; i < 2; ++i) init_barrier(&shared.told[i], 2 * kHopperGroup / kWarp);
    publish_barriers();
  }
  __syncthreads();
  start_early();
  if (threadIdx.x < kHopperGroup) {
    give_registers<104>();
    const int tiles = count_tiles(g, shape.width), blocks = int(ceil_div<int64_t>(rows_in_all<kPairs>(g), kHopperRows));
    copy_items<T, kPairs>(g, boxes, memory, shared, shape, tiles, blocks);
    return;
  }
  take_registers<200>();
  RingPlace place;
  for (int turn = 0;; turn ^= 1) {
    wait_for(&shared.full[place.stage], place.parity);
    const Work work = shared.work[turn];
    if (work.tile.expert < 0) break;
    if (work.tile.count <= 64)
      multiply_item<T, Out, kPairs, 64>(g, memory, shared, shape, place, turn, work, wide_out);
    else
      multiply_item<T, Out, kPairs, 128>(g, memory, shared, shape, place, turn, work, wide_out);
    __syncwarp();
    if (threadIdx.x % kWarp == 0) arrive(&shared.told[turn]);
  }
#else
  __trap();  // gemm_tile.cuh has the other archs
#endif
}

// Whether launch_hopper() takes it; else gemm_tile.cuh does.
template <bool kPairs> bool hopper_takes(const Gemm& g) {
  CUtensorMap boxes;
  return capability() == 90 && describe_boxes<kPairs>(g, kHopperRows, boxes);
}

// Items of 256 weight rows and `width` tokens, 64 or 128.
template <class T, class Out, bool kPairs>
int launch_hopper(Gemm g, int width, int64_t most_tiles, void* stream) {
  HopperShape shape = {width, kHopperStages};
  while (shape.bytes() > shared_memory_limit()) --shape.stages;
  const int64_t items = most_tiles * ceil_div<int64_t>(rows_in_all<kPairs>(g), kHopperRows);
  CUtensorMap boxes;
  if (items > INT32_MAX || !describe_boxes<kPairs>(g, kHopperRows, boxes)) return kBadArgument;
  g.up_first = kPairs && g.up < g.w;
  return launch_early(hopper_kernel<T, Out, kPairs>, dim3(unsigned(min(items, int64_t(sm_count())))),
                      dim3(kHopperThreads), size_t(shape.bytes()), stream, g, boxes, shape,
                      aligned(16, sizeof(Out), g.out, g.out_stride));
}

}  // namespace
