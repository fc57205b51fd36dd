// The warps of gdn_prefill_scan.cuh that compute: what each does with a chunk, and what they share of it.
#pragma once
#include "gdn_prefill_walk.cuh"

namespace {

constexpr int kRowGroups = kSlice / 16, kParts = 4;
constexpr int kGroup = kParts * kWarp;  // threads that update 16 rows
constexpr int kUpdating = kRowGroups * kGroup, kReading = 128, kScanThreads = kUpdating + kReading;
constexpr int kStages = 3;  // chunks in shared memory at most; at least two

template <class T, int K> struct alignas(16) Stage {
  f16 keys[kChunk * K], queries[kChunk * K];
  HeadChunk head;
  T values[kChunk * kSlice];  // see value_offset
};
template <int K> struct alignas(16) RowGroup {  // of 16 rows
  Fragment state[K / 16][kWarp];
  // [part of the tokens]: S k of the three other parts of the columns, as fragments C; then see kRest
  Fragment parts[kParts][kParts - 1][kWarp];
  Fragment corrections[kParts][kWarp];   // u
  float state_up[16][kParts], up[16];    // what products with `state` and `corrections` are to be multiplied by
  Barrier published, asked;              // `state`; nobody needs it, and `parts`, any more
  Barrier corrected, answered;           // `corrections`, likewise
};
constexpr int kRest = 0, kWrites = 1, kTops = 2;  // v - S k; u times `write`; the largest of each row, before those

template <int K> struct alignas(16) Exchange {
  RowGroup<K> rows[kRowGroups];
  Walk walk;  // kept here for the end, as the loop needs all registers
  Barrier full[kStages], empty[kStages];
};
static_assert(sizeof(Exchange<128>) + 2 * sizeof(Stage<f16, 128>) <= 163 * 1024, "for sm_80");
static_assert(sizeof(Exchange<128>) + 3 * sizeof(Stage<f16, 128>) <= 227 * 1024, "for sm_100");

// A lane's parts of a fragment lie 512 bytes apart, so that it takes two accesses without bank conflicts.
__device__ __forceinline__ void store(Fragment (&to)[kWarp], int lane, const Fragment& f) {
  ((uint4*)to)[lane] = *(const uint4*)f.high, ((uint4*)to)[kWarp + lane] = *(const uint4*)f.low;
}
__device__ __forceinline__ Fragment load(const Fragment (&from)[kWarp], int lane) {
  Fragment f;
  *(uint4*)f.high = ((const uint4*)from)[lane], *(uint4*)f.low = ((const uint4*)from)[kWarp + lane];
  return f;
}

// Tile (i, j) of a triangle as operands B, of eight rows, then of the others: the high parts, the low ones.
__device__ __forceinline__ void load_tile(uint32_t (&to)[2][4], const f16* triangle, int i, int j) {
  const f16* row = triangle + tile_offset(i, j) + threadIdx.x % kWarp * 8;
  load_matrices(to[0], row);
  load_matrices(to[1], row + 256);
}

// Adds a times a tile's rows: the product of two parts each, less that of the low ones. Sums are taken apart, for three
// chains in place of one.
__device__ __forceinline__ void multiply(float (&main)[2][4], float (&left)[2][4], float (&right)[2][4],
                                         const Fragment& a, const uint32_t (&tile)[2][4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    mma(left[n], a.low, tile[0][2 * n], tile[0][2 * n + 1]);
    mma(right[n], a.high, tile[1][2 * n], tile[1][2 * n + 1]);
    mma(main[n], a.high, tile[0][2 * n], tile[0][2 * n + 1]);
  }
}

// Of 16 tokens and 16 columns of keys or queries, the operands B of two products.
template <int K> __device__ __forceinline__ void load_rows(uint32_t (&to)[4], const f16* from, int tokens, int step) {
  const int lane = threadIdx.x % kWarp, own = (lane / 16 * (K / 8) + lane % 16 / 8) * 64 + lane % 8 * 8;
  load_matrices(to, shared_address(from) + int(sizeof(f16)) * (own + tokens * 16 * K) + step * int(sizeof(f16)) * 128);
}

__device__ __forceinline__ float largest(const float (&x)[kParts]) {
  const float4 all = *(const float4*)x;
  return larger(larger(all.x, all.y), larger(all.z, all.w));
}

// One of the four warps of 16 rows: it holds a quarter of their columns, and corrects a quarter of the tokens. What
// does not depend on the other warps is loaded, and computed, before they meet; of four parts the own is the first.
template <class T, int K> struct Updating {
  static constexpr int kColumns = K / 32, kSteps = K / 64;  // of a quarter: of eight columns each; of sixteen
  int lane, rows, part, c;
  float s[kColumns][4];
  uint32_t keys[kSteps][kParts][4];  // of the chunk at hand: of these columns, operands B, the own tokens first
  float least0 = 0, least1 = 0;  // of the rows' largest elements: below that, digits may be missing
  bool irregular = false;

  // Warps of one scheduler solve for five parts together.
  __device__ __forceinline__ explicit Updating(int warp)
      : lane(threadIdx.x % kWarp), rows(warp / kParts), part(rows ? kParts - 1 - warp % kParts : warp % kParts),
        c(2 * (lane % 4)) {}

  __device__ __forceinline__ void meet_group() const { meet(kGroup, 1 + rows); }
  // A part, the own at 0; anew where it stands, as the loop has no registers left to keep what follows from it.
  __device__ __forceinline__ int other(int i) const {
    unsigned first = part;
    asm volatile("" : "+r"(first));
    return (first + i) % kParts;
  }

  // f(value, row of the slice, column)
  template <class F> __device__ __forceinline__ void each(F f) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) f(s[n][i], rows * 16 + lane / 4 + i / 2 * 8, part * (K / 4) + n * 8 + c + i % 2);
  }

  __device__ __forceinline__ void check(float top0, float top1) {
    const auto regular = [](float top, float least) { return top >= least && top <= 0x1p100f; };  // not so of NaN
    irregular |= !regular(top0, least0) || !regular(top1, least1);
  }

  __device__ __forceinline__ void share_tops(RowGroup<K>& x, float top0, float top1) {
    float* const tops = (float*)x.parts[other(0)][kTops];
    if (c == 0) tops[lane / 4] = top0, tops[lane / 4 + 8] = top1;
  }
  __device__ __forceinline__ float top_of(const RowGroup<K>& x, int row) const {
    const auto of = [&](int i) { return ((const float*)x.parts[i][kTops])[row]; };
    return larger(larger(of(0), of(1)), larger(of(2), of(3)));
  }

  __device__ __forceinline__ void load_keys(const Stage<T, K>& now) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
      for (int j = 0; j < kParts; ++j) load_rows<K>(keys[i][j], now.keys, other(j), part * kSteps + i);
  }

  // keys has been loaded; load_next() does so for the chunk after this.
  template <class F>
  __device__ __forceinline__ void step(const Stage<T, K>& now, RowGroup<K>& x, int parity, F load_next) {
    uint32_t v[4];  // this lane's two rows, two tokens each, of the first eight; of the others
    float y[2][4], up0, up1;
    Fragment a[kSteps];
    multiply_keys(x, parity, a, y);
    load_transposed(v, now.values + value_offset(part * 16 + lane / 16 * 8 + lane % 8, rows * 2 + lane % 16 / 8));
    meet_group();

    remain(now, x, a, v, y);
    uint32_t solve[kParts][2][4];  // tiles of row `part`, that on the diagonal last
#pragma unroll
    for (int j = 0; j < kParts - 1; ++j)
      if (j < part) load_tile(solve[j], now.head.solve, part, j);
    load_tile(solve[kParts - 1], now.head.solve, part, part);
    meet_group();

    // The largest part, that of the diagonal, apart: tensor cores truncate each sum.
    float most[2][4] = {}, main[2][4] = {}, left[2][4] = {}, right[2][4] = {};
    const Fragment rest = share(now, x, y, up0, up1);
    multiply(most, left, right, rest, solve[kParts - 1]);
    wait(x.answered, parity ^ 1);
    meet_group();

    Fragment all[kParts];
    if (0 < part) all[0] = load(x.parts[0][kRest], lane);
#pragma unroll
    for (int j = 0; j < kParts - 1; ++j) {
      if (j + 1 < part) all[j + 1] = load(x.parts[j + 1][kRest], lane);
      if (j < part) multiply(main, left, right, all[j], solve[j]);
    }
    uint32_t columns[kParts][kColumns / 2][4];
    const auto load_columns = [&](int i) {
      const int own = (lane % 16 / 8 * (K / 8) + part * kColumns + lane / 16) * 64 + lane % 8 * 8;
      const auto at = shared_address(now.keys) + int(sizeof(f16)) * (own + other(i) * 16 * K);
#pragma unroll
      for (int n = 0; n < kColumns / 2; ++n) load_transposed(columns[i][n], at + n * int(sizeof(f16)) * 128);
    };
    load_columns(0), load_columns(1);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int m = 0; m < 4; ++m) y[n][m] = most[n][m] + (main[n][m] + (left[n][m] + right[n][m]));
    const Fragment writes = correct(now, x, y);
    load_columns(2), load_columns(3);
    float low[kColumns][4] = {}, high[kColumns][4] = {};
    update(low, high, writes, columns[0]);
    const float decay = now.head.scalars.decay;
    meet_group();

