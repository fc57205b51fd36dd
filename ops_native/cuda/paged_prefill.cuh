// What the kernels of paged_prefill share: tiles of query rows, masks, and the softmax carried along row by row.
//
// The queries that read one key head are rows of a matrix: token by token, its group of heads side by side. A tile of
// rows spans few tokens, hence little of the diagonal is computed in vain, and a group reads its keys once.
#pragma once
#include "attention.cuh"

namespace {

// Rows [first, first + rows) of a sequence's matrix, for one key head. Its tokens are q's rows from `q_row` on, the
// first at `position` of the sequence: negative where it has more tokens than its length.
struct QueryTile {
  int sequence, kv_head, first, rows, position;
  int64_t q_row;

  __device__ int token(const Attention& p, int row) const { return (first + row) / p.group(); }
  __device__ int head(const Attention& p, int row) const { return kv_head * p.group() + (first + row) % p.group(); }
  __device__ int position_of(const Attention& p, int row) const { return position + token(p, row); }
  template <class T> __device__ const T* query(const Attention& p, int row) const {
    return (const T*)p.q + (q_row + token(p, row)) * p.q_token + head(p, row) * p.q_head;
  }
  template <class T> __device__ T* out(const Attention& p, int row) const {
    return (T*)p.out + ((q_row + token(p, row)) * p.heads + head(p, row)) * p.size;
  }
};

// Tiles of `rows` query rows, at most so many, whatever the bounds. The rows before the first sequence and after the
// last count as sequences without keys. Sequence i's tiles are numbered from rows_before(i) / rows + i on, hence
// disjoint, and found by bisection.
inline int64_t query_tiles(const Attention& p, int rows) {
  return p.rows * (p.heads / p.kv_heads) / rows + p.sequences + 2;
}
__device__ inline QueryTile query_tile(const Attention& p, int64_t tile, int kv_head, int rows) {
  auto edge = [&](int i) { return i == 0 ? 0 : i <= p.sequences + 1 ? int64_t(p.bounds[i - 1]) : p.rows; };
  auto number = [&](int i) { return edge(i) * p.group() / rows + i; };
  int low = 0, high = p.sequences + 2;  // number(low) <= tile < number(high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (number(middle) <= tile ? low : high) = middle;
  }
  const int64_t begin = edge(low), count = edge(low + 1) - begin, first = (tile - number(low)) * rows;
  const bool real = low > 0 && low <= p.sequences;
  const int length = real ? p.lengths[low - 1] : 0;
  const int64_t here = count * p.group() - first;
  return {low - 1, kv_head, int(first), int(here < 0 ? 0 : here < rows ? here : rows), int(length - count), begin};
}

// Which tile has the i-th turn: the last sequence's last goes first, as it sees most. The tiles at the end of the
// numbers, which have no rows, go last: two, or one where the last one that has some is cut.
__device__ inline unsigned tile_in_turn(const Attention& p, unsigned tiles, unsigned i, int rows) {
  const unsigned last = tiles - (p.rows * (p.heads / p.kv_heads) % rows ? 2 : 3);
  return i <= last ? last - i : tiles + last - i;
}

// The way of a thread through a tile's rows, `step` apart, by additions: a division per row costs more than its copy.
class RowWalk {
 public:
  __device__ __forceinline__ RowWalk(const Attention& p, const QueryTile& tile, int row, int step)
      : group_(p.group()), step_tokens_(step / group_), step_heads_(step % group_) {
    token_ = (tile.first + row) / group_;
    head_ = (tile.first + row) % group_;
  }
  __device__ __forceinline__ void next() {
    token_ += step_tokens_;
    head_ += step_heads_;
    if (head_ >= group_) {
      head_ -= group_;
      ++token_;
    }
  }
  template <class T> __device__ __forceinline__ const T* query(const Attention& p, const QueryTile& tile) const {
    return (const T*)p.q + (tile.q_row + token_) * p.q_token + (tile.kv_head * group_ + head_) * p.q_head;
  }
  template <class T> __device__ __forceinline__ T* out(const Attention& p, const QueryTile& tile) const {
    return (T*)p.out + ((tile.q_row + token_) * p.heads + tile.kv_head * group_ + head_) * p.size;
  }

