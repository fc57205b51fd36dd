// paged_attention_v2: decode over a paged cache, one query token per sequence.
//
// Bound by reading each sequence's keys and values once, 2 L HK D elements: with 4 flops per element and query of its
// group, arithmetic is far from its limit. What counts is that many bytes are in flight, and evenly spread:
//
//   work      A unit is a key head and up to 8 of the queries that read it. The tokens of all sequences, in tiles of
//             16, form one line, which the blocks of a unit share out evenly, whatever the lengths: a block takes a
//             stretch of the line, part of a sequence or several. Each finds its own from seq_lens.
//   warps     take a stretch's tiles in turns, each with its own pipeline of asynchronous copies and without a barrier:
//             two tiles of keys and values are on their way while the third is in use.
//   products  by mma.sync with keys, or dimensions of values, as its 16 rows and queries as its 8 columns: S^T = K q^T,
//             O^T += V^T P^T. No row is wasted, and P^T is S^T's registers with each 8 x 8 transposed. There is time
//             to add P's rounding error as a second P: weights are as good as in float32.
//   joining   A sequence within one stretch is done. Of others, blocks leave float32 sums, at most two each: one of the
//             stretch's first sequence, one of its last. A second kernel joins them in order.
#include <algorithm>

#include "paged_attention.cuh"

namespace {

// Tokens [begin, end) of a sequence, `last` its last one
struct Stretch {
  const int32_t* table;
  int begin, end, last;
};

// Sums of a warp over its keys, C fragments of [D,8]; high and total of queries 2 (lane % 4) and the next
template <int D> struct Sums {
  float out[D / 16][4], high[2], total[2];
};

__device__ int tiles_of(const Attention& p, int sequence) {
  const int length = p.lengths[sequence];
  return length > 0 ? ceil_div(length - p.first_seen(length - 1), kTile) : 0;
}

// This warp's share of a stretch
template <class T, int D>
__device__ __forceinline__ void attend(const Attention& p, const Unit& unit, const T* q, const Stretch& stretch,
                                       uint32_t pipeline, Sums<D>& sums) {
  constexpr int kWarps = Shape<D>::kWarps, kBytes = Shape<D>::kTileBytes;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, begin = stretch.begin + warp * kTile;
  const int count = stretch.end > begin ? ceil_div(stretch.end - begin, kTile * kWarps) : 0;  // tiles
  const TokenCopies<T, D, kTile> copies(p, unit.kv_head);
  auto slot = [&](int i) { return copies.slot(stretch.table, begin + i * kTile * kWarps, stretch.end); };
  auto copy = [&](int i, Slot from) {
    if (i < count) {
      const auto place = copies.place(from);
      const uint32_t to = pipeline + i % kStages * 2 * kBytes;
      copies.keys(place, to, 0);
      copies.values(place, to + kBytes, 0);
    }
    commit_copies();
  };

  Slot next = slot(0);
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    const Slot now = next;
    next = slot(i + 1);
    copy(i, now);
  }

  uint32_t query[D / 16][2];
  const int column = lane / 4;
#pragma unroll
  for (int k = 0; k < D / 16; ++k)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int d = k * 16 + half * 8 + lane % 4 * 2;
      query[k][half] = 0;
      if (column < unit.queries && d < p.size)
        query[k][half] = *(const uint32_t*)(q + (unit.first_head + column) * p.q_head + d);
    }
  float slope[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int of_pair = lane % 4 * 2 + i;
    slope[i] = of_pair < unit.queries ? p.slope(unit.first_head + of_pair) : 0.0f;
    sums.high[i] = -INFINITY;
    sums.total[i] = 0;
  }
