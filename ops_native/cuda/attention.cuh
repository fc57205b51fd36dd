// Attention over a paged cache: the problem, where its tokens lie, a score, and one row by one warp in float32.
//
// Scores are kept in powers of two: x = log2(e) s, and a weight is 2^(x - high). Keys that a row does not see have the
// weight 0, which is not enough where their values are not finite: 0 * NaN is NaN. The fast kernels fill what lies
// outside of a sequence with zeros as they copy it, and leave rows that come out non-finite to `attend_row`.
#pragma once
#include "attention_mma.cuh"

namespace opshim {  // what one file hands to another

constexpr int kMaxSize = 256;  // of a head
constexpr float kLog2e = 1.4426950408889634f;

struct Cache {
  const void* data;
  int64_t block, token, head;  // strides
};

struct Attention {
  const void* q;  // [rows,heads,size]
  int64_t q_token, q_head;
  Cache keys, values;
  const int32_t* tables;  // [sequences,...], rows apart by table_row
  int64_t table_row;
  const int32_t* lengths;  // [sequences]
  const int32_t* bounds;   // [sequences + 1] of q's rows; null for decode, where row b is the last token of sequence b
  const float* slopes;     // [heads] or null
  void* out;               // [rows,heads,size], contiguous
  int64_t rows;
  int sequences, heads, kv_heads, size, block_size;
  int window;        // 0 for none
  float cap, inner;  // softcap, or 0; scale / softcap
  float gain;        // powers of two per unit of q.k, or of tanh(inner q.k) where there is a cap

  __device__ int group() const { return heads / kv_heads; }
  __device__ int first_seen(int position) const { return window > 0 ? max(0, position - window + 1) : 0; }
  __device__ float slope(int head) const { return slopes ? slopes[head] * kLog2e : 0.0f; }
};

// Any dtype, size and alignment: one block per row and head (paged_attention_rows.cu).
int attend_rows(const Attention& p, int64_t dtype, void* stream);
// Prefill in halves that `copies_in_chunks`, on sm_90a (paged_prefill_wgmma.cu).
int prefill_by_wgmma(const Attention& p, int64_t dtype, void* stream);

}  // namespace opshim

namespace {

using namespace opshim;

inline Attention attention(
    const void* q, const void* keys, const void* values, const int32_t* tables, const int32_t* bounds,
    const int32_t* lengths, const float* slopes, void* out, int64_t rows, int64_t sequences, int64_t heads,
    int64_t kv_heads, int64_t size, int64_t block_size, int64_t table_row, int64_t q_token, int64_t q_head,
    int64_t k_block, int64_t k_token, int64_t k_head, int64_t v_block, int64_t v_token, int64_t v_head, double scale,
    double softcap, int64_t window) {
  const double log2e = 1.4426950408889634, gain = (softcap > 0 ? softcap : scale) * log2e;
  return {q, q_token, q_head, {keys, k_block, k_token, k_head}, {values, v_block, v_token, v_head}, tables, table_row,
          lengths, bounds, slopes, out, rows, int(sequences), int(heads), int(kv_heads), int(size), int(block_size),
          window > INT32_MAX ? 0 : int(window), float(softcap), softcap > 0 ? float(scale / softcap) : 0.0f,
          float(gain)};
}

// Every token's head begins at a multiple of 16 bytes, and ends at one: what the fast kernels need.
inline bool copies_in_chunks(const Attention& p) {
  const Cache &k = p.keys, &v = p.values;
  return aligned(16, 2, k.data, k.block, k.token, k.head) && aligned(16, 2, v.data, v.block, v.token, v.head) &&
         aligned(16, 2, p.q, p.q_token, p.q_head) && p.size % 8 == 0;
}

// Where a token's key or value lies, in elements
struct Slot {
  int block, offset;

