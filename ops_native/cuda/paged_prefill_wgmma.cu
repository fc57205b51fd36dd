// paged_prefill on sm_90a: products by wgmma, copies by warps of their own, in the manner of FlashAttention-3
// (arXiv:2407.08608).
//
// Bound by arithmetic: 4 size flops per query row and key. A block is three warpgroups. One copies tiles of keys and
// values out of their pages, two stages of each. The other two own 64 query rows each: while one computes weights, the
// other's products run, for which they take turns up to a size of 128 (beyond, products take long enough). Each starts
// the scores of the next keys before it adds up the values of the last, so that its own tensor cores need not wait for
// its weights either.
#include "attention_wgmma.cuh"
#include "paged_prefill.cuh"

namespace {

constexpr int kStages = 2, kConsumers = 2, kThreads = (1 + kConsumers) * kWarpgroup, kRows = kConsumers * 64;

template <int D> struct Shape {
  static constexpr int kKeys = D == 256 ? 64 : 128;
  static constexpr int kQueryBytes = kRows * D * 2, kKeyBytes = kKeys * D * 2;
  static constexpr int kBytes = 1024 + kQueryBytes + 2 * kStages * kKeyBytes + 4 * kStages * 8;  // 1024: to align
};

// What is where in shared memory. Each stage of keys and of values has a barrier for "it is there" and one for "it is
// used up".
template <int D> struct Layout {
  uint32_t queries;

  __device__ explicit Layout(const void* memory) : queries((shared_address(memory) + 1023) / 1024 * 1024) {}
  __device__ uint32_t keys(int tile) const { return queries + Shape<D>::kQueryBytes + stage(tile) * kBytes; }
  __device__ uint32_t values(int tile) const { return keys(tile) + kStages * kBytes; }
  __device__ uint32_t keys_there(int tile) const { return barriers() + stage(tile) * 32; }
  __device__ uint32_t keys_used(int tile) const { return keys_there(tile) + 8; }
  __device__ uint32_t values_there(int tile) const { return keys_there(tile) + 16; }
  __device__ uint32_t values_used(int tile) const { return keys_there(tile) + 24; }
  static __device__ uint32_t parity(int tile) { return tile / kStages % 2; }

 private:
  static constexpr int kBytes = Shape<D>::kKeyBytes;
  static __device__ int stage(int tile) { return tile % kStages; }
  __device__ uint32_t barriers() const { return queries + Shape<D>::kQueryBytes + 2 * kStages * kBytes; }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kCopyRegisters = 72, kProductRegisters = 216;  // of 168 that each thread starts with

template <class T, int D>
__device__ __forceinline__ void copy_tiles(const Attention& p, const QueryTile& tile, const KeyRange& range,
                                           const Layout<D>& at) {
  constexpr int kKeys = Shape<D>::kKeys, kUnits = kKeys / 64;  // of 16 tokens per warp
  const int warp = threadIdx.x / kWarp, tiles = ceil_div(range.high - range.low, kKeys);
  const int32_t* table = p.tables + tile.sequence * p.table_row;
  const TokenCopies<T, D, kKeys> copies(p, tile.kv_head);
  auto slot = [&](int i, int unit) {
    return copies.slot(table, range.low + i * kKeys + (unit * 4 + warp) * 16, range.high);
  };
  Slot next[kUnits];
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) next[unit] = slot(0, unit);
  for (int i = 0; i < tiles; ++i) {
    typename TokenCopies<T, D, kKeys>::Place place[kUnits];
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      place[unit] = copies.place(next[unit]);
      next[unit] = slot(i + 1, unit);
    }
    wait_barrier(at.keys_used(i), at.parity(i) ^ 1);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) copies.keys(place[unit], at.keys(i), (unit * 4 + warp) * 16);
    arrive_after_copies(at.keys_there(i));
    wait_barrier(at.values_used(i), at.parity(i) ^ 1);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) copies.values(place[unit], at.values(i), (unit * 4 + warp) * 16);
    arrive_after_copies(at.values_there(i));
  }
  commit_copies();
  wait_copies<0>();
}

// The two groups that multiply hand each other the tensor cores: one starts products while the other has weights to
// compute, and they stay in step.
constexpr int kTurnBarrier = 3;  // and 4
__device__ __forceinline__ void wait_turn(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(kTurnBarrier + group), "n"(kConsumers * kWarpgroup) : "memory");
}
__device__ __forceinline__ void give_turn(int group) {
  asm volatile("bar.arrive %0, %1;" ::"r"(kTurnBarrier + group), "n"(kConsumers * kWarpgroup) : "memory");
}