#pragma unroll
    for (int i = 1; i < kParts; ++i) all[i] = load(x.parts[other(i)][kWrites], lane);
    arrive_warp(x.asked);
#pragma unroll
    for (int i = 1; i < kParts; ++i) update(low, high, all[i], columns[i]);
    load_next();
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int m = 0; m < 4; ++m) s[n][m] = fmaf(high[n][m] + low[n][m], m < 2 ? up0 : up1, decay * s[n][m]);
  }

  // a: the state in two parts. Its product with the keys, of these columns: y of the own tokens, the rest to the
  // others.
  __device__ __forceinline__ void multiply_keys(RowGroup<K>& x, int parity, Fragment (&a)[kSteps], float (&y)[2][4]) {
    float top0, top1, product[kParts][2][4] = {};
    row_tops(s, top0, top1);
    const Power power0 = power_for<kTopState>(top0), power1 = power_for<kTopState>(top1);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      a[i] = split(s[2 * i], s[2 * i + 1], power0.down, power1.down);
#pragma unroll
      for (int j = kParts; j-- > 0;)
#pragma unroll
        for (int n = 0; n < 2; ++n) mma(product[j][n], a[i].low, keys[i][j][2 * n], keys[i][j][2 * n + 1]);
#pragma unroll
      for (int j = kParts; j-- > 0;)
#pragma unroll
        for (int n = 0; n < 2; ++n) mma(product[j][n], a[i].high, keys[i][j][2 * n], keys[i][j][2 * n + 1]);
    }
    wait(x.asked, parity ^ 1);
    if (c == 0) x.state_up[lane / 4][part] = power0.up, x.state_up[lane / 4 + 8][part] = power1.up;