  __device__ int64_t in(const Cache& cache) const { return block * cache.block + offset * cache.token; }
};
__device__ __forceinline__ Slot slot_of(const Attention& p, const int32_t* table, int token) {
  const unsigned page = unsigned(token) / unsigned(p.block_size);
  return {table[page], int(token - page * p.block_size)};
}

// Tiles in shared memory are panels of 64 dimensions: rows of 128 bytes, in which the chunk c of 16 bytes lies at
// c ^ (row % 8). Neither copies nor ldmatrix meet in a bank, and it is the layout that wgmma calls 128-byte swizzle.
template <int kTileRows> __device__ __forceinline__ uint32_t chunk_at(int row, int chunk) {
  return chunk / 8 * kTileRows * 128 + row * 128 + (chunk ^ row) % 8 * 16;
}
// Chunk `chunk` + `pair`, 0 or 1 that a lane chooses; where `chunk` is a constant, four addresses serve all.
template <int kTileRows> __device__ __forceinline__ uint32_t chunk_at(int row, int pair, int chunk) {
  return row * 128 + ((pair ^ row % 8) ^ chunk % 8) * 16 + chunk / 8 * kTileRows * 128;
}

// How a warp copies 16 tokens of one key head: lanes 0 to 15 know where their keys lie, 16 to 31 their values, and each
// lane copies one chunk of every row, or of every second or fourth. Tokens outside of a range come as zeros.
template <class T, int D, int kTileRows> class TokenCopies {
 public:
  static constexpr int kTokens = 16;

  struct Place {
    int64_t at;  // of this lane's token; -1 where there is none
    bool even;   // all are there, at even distances: they lie in one page
  };

  __device__ TokenCopies(const Attention& p, int kv_head) : p_(p) {
    const int lane = threadIdx.x % kWarp;
    row_ = lane / kChunks;
    chunk_ = lane % kChunks;
    keys_ = (const T*)p.keys.data + kv_head * p.keys.head + chunk_ * 8;
    values_ = (const T*)p.values.data + kv_head * p.values.head + chunk_ * 8;
  }
  // This lane's part of the 16 tokens from `token` on; reads the block table, so ask early.
  __device__ Slot slot(const int32_t* table, int token, int end) const {
    token += threadIdx.x % kTokens;
    return token < end ? slot_of(p_, table, token) : Slot{-1, 0};
  }
  __device__ Place place(Slot slot) const {
    const int lane = threadIdx.x % kWarp;
    const int64_t block = lane < kTokens ? p_.keys.block : p_.values.block;
    const int64_t token = lane < kTokens ? p_.keys.token : p_.values.token;
    const int64_t at = slot.block < 0 ? -1 : slot.block * block + slot.offset * token;
    const int64_t first = __shfl_sync(kAllLanes, at, lane & kTokens);
    return {at, bool(__all_sync(kAllLanes, at >= 0 && at == first + lane % kTokens * token))};
  }

  // Into rows `row` to row + 15, row a multiple of 16, of the tile at `to`
  __device__ __forceinline__ void keys(Place place, uint32_t to, int row) const {
    copy(keys_, p_.keys.token, place, 0, to, row);
  }
  __device__ __forceinline__ void values(Place place, uint32_t to, int row) const {
    copy(values_, p_.values.token, place, kTokens, to, row);
  }

 private:
  static constexpr int kChunks = D / 8, kRows = kWarp / kChunks;

  __device__ __forceinline__ void copy(const T* base, int64_t token, Place place, int first_lane, uint32_t to,
                                       int row) const {
    const bool real = chunk_ * 8 < p_.size;
    to += row * 128 + row_ * 128 + chunk_ / 8 * kTileRows * 128;
    auto chunk_of = [&](int r) { return to + r * 128 + (chunk_ ^ row_ ^ r) % 8 * 16; };
    if (place.even) {
      const T* from = base + __shfl_sync(kAllLanes, place.at, first_lane) + row_ * token;
#pragma unroll
      for (int r = 0; r < kTokens; r += kRows, from += kRows * token) copy_async(chunk_of(r), from, real);
    } else {
#pragma unroll 4
      for (int r = 0; r < kTokens; r += kRows) {
        const int64_t at = __shfl_sync(kAllLanes, place.at, first_lane + r + row_);
        copy_async(chunk_of(r), at < 0 ? base : base + at, real && at >= 0);
      }
    }
  }

  const Attention& p_;
  const T *keys_, *values_;
  int row_, chunk_;
};

// Within 2e-7 of tanh, which is as good as it gets for a score
__device__ __forceinline__ float fast_tanh(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + fast_exp2(2 * kLog2e * x));
}
template <bool kFast>
__device__ __forceinline__ float score_of(const Attention& p, float dot, float slope, int distance) {
  const float capped = p.cap > 0 ? (kFast ? fast_tanh(dot * p.inner) : tanhf(dot * p.inner)) : dot;
  return capped * p.gain + slope * float(distance);
}