 private:
  int group_, step_tokens_, step_heads_, token_, head_;
};

// Keys [low, high) are what a tile's rows see; rows see all of [all_low, all_high).
struct KeyRange {
  int low, high, all_low, all_high;

  __device__ KeyRange(const Attention& p, const QueryTile& tile) {
    const int last = tile.position_of(p, tile.rows - 1), first = max(0, tile.position_of(p, 0));
    low = p.first_seen(first);
    high = last + 1;
    all_low = p.first_seen(last);
    all_high = first + 1;
  }
};

// The softmax of a thread's two rows, lane / 4 of 16 from `first` on and that plus 8: their largest scores so far,
// before `gain`, and their sums of weights, of which each of four lanes has a part.
struct Rows {
  static constexpr int kFew = 16;  // keys
  int first, position[2];
  float high[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0}, fade[2];

  __device__ Rows(const Attention& p, const QueryTile& tile, int first) : first(first) {
#pragma unroll
    for (int h = 0; h < 2; ++h) position[h] = row(h) < tile.rows ? tile.position_of(p, row(h)) : -1;
  }
  __device__ int row(int half) const { return first + threadIdx.x % kWarp / 4 + half * 8; }
  __device__ float sum(int half) const {
    const float two = total[half] + __shfl_xor_sync(kAllLanes, total[half], 1);
    return two + __shfl_xor_sync(kAllLanes, two, 2);
  }

  // Scores of these 16 rows and kKeys keys from `start` on become weights. Whether a row of the warp has a higher score
  // now: then what it has summed up counts `fade` times.
  template <class T, int kKeys>
  __device__ __forceinline__ bool weigh(const Attention& p, const QueryTile& tile, const KeyRange& range, int start,
                                        float (&s)[kKeys / 2]) {
    const bool forms = p.cap > 0 || p.slopes || !(p.gain > 0);  // more than a factor between q.k and the score
    const float gain = forms ? 1.0f : p.gain;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = position[h], first_key = start + threadIdx.x % 4 * 2;
      auto each = [&](auto change) {
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) change(s[i / 2 * 4 + h * 2 + i % 2], first_key + i / 2 * 8 + i % 2);
      };
      if (p.cap > 0) each([&](float& x, int) { x = fast_tanh(x * p.inner); });
      if (forms) {
        const float slope = p.slope(tile.head(p, row(h)));
        each([&](float& x, int key) { x = x * p.gain + slope * float(key - at); });
      }
      if (start < range.all_low || start + kKeys > range.all_high) {
        const int seen = p.first_seen(at);
        each([&](float& x, int key) { x = key > at || key < seen ? -INFINITY : x; });
      }
    }
    bool higher = false;
    float shift[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float now = high[h];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) now = fmaxf(now, fmaxf(s[n * 4 + h * 2], s[n * 4 + h * 2 + 1]));
      now = fmaxf(now, __shfl_xor_sync(kAllLanes, now, 1));
      now = fmaxf(now, __shfl_xor_sync(kAllLanes, now, 2));
      fade[h] = now > high[h] ? fast_exp2((high[h] - now) * gain) : 1.0f;
      higher |= now > high[h];
      high[h] = now;
      total[h] *= fade[h];
      shift[h] = shift_of(now) * gain - kHeadroom<T>;
    }
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      s[i] = fast_exp2(fmaf(s[i], gain, -shift[i / 2 % 2]));
      total[i / 2 % 2] += s[i];
    }
    return __any_sync(kAllLanes, higher);
  }
  template <int N> __device__ __forceinline__ void fade_out(float (&out)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] *= fade[i / 2 % 2];
  }

  // Results of these rows to memory, through rows `first` to first + 15 of a tile of kTileRows in shared memory. Some
  // are made again: NaN and infinite values reach rows that do not see them, and become NaN where float16 has lost the
  // weight; and with few keys a sum of rounded weights may well cancel to nothing where the true one does not.
  template <class T, int D, int kTileRows>
  __device__ __forceinline__ void write(const Attention& p, const QueryTile& tile, const float (&out)[D / 2],
                                        uint8_t* through) const;
};

