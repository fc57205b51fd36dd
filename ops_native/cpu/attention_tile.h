// Attention of a few query tokens of one sequence over a range of its cached keys, for one key head: what decode and
// prefill share.
//
// The queries that read one key head are the rows of a matrix (token by token, its group of heads side by side). Keys
// come in tiles of 64: a tile is taken out of its pages once, converted to float32, keys transposed, and serves all
// rows: scores = Q K^T, softmax carried along row by row, O += P V. Both products are the same register-blocked
// kernel (12 rows by 2 vectors on AVX-512), so every element is a plain sum in ascending order whatever the blocking:
// a row's bits depend neither on the rows beside it nor on the number of threads. Tiles start at multiples of 64, so
// they do not depend on where a prefill was split either.
//
// Floor: 4 flops per row, key and dimension against one pass over the tile; from about 8 rows on it is compute that
// counts, and prefill has 96.
#pragma once
#include "opshim.h"

namespace OPSHIM_ISA {
namespace {

constexpr int kKeys = 64;                 // keys per tile
constexpr int kMaxSize = 256;             // of a head
constexpr int kPanel = 2 * W;             // columns that the matrix product works on at once
constexpr int kBlock = W == 16 ? 12 : 6;  // rows that it works on at once: what the registers hold
constexpr int kTargetRows = 96;           // rows per task of prefill

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }

template <class T>
struct Cache {
  const T* data;
  int64_t block, token, head;  // strides
};

template <class T>
struct Problem {
  const T* q;
  int64_t q_token, q_head;
  Cache<T> keys, values;
  int64_t heads, kv_heads, size, block_size;
  float scale, softcap;
  int64_t window;
  const float* slopes;

  int64_t group() const { return heads / kv_heads; }
  int64_t first_seen(int64_t position) const { return window > 0 ? most(0, position - window + 1) : 0; }
};

// The state of up to `rows` rows, and the tile at work. out, high and total hold the rows' softmax-weighted sums:
// sum exp(s - high) v, the largest score, and sum exp(s - high) per lane.
struct Tile {
  int64_t width;  // of out and values: the head size, padded to whole panels
  float *q, *scores, *keys, *values, *out, *total, *high, *row;