#pragma unroll
  for (int j = 0; j < D / 16; ++j) sums.out[j][0] = sums.out[j][1] = sums.out[j][2] = sums.out[j][3] = 0;

  const int key_row = lane % 16, value_row = lane % 8 + lane / 16 * 8;
  for (int i = 0; i < count; ++i) {
    wait_copies<kStages - 2>();
    __syncwarp();
    const Slot now = next;
    next = slot(i + kStages);
    copy(i + kStages - 1, now);

    const uint32_t tile = pipeline + i % kStages * 2 * kBytes;
    float s[4][4] = {};  // four sums, for no mma to wait for the one before
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t a[4];
      load_matrices(a, tile + chunk_at<kTile>(key_row, lane / 16, k * 2));
      mma<T>(s[k % 4], a, query[k][0], query[k][1]);
    }
    float x[4];
    const int token = begin + i * kTile * kWarps + lane / 4;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int key = token + e / 2 * 8;
      const float dot = (s[0][e] + s[1][e]) + (s[2][e] + s[3][e]);
      x[e] = key < stretch.end ? score_of<true>(p, dot, slope[e % 2], key - stretch.last) : -INFINITY;
    }
    float high[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      high[c] = fmaxf(x[c], x[c + 2]);
#pragma unroll
      for (int offset = 4; offset < kWarp; offset *= 2)
        high[c] = fmaxf(high[c], __shfl_xor_sync(kAllLanes, high[c], offset));
    }
    if (__any_sync(kAllLanes, high[0] > sums.high[0] || high[1] > sums.high[1])) {
      float fade[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        fade[c] = high[c] > sums.high[c] ? fast_exp2(sums.high[c] - high[c]) : 1.0f;
        sums.high[c] = fmaxf(sums.high[c], high[c]);
        sums.total[c] *= fade[c];
      }
#pragma unroll
      for (int j = 0; j < D / 16; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums.out[j][e] *= fade[e % 2];
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[e] = fast_exp2(x[e] - (shift_of(sums.high[e % 2]) - kHeadroom<T>));
      sums.total[e % 2] += x[e];
    }
    uint32_t weights[2], rests[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      weights[h] = pack<T>(x[2 * h], x[2 * h + 1]);
      const Pack<T, 2> rounded = unpack<T>(weights[h]);
      rests[h] = transpose(pack<T>(x[2 * h] - to_f32(rounded.at[0]), x[2 * h + 1] - to_f32(rounded.at[1])));
      weights[h] = transpose(weights[h]);
    }
#pragma unroll
    for (int j = 0; j < D / 16; ++j) {
      uint32_t a[4];
      load_transposed(a, tile + kBytes + chunk_at<kTile>(value_row, lane / 8 % 2, j * 2));
      mma<T>(sums.out[j], a, weights[0], weights[1]);
      mma<T>(sums.out[j], a, rests[0], rests[1]);
    }
  }
  wait_copies<0>();
  __syncwarp();
#pragma unroll
  for (int c = 0; c < 2; ++c)
#pragma unroll
    for (int offset = 4; offset < kWarp; offset *= 2)
      sums.total[c] += __shfl_xor_sync(kAllLanes, sums.total[c], offset);
}

