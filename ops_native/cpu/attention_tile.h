// Attention of a few query tokens of one sequence over a range of its cached keys, for one key head: what decode and
// prefill share.
//
// The queries that read one key head are the rows of a matrix (token by token, its group of heads side by side). Keys
// come in tiles of 64: a tile is taken out of its pages once and serves all rows: scores = Q K^T, softmax carried along
// row by row, O += P V. The two products are an engine's: attention_fma.h in float32 for every machine and dtype,
// attention_amx.h for bfloat16 where the processor has AMX. Each adds a row's terms in an order that depends on nothing
// but the row, and tiles start at multiples of 64: a row's bits depend neither on the rows beside it, nor on where a
// prefill was split, nor on the number of threads.
//
// Floor: 4 flops per row, key and dimension, against one pass over the tile; decode has the rows of one group, and is
// as fast as the cache comes out of memory.
#pragma once
#include "opshim.h"

namespace OPSHIM_ISA {
namespace {

constexpr int kKeys = 64;         // keys per tile
constexpr int kMaxSize = 256;     // of a head
constexpr int kPanel = 2 * W;     // heads are padded to multiples of it
constexpr int kRowStep = 32;      // buffers have room for a multiple of it

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

// `count` query tokens at q, the first at `position`, and the key head that they read
template <class T>
struct Queries {
  const T* q;
  int64_t position, count, kv_head;

  const T* row(const Problem<T>& p, int64_t r) const {
    return q + r / p.group() * p.q_token + head(p, r) * p.q_head;
  }
  int64_t head(const Problem<T>& p, int64_t r) const { return kv_head * p.group() + r % p.group(); }
  int64_t position_of(const Problem<T>& p, int64_t r) const { return position + r / p.group(); }
};

// Keys [low, high) of a sequence, whose row of the block table it is: those of the tile that begins at `start`
struct Span {
  const int32_t* table;
  int64_t kv_head, start, low, high;

  template <class T>
  const T* token(const Problem<T>& p, const Cache<T>& cache, int64_t t) const {
    return cache.data + table[t / p.block_size] * cache.block + t % p.block_size * cache.token + kv_head * cache.head;
  }
};

// The rows' state, and the tile at work. out, high and total hold the rows' softmax-weighted sums: sum exp(s - high) v,
// the largest score, and sum exp(s - high) per lane. What queries, keys, values and weights hold is the engine's.
struct Tile {
  int64_t width;  // of out and values: the head size, padded
  float *queries, *scores, *weights, *keys, *values, *out, *total, *row, *high;