#pragma unroll
    for (int j = kParts; j-- > 0;)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float(&z)[4] = product[j][n];
        const float4 scaled = {z[0] * power0.up, z[1] * power0.up, z[2] * power1.up, z[3] * power1.up};
        if (j) ((float4*)x.parts[other(j)][kParts - 1 - j])[n * kWarp + lane] = scaled;
        else y[n][0] = scaled.x, y[n][1] = scaled.y, y[n][2] = scaled.z, y[n][3] = scaled.w;
      }
  }

  // y: v - S k. The state is published here, as that is less urgent than the products.
  __device__ __forceinline__ void remain(const Stage<T, K>& now, RowGroup<K>& x, const Fragment (&a)[kSteps],
                                         const uint32_t (&v)[4], float (&y)[2][4]) {
    float4 more[2][kParts];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 1; i < kParts; ++i) more[n][i] = ((const float4*)x.parts[part][i - 1])[n * kWarp + lane];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) store(x.state[part * kSteps + i], lane, a[i]);
    arrive_warp(x.published);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 read = *(const float2*)&now.head.scalars.read[part * 16 + n * 8 + c];
      const float2 v0 = unpack<T>(v[2 * n]), v1 = unpack<T>(v[2 * n + 1]);
#pragma unroll
      for (int i = 1; i < kParts; ++i)
        y[n][0] += more[n][i].x, y[n][1] += more[n][i].y, y[n][2] += more[n][i].z, y[n][3] += more[n][i].w;
      y[n][0] = fmaf(-read.x, y[n][0], v0.x), y[n][1] = fmaf(-read.y, y[n][1], v0.y);
      y[n][2] = fmaf(-read.x, y[n][2], v1.x), y[n][3] = fmaf(-read.y, y[n][3], v1.y);
    }
    float top0, top1;
    row_tops(y, top0, top1);
    share_tops(x, top0, top1);
    constexpr float top = 1 << kTopState;  // times a power of two: the state's largest, or half of it
    check(top * largest(x.state_up[lane / 4]), top * largest(x.state_up[lane / 4 + 8]));
  }

  // v - S k in two parts. up0, up1: what products with `writes` are to be multiplied by
  __device__ __forceinline__ Fragment share(const Stage<T, K>& now, RowGroup<K>& x, const float (&y)[2][4], float& up0,
                                            float& up1) {
    const float top0 = top_of(x, lane / 4), top1 = top_of(x, lane / 4 + 8);
    const Power power0 = power_for<kTopRest>(top0), power1 = power_for<kTopRest>(top1);
    const Fragment rest = split(y[0], y[1], power0.down, power1.down);
    if (part < kParts - 1) store(x.parts[part][kRest], lane, rest);
    up0 = power0.up * now.head.scalars.write_up, up1 = power1.up * now.head.scalars.write_up;
    irregular |= !scales(top0) || !scales(top1) || irregular_chunk(now.head.scalars);
    least0 = top0 > 0.0f ? 8.0f * up0 : 0.0f, least1 = top1 > 0.0f ? 8.0f * up1 : 0.0f;
    return rest;
  }

  // u and its part of the state, of this part of the tokens, to the others
  __device__ __forceinline__ Fragment correct(const Stage<T, K>& now, RowGroup<K>& x, const float (&u)[2][4]) {
    float w[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 write = *(const float2*)&now.head.scalars.write[part * 16 + n * 8 + c];
#pragma unroll
      for (int m = 0; m < 4; ++m) w[n][m] = u[n][m] * (m % 2 ? write.y : write.x);
    }
    const Fragment writes = split(w[0], w[1], 1.0f, 1.0f);
    store(x.parts[part][kWrites], lane, writes);
    store(x.corrections[part], lane, split(u[0], u[1], 1.0f, 1.0f));
    if (part == 0 && c == 0) {
      const auto up = [&](int row) { return power_for<kTopRest>(top_of(x, row)).up; };
      x.up[lane / 4] = up(lane / 4), x.up[lane / 4 + 8] = up(lane / 4 + 8);
    }
    arrive_warp(x.corrected);
    return writes;
  }

  // Adds to the state: of one part of the tokens, with the keys' matching columns.
  __device__ __forceinline__ void update(float (&low)[kColumns][4], float (&high)[kColumns][4], const Fragment& a,
                                         const uint32_t (&columns)[kColumns / 2][4]) const {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const uint32_t* b = columns[n / 2] + n % 2 * 2;
      mma(low[n], a.low, b[0], b[1]), mma(high[n], a.high, b[0], b[1]);
    }
  }

  __device__ __forceinline__ void finish(RowGroup<K>& x) {
    float top0, top1;
    row_tops(s, top0, top1);
    share_tops(x, top0, top1);
    meet_group();
    check(top_of(x, lane / 4), top_of(x, lane / 4 + 8));
  }
};