  static int64_t floats(int64_t rows, int64_t size) {
    const int64_t width = round_up(size, kPanel);
    return rows * (kMaxSize + kKeys + width + W + 1) + 2 * kKeys * width + width + W;
  }
  Tile(float* memory, int64_t rows, int64_t size) : width(round_up(size, kPanel)) {
    auto take = [&](int64_t count) { float* p = memory; memory += count; return p; };
    q = take(rows * kMaxSize);
    scores = take(rows * kKeys);
    keys = take(kKeys * width);
    values = take(kKeys * width);
    out = take(rows * width);
    total = take(rows * W);
    row = take(width);
    high = take(rows);
  }
};

// ---- c[rows,columns] (+)= a[rows,depth] b[depth,columns], columns in panels -----------------------------------------
template <int R, int kStride, bool kAdd>
void product_block(const float* a, const float* b, int64_t b_stride, float* c, int64_t c_stride, int64_t depth) {
  vf sum[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    sum[r][0] = kAdd ? load(c + r * c_stride) : vf{};
    sum[r][1] = kAdd ? load(c + r * c_stride + W) : vf{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    const vf b0 = load(b + k * b_stride), b1 = load(b + k * b_stride + W);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const vf x = splat(a[r * kStride + k]);
      sum[r][0] += x * b0;
      sum[r][1] += x * b1;
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    store(c + r * c_stride, sum[r][0]);
    store(c + r * c_stride + W, sum[r][1]);
  }
}

template <int R, int kStride, bool kAdd, class... Rest>
void product_rows(int64_t rows, const float* a, Rest... rest) {
  if (rows == R) return product_block<R, kStride, kAdd>(a, rest...);
  if constexpr (R > 1) product_rows<R - 1, kStride, kAdd>(rows, a, rest...);
}

// kStride: row stride of a, a constant so that one register addresses all rows of a block
template <int kStride, bool kAdd>
void product(int64_t rows, int64_t columns, int64_t depth, const float* a, const float* b, int64_t b_stride,
             int64_t b_panel, float* c, int64_t c_stride) {
  const int64_t blocks = (rows + kBlock - 1) / kBlock;
  for (int64_t p = 0; p * kPanel < columns; ++p)
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t r = rows * i / blocks, end = rows * (i + 1) / blocks;
      product_rows<kBlock, kStride, kAdd>(end - r, a + r * kStride, b + p * b_panel, b_stride,
                                          c + r * c_stride + p * kPanel, c_stride, depth);
    }
}

// ---- tiles out of pages ---------------------------------------------------------------------------------------------
// The address of one head of one cached token, by the sequence's row of the block table
template <class T>
const T* cached(const Cache<T>& cache, const int32_t* table, int64_t block_size, int64_t head, int64_t token) {
  return cache.data + table[token / block_size] * cache.block + token % block_size * cache.token + head * cache.head;
}

template <class T>
inline vf load_part(const T* p, int64_t count) {
  return count >= W ? load(p) : load(p, int(count));
}

#if defined(__AVX512F__)
constexpr vi kLow = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
constexpr vi kHigh = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
#elif defined(__AVX2__)
constexpr vi kLow = {0, 8, 1, 9, 2, 10, 3, 11};
constexpr vi kHigh = {4, 12, 5, 13, 6, 14, 7, 15};
#else
constexpr vi kLow = {0, 4, 1, 5};
constexpr vi kHigh = {2, 6, 3, 7};
#endif

// W vectors of W lanes, transposed in place: log2(W) perfect shuffles
inline void transpose(vf (&v)[W]) {
#pragma GCC unroll 4
  for (int step = 1; step < W; step *= 2) {
    vf next[W];
#pragma GCC unroll 8
    for (int i = 0; i < W / 2; ++i) {
      next[2 * i] = __builtin_shuffle(v[i], v[i + W / 2], kLow);
      next[2 * i + 1] = __builtin_shuffle(v[i], v[i + W / 2], kHigh);
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) v[i] = next[i];
  }
}

// Keys low to high of the tile that begins at `start`, transposed into panels: tile.keys[panel][dimension][lane];
// lanes of other keys are 0.
template <class T>
void take_keys(const Problem<T>& p, const int32_t* table, int64_t head, int64_t start, int64_t low, int64_t high,
               Tile& tile) {
  const int64_t depth = round_up(p.size, W), columns = round_up(high - start, kPanel);
  for (int64_t c = 0; c < columns; c += W) {
    const T* token[W];
    for (int i = 0; i < W; ++i) {
      const int64_t t = start + c + i;
      token[i] = t >= low && t < high ? cached(p.keys, table, p.block_size, head, t) : nullptr;
    }
    float* to = tile.keys + c / kPanel * depth * kPanel + c % kPanel;
    for (int64_t d = 0; d < depth; d += W) {
      vf v[W];
      for (int i = 0; i < W; ++i) v[i] = token[i] ? load_part(token[i] + d, p.size - d) : vf{};
      transpose(v);
      for (int i = 0; i < W; ++i) store(to + (d + i) * kPanel, v[i]);
    }
  }
}

// Values low to high into tile.values[key][dimension], all other rows and columns 0
template <class T>
void take_values(const Problem<T>& p, const int32_t* table, int64_t head, int64_t start, int64_t low, int64_t high,
                 Tile& tile) {
  std::memset(tile.values, 0, (low - start) * tile.width * sizeof(float));
  for (int64_t t = low; t < high; ++t) {
    const T* from = cached(p.values, table, p.block_size, head, t);
    float* to = tile.values + (t - start) * tile.width;
    for (int64_t d = 0; d < tile.width; d += W)
      store(to + d, d < p.size ? load_part(from + d, p.size - d) : vf{});
  }
}

inline bool finite(const float* row, int64_t width) {
  vi odd{};
  for (int64_t d = 0; d < width; d += W) odd |= vi((bits<vi>(load(row + d)) & 0x7f800000) == 0x7f800000);
  int32_t any = 0;
  for (int i = 0; i < W; ++i) any |= odd[i];
  return any == 0;
}

// ---- scores to weights ----------------------------------------------------------------------------------------------
// tanh within 2 ulp (Cephes' tanhf); its polynomial keeps the relative precision of small arguments
inline vf vtanh(vf x) {
  const vf size = bits<vf>(bits<vi>(x) & 0x7fffffff);
  const vf large = 1.0f - 2.0f / (vexp(size + size) + 1.0f);
  const vf z = x * x;
  vf small = splat(-5.70498872745e-3f);
  small = small * z + 2.06390887954e-2f;
  small = small * z - 5.37397155531e-2f;
  small = small * z + 1.33314422036e-1f;
  small = small * z - 3.33332819422e-1f;
  small = small * z * x + x;
  const vf signed_large = bits<vf>(bits<vi>(large) | (bits<vi>(x) & INT32_MIN));
  return select(vi(size < 0.625f), small, signed_large);
}

inline vi lane_numbers() {
  vi lanes;
  for (int i = 0; i < W; ++i) lanes[i] = i;
  return lanes;
}

// What weights are taken relative to: while a row has seen only -inf, 0, so that exp(-inf) is 0 and not NaN. A row that
// never sees more ends as 0 / 0; one that sees +inf has exp(inf - inf): NaN, as softmax has it.
inline float shift_of(float high) { return high == -HUGE_VALF ? 0.0f : high; }

// One row of scores -> weights exp(s - high), 0 where the row does not see: keys [low, high) of those at `start`.
template <class T>
void weigh(const Problem<T>& p, Tile& tile, int64_t r, int64_t head, int64_t position, int64_t start, int64_t columns,
           int64_t low, int64_t high) {
  float* s = tile.scores + r * kKeys;
  const bool partial = low > start || high < start + columns;
  const float slope = p.slopes ? p.slopes[head] : 0.0f;
  const vi lanes = lane_numbers();
  vf best = splat(-HUGE_VALF);
  for (int64_t c = 0; c < columns; c += W) {
    vf x = load(s + c) * p.scale;
    const vi key = lanes + int32_t(start + c);
    if (p.softcap > 0) x = p.softcap * vtanh(x / p.softcap);
    if (p.slopes) x += slope * __builtin_convertvector(key - int32_t(position), vf);
    if (partial) x = select(vi(key >= int32_t(low)) & vi(key < int32_t(high)), x, splat(-HUGE_VALF));
    store(s + c, x);
    best = vmax(x, best);  // a NaN does not count here; its weight is NaN
  }
  const float tile_best = max_of(best), before = tile.high[r];
  float* total = tile.total + r * W;
  if (tile_best > before) {
    const vf fade = vexp(splat(before - tile_best));
    float* out = tile.out + r * tile.width;
    for (int64_t d = 0; d < tile.width; d += W) store(out + d, load(out + d) * fade);
    store(total, load(total) * fade);
    tile.high[r] = tile_best;
  }
  const float shift = shift_of(tile.high[r]);
  vf sum = load(total);
  for (int64_t c = 0; c < columns; c += W) {
    const vf weight = vexp(load(s + c) - shift);
    store(s + c, weight);
    sum += weight;
  }
  store(total, sum);
}

// Attends `count` query tokens, the first at `position` with its heads at q, to keys [begin, end): into the tile's rows.
template <class T>
void attend(const Problem<T>& p, const int32_t* table, int64_t kv_head, const T* q, int64_t position, int64_t count,
            int64_t begin, int64_t end, Tile& tile) {
  const int64_t group = p.group(), rows = count * group, depth = round_up(p.size, W);
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = q + r / group * p.q_token + (kv_head * group + r % group) * p.q_head;
    for (int64_t d = 0; d < p.size; d += W) store(tile.q + r * kMaxSize + d, load_part(from + d, p.size - d));
    tile.high[r] = -HUGE_VALF;
  }
  std::memset(tile.out, 0, rows * tile.width * sizeof(float));
  std::memset(tile.total, 0, rows * W * sizeof(float));

