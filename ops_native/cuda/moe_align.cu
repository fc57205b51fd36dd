// moe_align_block_size: a stable counting sort of the slots by expert, without an atomic whose order could show.
//
// The slots are cut into chunks of consecutive ones, for a block of threads each, and these into one part per warp. A
// warp counts its slots per expert in a table of its own, and finds a slot's rank among the equals before it by
// comparing experts across its lanes. Sums over the warps' tables, over the experts (each group filled up to a block)
// and over the counts of earlier chunks give every slot its place. The filling is written first, the slots over it.
// One chunk is one launch; for several, a first one counts theirs (the binding cuts from 2048 slots on).
//
// Reads the ids twice and writes each entry once or twice, all of it in the second-level cache: bound by latency.
#include "opshim.cuh"

#include <algorithm>

namespace {

constexpr int kMostWarps = 32, kItems = 8;  // slots per lane at most
constexpr int kTable = 32768;               // most counts in a block's tables, 64 KB

struct Problem {
  const int32_t* ids;
  const int32_t* map;  // or null
  int32_t* sorted;
  int32_t* experts_of_blocks;
  int32_t* padded;
  int32_t* counts;  // [chunks,experts], where there are several chunks
  int64_t slots, capacity, blocks, per_chunk;
  int block_size, experts;
};

// The slot's expert, or -1 for none.
__device__ __forceinline__ int expert_of(const Problem& p, int64_t slot) {
  int id = p.ids[slot];
  if (p.map && 0 <= id && id < p.experts) id = p.map[id];
  return id < p.experts ? id : -1;
}

__device__ __forceinline__ void fill(const Problem& p) {
  const int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = first; i < p.capacity; i += stride) p.sorted[i] = int32_t(p.slots);
  for (int64_t i = first; i < p.blocks; i += stride) p.experts_of_blocks[i] = -1;
}

// The sum of x over the block's earlier threads; `all` becomes that over all threads.
__device__ __forceinline__ int sum_before(int x, int& all) {
  __shared__ int sums[kMostWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  int upto = x;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const int other = __shfl_up_sync(kAllLanes, upto, offset);
    if (lane >= offset) upto += other;
  }
  if (lane == kWarp - 1) sums[warp] = upto;
  __syncthreads();
  int before = 0;
  all = 0;
  for (int w = 0; w < warps; ++w) {
    before += w < warp ? sums[w] : 0;
    all += sums[w];
  }
  return before + upto - x;
}