template <class T, int D>
__global__ void __launch_bounds__(Shape<D>::kThreads, Shape<D>::kResident)
    decode_kernel(const __grid_constant__ Attention p, const __grid_constant__ Shares shares) {
  constexpr int kWarps = Shape<D>::kWarps, kThreads = Shape<D>::kThreads, kBytes = Shape<D>::kPipelineBytes;
  constexpr int kPitch = D + 4;  // no two lanes' sums in one bank
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ int warp_tiles[kWarps], first_sequence, first_tile;
  start_early();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int worker = blockIdx.x / shares.units;
  const Unit unit(p, blockIdx.x % shares.units);

  // the line: each thread counts the tiles of a few sequences
  const int each = ceil_div(p.sequences, kThreads);
  const int from = min(p.sequences, int(threadIdx.x) * each), to = min(p.sequences, from + each);
  int own = 0;
  for (int b = from; b < to; ++b) own += tiles_of(p, b);
  int before = own;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const int below = __shfl_up_sync(kAllLanes, before, offset);
    if (lane >= offset) before += below;
  }
  if (lane == kWarp - 1) warp_tiles[warp] = before;
  __syncthreads();
  before -= own;
  int total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += warp_tiles[w];
    total += warp_tiles[w];
  }
  if (blockIdx.x == 0) {
    for (int b = from, at = before; b < to; ++b) {
      shares.firsts[b] = at;
      at += tiles_of(p, b);
    }
    if (threadIdx.x == 0) shares.firsts[p.sequences] = total;
  }
  const int share = shares.tiles(total), begin = worker * share, end = min(total, begin + share);
  if (begin >= end) return;
  if (before <= begin && begin < before + own) {
    int b = from, at = before;
    for (int tiles; at + (tiles = tiles_of(p, b)) <= begin; ++b) at += tiles;
    first_sequence = b;
    first_tile = at;
  }
  __syncthreads();

  uint8_t* pipeline = memory + warp * kBytes;
  for (int b = first_sequence, first = first_tile, at = begin; at < end; ++b) {
    const int tiles = tiles_of(p, b), until = min(end, first + tiles);
    if (until <= at) continue;  // a sequence of length 0
    const int length = p.lengths[b], origin = p.first_seen(length - 1);
    const Stretch stretch{p.tables + b * p.table_row, origin + (at - first) * kTile,
                          min(length, origin + (until - first) * kTile), length - 1};
    const bool whole = at == first && until == first + tiles;
    const T* q = (const T*)p.q + b * p.q_token;
    T* out = (T*)p.out + (int64_t(b) * p.heads + unit.first_head) * p.size;
    float* record = shares.record<D>(worker, blockIdx.x % shares.units, at == begin ? 0 : 1);

    Sums<D> sums;
    attend<T, D>(p, unit, q, stretch, shared_address(pipeline), sums);
    float* mine = (float*)pipeline;
#pragma unroll
    for (int j = 0; j < D / 16; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        mine[(lane % 4 * 2 + e % 2) * kPitch + j * 16 + lane / 4 + e / 2 * 8] = sums.out[j][e];
    if (lane < 4) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        mine[kQueries * kPitch + lane * 2 + c] = sums.high[c] - kHeadroom<T>;
        mine[kQueries * kPitch + kQueries + lane * 2 + c] = sums.total[c];
      }
    }
    __syncthreads();

    bool odd = false;
    for (int i = threadIdx.x; i < unit.queries * D / 4; i += kThreads) {
      const int query = i / (D / 4), d = i % (D / 4) * 4;
      auto of_warp = [&](int w) { return (const float*)(memory + w * kBytes); };
      float high = -INFINITY, sum = 0;
      Pack<float, 4> x = {};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) high = fmaxf(high, of_warp(w)[kQueries * kPitch + query]);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float* from_warp = of_warp(w);
        const float weight = fast_exp2(from_warp[kQueries * kPitch + query] - shift_of(high));
        const auto values = *(const Pack<float, 4>*)(from_warp + query * kPitch + d);
        sum += weight * from_warp[kQueries * kPitch + kQueries + query];
#pragma unroll
        for (int e = 0; e < 4; ++e) x.at[e] += weight * values.at[e];
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) odd |= !isfinite(x.at[e]) && isfinite(sum);
      if (whole && d < p.size) {
        Pack<T, 4> result;
#pragma unroll
        for (int e = 0; e < 4; ++e) result.at[e] = from_f32<T>(x.at[e] / sum);
        *(Pack<T, 4>*)(out + query * p.size + d) = result;
      }
      if (!whole) {
        *(Pack<float, 4>*)(record + query * D + d) = x;
        if (d == 0) *(Pack<float, 2>*)(record + kQueries * D + query * 2) = {high, sum};
      }
    }

    // NaN and infinite values, of which a weight in two parts makes NaN at best: such sums are made again in float32.
    if (__syncthreads_or(odd)) {
      for (int query = warp; query < unit.queries; query += kWarps) {
        const int head = unit.first_head + query;
        RowSum row;
        attend_row(p, q + head * p.q_head, stretch.table, head, stretch.last, stretch.begin, stretch.end, 0, 1, row);
#pragma unroll
        for (int i = 0; i < D / kWarp; ++i) {
          const int d = lane + i * kWarp;
          if (whole && d < p.size) out[query * p.size + d] = from_f32<T>(row.out[i] / row.total);
          if (!whole) record[query * D + d] = row.out[i];
        }
        if (!whole && lane == 0) *(Pack<float, 2>*)(record + kQueries * D + query * 2) = {row.high, row.total};
      }
    }
    __syncthreads();
    at = until;
    first += tiles;
  }
}