// Makes rows of a tile again in float32, one by one by this warp: `first` and on, each of which a lane of four told of.
template <class T>
__device__ __noinline__ void again(const Attention& p, const QueryTile& tile, int first, unsigned lanes) {
  for (int r = 0; lanes; ++r, lanes >>= 4) {
    if (!(lanes & 15) || first + r >= tile.rows) continue;
    const int row = first + r, position = tile.position_of(p, row);
    RowSum sum;
    attend_row(p, tile.query<T>(p, row), p.tables + tile.sequence * p.table_row, tile.head(p, row), position,
               p.first_seen(position), position + 1, 0, 1, sum);
    T* out = tile.out<T>(p, row);
#pragma unroll
    for (int i = 0; i < kMaxSize / kWarp; ++i) {
      const int d = threadIdx.x % kWarp + i * kWarp;
      if (d < p.size) out[d] = from_f32<T>(sum.out[i] / sum.total);
    }
  }
}

template <class T, int D, int kTileRows>
__device__ __forceinline__ void Rows::write(const Attention& p, const QueryTile& tile, const float (&out)[D / 2],
                                            uint8_t* through) const {
  constexpr int kChunks = D / 8;
  const int lane = threadIdx.x % kWarp;
  bool odd[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float weights = sum(h), factor = 1.0f / weights;
    float poison = 0;  // becomes NaN
    bool nothing = false;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const float x = out[n * 4 + h * 2], y = out[n * 4 + h * 2 + 1];
      poison += 0 * x + 0 * y;
      nothing |= x * y == 0 && n * 8 < p.size;
      const uint32_t two = position[h] < 0 ? 0 : pack<T>(x * factor, y * factor);
      *(uint32_t*)(through + chunk_at<kTileRows>(row(h), n) + lane % 4 * 4) = two;
    }
    odd[h] = position[h] >= 0 && isfinite(weights) && (isnan(poison) || (nothing && position[h] < kFew));
  }
  __syncwarp();
  constexpr int kStep = kWarp / kChunks;
  const int begin = first + lane / kChunks, chunk = lane % kChunks;
  RowWalk walk(p, tile, begin, kStep);
#pragma unroll 2
  for (int i = 0; i < 16 / kStep; ++i, walk.next()) {
    const int r = begin + i * kStep;
    if (r < tile.rows && chunk * 8 < p.size)
      *(Pack<T, 8>*)(walk.out<T>(p, tile) + chunk * 8) = *(const Pack<T, 8>*)(through + chunk_at<kTileRows>(r, chunk));
  }
  __syncwarp();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const unsigned lanes = __ballot_sync(kAllLanes, odd[h]);
    if (lanes) again<T>(p, tile, first + h * 8, lanes);
  }
}

// All rows of a tile of tokens that have no place in a sequence
template <class T> __device__ void write_zeros(const Attention& p, const QueryTile& tile, int thread, int threads) {
  for (int i = thread; i < tile.rows * p.size; i += threads) tile.out<T>(p, i / p.size)[i % p.size] = from_f32<T>(0);
}

// Chunks of a tile's query rows into shared memory, zeros where there are none.
template <class T, int D, int kTileRows>
__device__ __forceinline__ void copy_queries(const Attention& p, const QueryTile& tile, uint32_t to, int first,
                                             int rows, int thread, int threads) {
  constexpr int kChunks = D / 8;
  const int step = threads / kChunks, chunk = thread % kChunks;
  RowWalk walk(p, tile, first + thread / kChunks, step);
  for (int i = thread / kChunks; i < rows; i += step, walk.next()) {
    const int row = first + i;
    const bool real = row < tile.rows && chunk * 8 < p.size;
    copy_async(to + chunk_at<kTileRows>(row, chunk), real ? walk.query<T>(p, tile) + chunk * 8 : (const T*)p.q, real);
  }
}

}  // namespace