  Tile(float* memory, int64_t rows, int64_t size) : width(round_up(size, kPanel)) {
    rows = round_up(rows, kRowStep);
    auto take = [&](int64_t count) {
      float* p = memory;
      memory += count;
      return p;
    };
    queries = take(rows * kMaxSize);
    scores = take(rows * kKeys);
    weights = take(rows * kKeys * 3 / 2);
    keys = take(kKeys * width);
    values = take(kKeys * width);
    out = take(rows * width);
    total = take(rows * W);
    row = take(width);
    high = take(rows);
  }
  static int64_t floats(int64_t rows, int64_t size) {
    const int64_t width = round_up(size, kPanel);
    return round_up(rows, kRowStep) * (kMaxSize + kKeys + kKeys * 3 / 2 + width + W + 1) + (2 * kKeys + 1) * width;
  }
};

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

// e^x for x <= 0, 0 from -87 down (a weight below the smallest normal number beside the row's largest, 1), NaN for NaN:
// vexp with one factor for 2^n, which suffices there.
inline vf weight_of(vf x) {
  vi whole;
  const vf p = exp_parts(x, whole);
  return select(vi(x < -87.0f), vf{}, p * bits<vf>((whole + 127) << 23));
}

// One row of scores -> weights exp(s - high), 0 where the row does not see: keys [low, high) of those at `start`.
template <class T>
void weigh(const Problem<T>& p, Tile& tile, int64_t r, int64_t head, int64_t position, int64_t start, int64_t columns,
           int64_t low, int64_t high) {
  float* s = tile.scores + r * kKeys;
  const bool partial = low > start || high < start + columns, bare = !partial && p.softcap <= 0 && !p.slopes;
  const vi lanes = lane_numbers();
  vf best = splat(-HUGE_VALF);
  for (int64_t c = 0; c < columns; c += W) {
    vf x = load(s + c) * p.scale;
    if (!bare) {
      const vi key = lanes + int32_t(start + c);
      if (p.softcap > 0) x = p.softcap * vtanh(x / p.softcap);
      if (p.slopes) x += p.slopes[head] * __builtin_convertvector(key - int32_t(position), vf);
      x = select(vi(key >= int32_t(low)) & vi(key < int32_t(high)), x, splat(-HUGE_VALF));
    }
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
    const vf weight = weight_of(load(s + c) - shift);
    store(s + c, weight);
    sum += weight;
  }
  store(total, sum);
}

// Values that are not finite stay out of the product, for 0 * NaN is NaN: they are added to the rows that see them, and
// do not reach those whose weight for them is a masked 0. `odd`: a bit per key of the tile.
template <class T>
void add_odd_values(const Problem<T>& p, const Queries<T>& queries, const Span& span, uint64_t odd, Tile& tile) {
  for (; odd; odd &= odd - 1) {
    const int64_t t = span.start + __builtin_ctzll(odd);
    const T* from = span.token(p, p.values, t);
    for (int64_t d = 0; d < p.size; d += W) store(tile.row + d, load_part(from + d, p.size - d));
    for (int64_t r = 0; r < queries.count * p.group(); ++r) {
      const int64_t at = queries.position_of(p, r);
      if (t > at || t < p.first_seen(at)) continue;
      const float weight = tile.scores[r * kKeys + t - span.start];
      float* out = tile.out + r * tile.width;
      for (int64_t d = 0; d < p.size; d += W) store(out + d, load(out + d) + weight * load(tile.row + d));
    }
  }
}

// Asks for tokens [begin, end) of a cache ahead of their use: pages are too short for the hardware to foresee.
template <class T>
void prefetch(const Problem<T>& p, const Cache<T>& cache, const Span& span, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const char* from = reinterpret_cast<const char*>(span.token(p, cache, t));
    for (int64_t i = 0; i < p.size * int64_t(sizeof(T)); i += 64) __builtin_prefetch(from + i, 0, 2);
  }
}

// Attends the queries to keys [begin, end) of their sequence: into tile.out, tile.high, tile.total.
template <class Engine, class T>
void attend(const Problem<T>& p, const Queries<T>& queries, const int32_t* table, int64_t begin, int64_t end,
            Tile& tile) {
  const int64_t rows = queries.count * p.group();
  for (int64_t r = 0; r < rows; ++r) tile.high[r] = -HUGE_VALF;
  std::memset(tile.out, 0, rows * tile.width * sizeof(float));
  std::memset(tile.total, 0, rows * W * sizeof(float));
  Engine engine(p, queries, tile);
  for (int64_t start = begin / kKeys * kKeys; start < end; start += kKeys) {
    const Span span{table, queries.kv_head, start, most(begin, start), least(end, start + kKeys)};
    const int64_t columns = round_up(span.high - start, kPanel);
    prefetch(p, p.values, span, span.low, span.high);
    prefetch(p, p.keys, span, span.high, least(end, span.high + kKeys));
    engine.scores(span, columns);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = queries.position_of(p, r);
      weigh(p, tile, r, queries.head(p, r), at, start, columns, most(span.low, p.first_seen(at)),
            least(span.high, at + 1));
    }
    const uint64_t odd = engine.take_values(span);
    if (odd) add_odd_values(p, queries, span, odd, tile);
    engine.add_values(span.high - start);
  }
}

}  // namespace
}  // namespace OPSHIM_ISA