  for (int64_t start = begin / kKeys * kKeys; start < end; start += kKeys) {
    const int64_t low = most(begin, start), high = least(end, start + kKeys), columns = round_up(high - start, kPanel);
    const bool seen_by_all = high <= position + 1 && low >= p.first_seen(position + count - 1);
    take_keys(p, table, kv_head, start, low, high, tile);
    take_values(p, table, kv_head, start, low, high, tile);
    product<kMaxSize, false>(rows, columns, p.size, tile.q, tile.keys, kPanel, depth * kPanel, tile.scores, kKeys);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = position + r / group;
      weigh(p, tile, r, kv_head * group + r % group, at, start, columns, most(low, p.first_seen(at)),
            least(high, at + 1));
    }
    // 0 * NaN is NaN: a value that is not finite reaches the rows that see it, not those whose weight for it is 0
    for (int64_t t = low; t < high && !seen_by_all; ++t) {
      float* value = tile.values + (t - start) * tile.width;
      if (finite(value, tile.width)) continue;
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = position + r / group;
        if (t > at || t < p.first_seen(at)) continue;
        const vf weight = splat(tile.scores[r * kKeys + t - start]);
        float* out = tile.out + r * tile.width;
        for (int64_t d = 0; d < tile.width; d += W) store(out + d, load(out + d) + weight * load(value + d));
      }
      std::memset(value, 0, tile.width * sizeof(float));
    }
    product<kKeys, true>(rows, p.size, high - start, tile.scores, tile.values, tile.width, kPanel, tile.out,
                         tile.width);
  }
}

}  // namespace
}  // namespace OPSHIM_ISA