// counts[chunk,e]: the chunk's slots of expert e; and the filling of the outputs.
__global__ void __launch_bounds__(kMostWarps* kWarp) count_kernel(const Problem p) {
  extern __shared__ int table[];
  start_early();
  for (int e = threadIdx.x; e < p.experts; e += blockDim.x) table[e] = 0;
  fill(p);
  __syncthreads();
  const int64_t begin = blockIdx.x * p.per_chunk, end = min(begin + p.per_chunk, p.slots);
#pragma unroll 4
  for (int64_t slot = begin + threadIdx.x; slot < end; slot += blockDim.x) {
    const int e = expert_of(p, slot);
    if (e >= 0) atomicAdd(&table[e], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.experts; e += blockDim.x) p.counts[int64_t(blockIdx.x) * p.experts + e] = table[e];
}

__global__ void __launch_bounds__(kMostWarps* kWarp) place_kernel(const Problem p) {
  extern __shared__ int shared[];
  start_early();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int* place = shared;                           // [experts]: where the chunk's slots of an expert begin
  int* total = place + p.experts;                // [experts]: its slots in all chunks
  auto* table = (uint16_t*)(total + p.experts);  // [warps,experts]: its slots in a warp, then in those before
  uint16_t* own = table + warp * p.experts;

  const int64_t begin = blockIdx.x * p.per_chunk, end = min(begin + p.per_chunk, p.slots);
  const int items = int(ceil_div<int64_t>(end - begin, blockDim.x));
  const int used = items == 0 ? 0 : int(ceil_div<int64_t>(end - begin, items * kWarp));  // warps that have slots
  const int64_t first = begin + int64_t(warp) * items * kWarp + lane;
  int expert[kItems], rank[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int64_t slot = first + i * kWarp;
    expert[i] = i < items && slot < end ? expert_of(p, slot) : -1;
  }
  if (gridDim.x == 1) fill(p);
  if (warp < used)
    for (int e = lane; e < p.experts; e += kWarp) own[e] = 0;
  for (int e = threadIdx.x; e < p.experts; e += blockDim.x) place[e] = total[e] = 0;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (i >= items) break;
    const unsigned equals = __match_any_sync(kAllLanes, expert[i]);
    if (expert[i] >= 0) rank[i] = own[expert[i]] + __popc(equals & ((1u << lane) - 1));
    __syncwarp();
    if (expert[i] >= 0 && equals >> lane == 1) own[expert[i]] = uint16_t(rank[i] + 1);  // the last of the equals
    __syncwarp();
  }
  __syncthreads();

  if (gridDim.x > 1) {  // the chunks' counts, by as many threads per expert as there are
    const int parts = max(1, int(blockDim.x) / p.experts);
    for (int i = threadIdx.x; i < parts * p.experts; i += blockDim.x) {
      const int e = i % p.experts;
      int before = 0, all = 0;
#pragma unroll 8
      for (unsigned chunk = i / p.experts; chunk < gridDim.x; chunk += parts) {
        const int count = p.counts[int64_t(chunk) * p.experts + e];
        before += chunk < blockIdx.x ? count : 0;
        all += count;
      }
      atomicAdd(&place[e], before);
      atomicAdd(&total[e], all);
    }
    __syncthreads();
  }

  const int share = ceil_div<int>(p.experts, blockDim.x), from = threadIdx.x * share;
  int blocks = 0;
  for (int e = from; e < min(from + share, p.experts); ++e) {
    int sum = 0;
    for (int w = 0; w < used; w += kItems) {
      int count[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) count[i] = w + i < used ? table[(w + i) * p.experts + e] : 0;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (w + i < used) table[(w + i) * p.experts + e] = uint16_t(sum);
        sum += count[i];
      }
    }
    if (gridDim.x == 1) total[e] = sum;
    blocks += ceil_div(total[e], p.block_size);
  }
  int all;
  int block = sum_before(blocks, all);
  for (int e = from; e < min(from + share, p.experts); ++e) {
    place[e] += block * p.block_size;
    block += ceil_div(total[e], p.block_size);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.padded = all * p.block_size;
  __syncthreads();

#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (i >= items) break;
    if (expert[i] < 0) continue;
    const unsigned at = place[expert[i]] + own[expert[i]] + rank[i], block_of = at / unsigned(p.block_size);
    p.sorted[at] = int32_t(first + i * kWarp);
    if (at == block_of * p.block_size) p.experts_of_blocks[block_of] = expert[i];  // the first of its block
  }
}

}  // namespace

// ids [slots]; map [experts] or null -> sorted_ids [capacity], expert_ids [capacity / block_size], padded [1]. counts:
// scratch [chunks,experts]; a chunk holds at most 256 slots for each of its min(32, 32768 / experts) warps.
extern "C" int OPSHIM(moe_align_block_size)(
    const int32_t* ids, const int32_t* map, int32_t* sorted_ids, int32_t* expert_ids, int32_t* padded, int32_t* counts,
    int64_t slots, int64_t block_size, int64_t experts, int64_t capacity, int64_t chunks, int64_t device,
    void* stream) {
  const int64_t per_chunk = ceil_div(slots, chunks);
  const int64_t wanted = std::max({ceil_div<int64_t>(per_chunk, kWarp), ceil_div<int64_t>(experts, kWarp), int64_t(8)});
  const int64_t warps = std::min({wanted, int64_t(kMostWarps), kTable / experts});  // few: barriers cost by the warp
  if (warps == 0 || per_chunk > warps * kWarp * kItems) return kBadArgument;
  OnDevice on(device);
  const Problem p{ids,      map,       sorted_ids, expert_ids,      padded,      counts, slots, capacity,
                  capacity / block_size, per_chunk, int(block_size), int(experts)};
  const dim3 grid(chunks), block(warps * kWarp);
  if (chunks > 1) {
    const int status = launch_early(count_kernel, grid, block, experts * sizeof(int), stream, p);
    if (status) return status;
  }
  const size_t shared = experts * (2 * sizeof(int) + warps * sizeof(uint16_t));
  return launch_early(place_kernel, grid, block, shared, stream, p);
}