// The tile rows of tokens that the first and second warp of a pair take: 0 and 3, 1 and 2, the same work.
__device__ __forceinline__ int tile_row(int half, int which) { return which ? 3 - half : half; }

// One of the two warps that read for 16 rows: each has half of the tokens.
template <class T, int K> struct Reading {
  static constexpr int kSteps = K / 64;  // of a quarter of a row, as above
  int lane, rows, half, c;

  __device__ __forceinline__ explicit Reading(int warp)
      : lane(threadIdx.x % kWarp), rows(warp / 2), half(warp % 2), c(2 * (lane % 4)) {}

  // product: S q, of the warp's two tile rows of tokens
  __device__ __forceinline__ void ask(const Stage<T, K>& now, const RowGroup<K>& x, float (&product)[4][4]) const {
    const float4 above = *(const float4*)x.state_up[lane / 4], below = *(const float4*)x.state_up[lane / 4 + 8];
    const float up[2][kParts] = {{above.x, above.y, above.z, above.w}, {below.x, below.y, below.z, below.w}};
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      float sum[4][4] = {};
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        uint32_t b[2][4];
        load_rows<K>(b[0], now.queries, tile_row(half, 0), i * kSteps + j);
        load_rows<K>(b[1], now.queries, tile_row(half, 1), i * kSteps + j);
        const Fragment a = load(x.state[i * kSteps + j], lane);
#pragma unroll
        for (int n = 0; n < 4; ++n) mma(sum[n], a.low, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
#pragma unroll
        for (int n = 0; n < 4; ++n) mma(sum[n], a.high, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int m = 0; m < 4; ++m)
          product[n][m] = i ? fmaf(up[m / 2][i], sum[n][m], product[n][m]) : up[m / 2][i] * sum[n][m];
    }
  }

  // out: of the chunk's first token, this slice's first row
  __device__ __forceinline__ void answer(const Stage<T, K>& now, const RowGroup<K>& x, const float (&product)[4][4],
                                         T* out, int token_stride, int count) const {
    Fragment a[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) a[j] = load(x.corrections[j], lane);
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const int i = tile_row(half, which);
      float main[2][4] = {}, left[2][4] = {}, right[2][4] = {};
#pragma unroll
      for (int j = 0; j < kParts; ++j)
        if (j <= i) {
          uint32_t tile[2][4];
          load_tile(tile, now.head.mix, i, j);
          multiply(main, left, right, a[j], tile);
        }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float(&y)[4] = product[2 * which + n];
        const float2 asked = *(const float2*)&now.head.scalars.ask[(2 * i + n) * 8 + c];
        const float2 own = *(const float2*)&now.head.scalars.own[(2 * i + n) * 8 + c];
        const int token = (2 * i + n) * 8 + lane / 4;
#pragma unroll
        for (int m = 0; m < 2; ++m) {  // eight rows
          const float up = x.up[lane / 4 + m * 8];
          Pack<T, 2> pair;
          const auto sum = [&](int l) { return up * (main[n][l] + (left[n][l] + right[n][l])); };
          pair.at[0] = from_f32<T>(fmaf(asked.x, y[2 * m], own.x * sum(2 * m)));
          pair.at[1] = from_f32<T>(fmaf(asked.y, y[2 * m + 1], own.y * sum(2 * m + 1)));
          const uint32_t turned = transpose((const uint32_t&)pair);
          if (token < count) *(uint32_t*)(out + token * token_stride + rows * 16 + m * 8 + c) = turned;
        }
      }
    }
  }
};

}  // namespace