template <class T, int D> int decode(const Attention& p, void* records, int* firsts, int64_t blocks, void* stream) {
  constexpr int warps = Shape<D>::kWarps, shared = warps * Shape<D>::kPipelineBytes;
  const int units = p.kv_heads * ceil_div(p.heads / p.kv_heads, kQueries);
  const int resident = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) /
                       (shared + 256 + attribute(cudaDevAttrReservedSharedMemoryPerBlock));
  const int64_t most = std::min<int64_t>(blocks, sm_count() * std::clamp(resident, 1, Shape<D>::kResident));
  const Shares shares{(float*)records, firsts, units, int(std::max<int64_t>(1, most / units)), warps};
  const int status = launch_early(decode_kernel<T, D>, dim3(units * shares.workers), dim3(warps * kWarp), shared, stream, p,
                            shares);
  if (status != kOk) return status;
  const int64_t rows = p.rows * p.heads;
  const int join_warps = rows < sm_count() * kJoinWarps ? kJoinWarps : 1;  // of a row
  return launch_early(join_kernel<T, D>, dim3(ceil_div<int64_t>(rows * join_warps, kJoinWarps)),
                      dim3(kJoinWarps * kWarp), 0, stream, p, shares, join_warps);
}

}  // namespace

// q [sequences,heads,size], caches [blocks,block_size,kv_heads,size] at the strides given, dimension by dimension
// (innermost 1); tables [sequences,...] with rows at table_row; out contiguous. Scratch: records float32
// [record_blocks,2,8,256 + 2], of at least one block per key head and 8 queries; firsts int32 [sequences + 1].
extern "C" int OPSHIM(paged_attention_v2)(
    const void* q, const void* keys, const void* values, const int32_t* tables, const int32_t* lengths,
    const float* slopes, void* out, void* records, int32_t* firsts, int64_t record_blocks, int64_t dtype,
    int64_t sequences, int64_t heads, int64_t kv_heads, int64_t size, int64_t blocks, int64_t block_size,
    int64_t table_width, int64_t table_row, int64_t q_token, int64_t q_head, int64_t k_block, int64_t k_token,
    int64_t k_head, int64_t v_block, int64_t v_token, int64_t v_head, double scale, double softcap, int64_t window,
    int64_t device, void* stream) {
  OnDevice on(device);
  if (size > kMaxSize) return kBadArgument;
  if (sequences == 0 || heads == 0) return kOk;
  const Attention p = attention(q, keys, values, tables, nullptr, lengths, slopes, out, sequences, sequences, heads,
                                kv_heads, size, block_size, table_row, q_token, q_head, k_block, k_token, k_head,
                                v_block, v_token, v_head, scale, softcap, window);
  if (dtype == kF32 || !copies_in_chunks(p)) return attend_rows(p, dtype, stream);
  auto with = [&](auto t) {
    using T = decltype(t);
    if (size <= 64) return decode<T, 64>(p, records, firsts, record_blocks, stream);
    if (size <= 128) return decode<T, 128>(p, records, firsts, record_blocks, stream);
    return decode<T, 256>(p, records, firsts, record_blocks, stream);
  };
  return dtype == kF16 ? with(f16{}) : with(bf16{});
}
