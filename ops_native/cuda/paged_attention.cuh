// Decode's division of work, and the kernel that joins what blocks have left of one sequence (paged_attention.cu).
#pragma once
#include "attention.cuh"

namespace {

constexpr int kTile = 16, kQueries = 8, kStages = 3, kJoinWarps = 8;

template <int D> struct Shape {
  static constexpr int kWarps = D == 256 ? 3 : 4, kThreads = kWarps * kWarp;
  static constexpr int kResident = D == 64 ? 3 : 2;  // blocks per SM, where its shared memory holds them
  static constexpr int kTileBytes = kTile * D * 2, kPipelineBytes = kStages * 2 * kTileBytes;  // of a warp
  static constexpr int kRecord = kQueries * (D + 2);  // floats: sums [8,D], then (high, total) [8,2]
};

// How each unit's line of tiles is shared out among its blocks, "workers", and what they leave
struct Shares {
  float* records;  // [workers,units,2,record]
  int* firsts;     // [sequences + 1]: where each sequence begins in the line
  int units, workers, least;  // blocks per unit; the fewest tiles that are worth a block

  __device__ int tiles(int total) const { return max(least, ceil_div(total, workers)); }
  template <int D> __device__ float* record(int worker, int unit, int slot) const {
    return records + ((int64_t(worker) * units + unit) * 2 + slot) * Shape<D>::kRecord;
  }
};

// A key head, and up to 8 of the query heads that read it
struct Unit {
  int kv_head, first_head, queries;

  __device__ Unit(const Attention& p, int unit) {
    const int parts = ceil_div(p.group(), kQueries), first = unit % parts * kQueries;
    kv_head = unit / parts;
    first_head = kv_head * p.group() + first;
    queries = min(kQueries, p.group() - first);
  }
};

// Joins the records of one row and head in `warps` warps, 1 or all of a block, each of which takes them in turns.
template <class T, int D>
__global__ void __launch_bounds__(kJoinWarps* kWarp)
    join_kernel(const __grid_constant__ Attention p, const __grid_constant__ Shares shares, int warps) {
  constexpr int kWide = D / kWarp < 4 ? D / kWarp : 4, kPacks = D / kWarp / kWide;
  __shared__ float sums[kJoinWarps][D], totals[kJoinWarps];
  wait_for_previous();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % warps;
  const int64_t row = (int64_t(blockIdx.x) * kJoinWarps + threadIdx.x / kWarp) / warps;
  if (row >= p.rows * p.heads) return;
  const int b = int(row / p.heads), head = int(row % p.heads), in_group = head % p.group();
  const int unit = head / p.group() * ceil_div(p.group(), kQueries) + in_group / kQueries, query = in_group % kQueries;
  const int begin = shares.firsts[b], end = shares.firsts[b + 1], share = shares.tiles(shares.firsts[p.sequences]);
  const int first = begin / share, last = (end - 1) / share;  // workers
  if (begin < end && first == last) return;                   // done already

  auto record_of = [&](int worker) { return shares.record<D>(worker, unit, worker * share >= begin ? 0 : 1); };
  Pack<float, kWide> out[kPacks] = {};
  float total = 0;
  if (begin < end) {
    float high = -INFINITY;
    for (int worker = first + lane; worker <= last; worker += kWarp)
      high = fmaxf(high, record_of(worker)[kQueries * D + query * 2]);
    const float shift = shift_of(warp_max(high));
#pragma unroll 8
    for (int worker = first + warp; worker <= last; worker += warps) {
      const float* record = record_of(worker);
      const auto sum = *(const Pack<float, 2>*)(record + kQueries * D + query * 2);
      const float weight = fast_exp2(sum.at[0] - shift);
      total += weight * sum.at[1];
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const auto values = *(const Pack<float, kWide>*)(record + query * D + (i * kWarp + lane) * kWide);
#pragma unroll
        for (int e = 0; e < kWide; ++e) out[i].at[e] += weight * values.at[e];
      }
    }
  }
  if (warps > 1) {  // then the whole block has this row
#pragma unroll
    for (int i = 0; i < kPacks; ++i) *(Pack<float, kWide>*)(sums[warp] + (i * kWarp + lane) * kWide) = out[i];
    if (lane == 0) totals[warp] = total;
    __syncthreads();
    if (warp > 0) return;
    for (int w = 1; w < warps; ++w) {
      total += totals[w];
#pragma unroll
      for (int i = 0; i < kPacks; ++i)
#pragma unroll
        for (int e = 0; e < kWide; ++e) out[i].at[e] += sums[w][(i * kWarp + lane) * kWide + e];
    }
  }
  T* to = (T*)p.out + row * p.size;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int d = (i * kWarp + lane) * kWide;
    Pack<T, kWide> result;
#pragma unroll
    for (int e = 0; e < kWide; ++e) result.at[e] = from_f32<T>(begin < end ? out[i].at[e] / total : 0.0f);
    if (d < p.size) *(Pack<T, kWide>*)(to + d) = result;
  }
}

}  // namespace