// What weights are taken relative to: while a row has seen only -inf, 0, so that 2^(-inf) is 0 and not NaN. A row that
// never sees more ends as 0 / 0; one that sees +inf has 2^(inf - inf): NaN, as softmax has it.
__device__ __forceinline__ float shift_of(float high) { return high == -INFINITY ? 0.0f : high; }

// Weights in float16 are multiplied by 2^14: they keep their precision down to 2^-28, and are lost below 2^-38.
template <class T> constexpr float kHeadroom = 0;
template <> constexpr float kHeadroom<f16> = 14;

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = kWarp / 2; offset; offset /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}

// Weighted sum of values, the largest score, the sum of weights. Lane l holds dimensions l, l + 32, ...
struct RowSum {
  float out[kMaxSize / kWarp], high, total;
};

// One query row of `head` at `position` by one warp: batches of 32 keys of [begin, end), each `step`-th from `batch`
// on. A score is a sum over lanes; then lanes hold a key's weight each, and then dimensions again.
template <class T>
__device__ __noinline__ void attend_row(const Attention& p, const T* q, const int32_t* table, int head, int position,
                                        int begin, int end, int batch, int step, RowSum& result) {
  constexpr int kParts = kMaxSize / kWarp;
  const int lane = threadIdx.x % kWarp, kv_head = head / p.group();
  const T* keys = (const T*)p.keys.data + kv_head * p.keys.head + lane;
  const T* values = (const T*)p.values.data + kv_head * p.values.head + lane;
  const float slope = p.slope(head);
  RowSum sum;
  float query[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    query[i] = lane + i * kWarp < p.size ? to_f32(q[lane + i * kWarp]) : 0.0f;
    sum.out[i] = 0;
  }
  sum.high = -INFINITY;
  sum.total = 0;
  for (int64_t start = begin + int64_t(batch) * kWarp; start < end; start += int64_t(step) * kWarp) {
    const int token = int(start) + lane, count = min(kWarp, end - int(start));
    const Slot slot = lane < count ? slot_of(p, table, token) : Slot{};
    const int64_t key_at = slot.in(p.keys), value_at = slot.in(p.values);
    float x = -INFINITY;
#pragma unroll 2
    for (int k = 0; k < count; ++k) {
      const T* key = keys + __shfl_sync(kAllLanes, key_at, k);
      float dot = 0;
#pragma unroll
      for (int i = 0; i < kParts; ++i)
        if (lane + i * kWarp < p.size) dot += query[i] * to_f32(key[i * kWarp]);
      dot = warp_sum(dot);
      if (lane == k) x = score_of<false>(p, dot, slope, token - position);
    }
    const float high = fmaxf(sum.high, warp_max(x)), shift = shift_of(high);
    const float fade = high > sum.high ? exp2f(sum.high - high) : 1.0f;
    const float weight = lane < count ? exp2f(x - shift) : 0.0f;
    float part[kParts] = {};
#pragma unroll 2
    for (int k = 0; k < count; ++k) {
      const T* value = values + __shfl_sync(kAllLanes, value_at, k);
      const float w = __shfl_sync(kAllLanes, weight, k);
#pragma unroll
      for (int i = 0; i < kParts; ++i)
        if (lane + i * kWarp < p.size) part[i] += w * to_f32(value[i * kWarp]);
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) sum.out[i] = sum.out[i] * fade + part[i];
    sum.total = sum.total * fade + warp_sum(weight);
    sum.high = high;
  }
  result = sum;
}

}  // namespace