template <class T, int D>
__device__ __forceinline__ void attend(const Attention& p, const QueryTile& tile, const KeyRange& range,
                                       const Layout<D>& at, uint8_t* queries) {
  constexpr int kKeys = Shape<D>::kKeys;
  const int group = threadIdx.x / kWarpgroup - 1, warp = threadIdx.x % kWarpgroup / kWarp, lane = threadIdx.x % kWarp;
  const int tiles = ceil_div(range.high - range.low, kKeys);
  constexpr bool kTurns = D <= 128;
  if (kTurns && group == 1) give_turn(0);
  copy_queries<T, D, kRows>(p, tile, at.queries, group * 64, 64, threadIdx.x % kWarpgroup, kWarpgroup);
  commit_copies();
  wait_copies<0>();
  fence_shared_for_wgmma();
  sync_warpgroup(1 + group);

  auto there = [&](uint32_t barrier, int i) {
    wait_barrier(barrier, at.parity(i));
    fence_shared_for_wgmma();
  };
  auto used = [&](uint32_t barrier) {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  };
  float s[kKeys / 2], out[D / 2] = {};
  uint32_t weights[kKeys / 16][4];
  const uint64_t query = descriptor(at.queries + group * 64 * 128);
  auto start_scores = [&](int i) {
    there(at.keys_there(i), i);
    const uint64_t key = descriptor(at.keys(i));
    pin(s);
    begin_wgmma();
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
      Wgmma<T, kKeys>::shared(s, query + (k / 4 * kRows * 128 + k % 4 * 32) / 16,
                              key + (k / 4 * kKeys * 128 + k % 4 * 32) / 16, k > 0);
    commit_wgmma();
  };
  auto start_values = [&](int i) {
    there(at.values_there(i), i);
    const uint64_t value = descriptor(at.values(i), kKeys * 128);
    pin(out);
    begin_wgmma();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) Wgmma<T, D>::mixed(out, weights[k], value + k * 16 * 128 / 16);
    commit_wgmma();
  };
  auto round_weights = [&] {
    pin(s);
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) weights[i / 4][i % 4] = pack<T>(s[i * 2], s[i * 2 + 1]);
  };

  Rows rows(p, tile, group * 64 + warp * 16);
  start_scores(0);
  wait_wgmma<0>();
  for (int i = 0;;) {
    pin(s);
    used(at.keys_used(i));
    const bool higher = rows.template weigh<T, kKeys>(p, tile, range, range.low + i * kKeys, s);
    wait_wgmma<0>();
    pin(out);
    if (i > 0) used(at.values_used(i - 1));
    if (higher) rows.fade_out(out);
    round_weights();
    if (++i == tiles) break;
    if (kTurns) wait_turn(group);
    start_scores(i);
    start_values(i - 1);
    if (kTurns) give_turn(1 - group);
    wait_wgmma<1>();
  }
  start_values(tiles - 1);
  wait_wgmma<0>();
  pin(out);
  sync_warpgroup(1 + group);
  if (kTurns && group == 0) wait_turn(0);  // nobody leaves a barrier half full
  rows.template write<T, D, kRows>(p, tile, out, queries);
}

#endif

template <class T, int D>
__global__ void __launch_bounds__(kThreads, 1) prefill_kernel(const __grid_constant__ Attention p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t memory[];
  const Layout<D> at(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(at.keys_there(i), kWarpgroup);
      init_barrier(at.values_there(i), kWarpgroup);
      init_barrier(at.keys_used(i), kConsumers * 4);
      init_barrier(at.values_used(i), kConsumers * 4);
    }
  }
  // What is looked up first, one after the other, comes into the L2 cache at once. That is no read: the kernel before
  // may still write it.
  if (int(threadIdx.x) < p.sequences) {
    const int sequence = threadIdx.x;
    const int32_t* const wanted[] = {p.bounds + sequence, p.lengths + sequence, p.tables + sequence * p.table_row};
#pragma unroll
    for (const int32_t* one : wanted) asm volatile("prefetch.global.L2 [%0];" ::"l"(one) : "memory");
  }
  start_early();
  const QueryTile tile = query_tile(p, tile_in_turn(p, gridDim.x / p.kv_heads, blockIdx.x / p.kv_heads, kRows),
                                    blockIdx.x % p.kv_heads, kRows);
  if (tile.rows == 0) return;
  const KeyRange range(p, tile);
  if (range.high <= 0) return write_zeros<T>(p, tile, threadIdx.x, kThreads);

  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    give_registers<kCopyRegisters>();
    copy_tiles<T, D>(p, tile, range, at);
  } else {
    take_registers<kProductRegisters>();
    attend<T, D>(p, tile, range, at, memory + (at.queries - shared_address(memory)));
  }
#else
  __trap();  // compiled for sm_90 instead of sm_90a
#endif
}

template <class T, int D> int prefill(const Attention& p, void* stream) {
  return launch_early(prefill_kernel<T, D>, dim3(query_tiles(p, kRows) * p.kv_heads), dim3(kThreads), Shape<D>::kBytes,
                      stream, p);
}

}  // namespace

int opshim::prefill_by_wgmma(const Attention& p, int64_t dtype, void* stream) {
  auto with = [&](auto t) {
    using T = decltype(t);
    if (p.size <= 64) return prefill<T, 64>(p, stream);
    if (p.size <= 128) return prefill<T, 128>(p, stream);
    return prefill<T, 256>(p, stream);
  };
  return dtype == kF16 ? with(f16{}) : with(bf16{});
}
