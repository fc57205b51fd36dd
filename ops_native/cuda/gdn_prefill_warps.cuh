// The warps of gdn_prefill_scan.cuh that compute: what each does with a chunk, and what they share of it.
#pragma once
#include "gdn_prefill_chunks.cuh"

namespace {

constexpr int kUpdating = 128, kReading = 128, kMeeting = kUpdating + kReading, kScanThreads = kMeeting + kWarp;
constexpr int kStages = 3;  // chunks in shared memory at most; at least two

template <class T, int K> struct alignas(16) Stage {
  f16 keys[kChunk * K], queries[kChunk * K];
  HeadChunk head;
  T values[kChunk * kSlice];  // see value_offset
};
template <int K> struct alignas(16) Exchange {
  Fragment state[2][K / 16][kWarp];      // [rows][step of K]
  Fragment corrections[2][4][kWarp];     // [rows][step of tokens]: u
  Fragment writes[2][4][kWarp];          // u times `write`
  float4 products[4][8][kWarp];          // of each updating warp: its part of S k, fragments C
  float state_up[2][2][16], up[2][16];   // what products with `state` and `corrections` are to be multiplied by
  Barrier full[kStages], empty[kStages];
};

// Of eight values of a token: their order differs between tokens, so that eight tokens are on different banks.
__device__ __forceinline__ int value_offset(int token, int eight) {
  return token * kSlice + (eight ^ (token / 2 % 4)) * 8;
}

// A lane's parts of a fragment lie 512 bytes apart, so that it takes two accesses without bank conflicts.
__device__ __forceinline__ void store(Fragment (&to)[kWarp], int lane, const Fragment& f) {
  ((uint4*)to)[lane] = *(const uint4*)f.high, ((uint4*)to)[kWarp + lane] = *(const uint4*)f.low;
}
__device__ __forceinline__ Fragment load(const Fragment (&from)[kWarp], int lane) {
  Fragment f;
  *(uint4*)f.high = ((const uint4*)from)[lane], *(uint4*)f.low = ((const uint4*)from)[kWarp + lane];
  return f;
}

__device__ __forceinline__ bool irregular_chunk(const Scalars& scalars) {
  const int4 rows = *(const int4*)scalars.irregular;
  return rows.x | rows.y | rows.z | rows.w;
}

// 16 rows of `a` times the rows of a lower triangle, tile row i of it: the product of two parts each, less that of the
// low ones. Sums are taken apart, for three chains in place of one.
__device__ __forceinline__ void triangle_rows(float (&sum)[2][4], const Fragment (&a)[4], const f16* triangle, int i) {
  float main[2][4] = {}, left[2][4] = {}, right[2][4] = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j && j > i) continue;
    uint32_t high[4], low[4];
    const uint4* tile = (const uint4*)(triangle + tile_offset(i, j)) + threadIdx.x % kWarp;
    *(uint4*)high = tile[0], *(uint4*)low = tile[kWarp];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      mma(left[n], a[j].low, high[2 * n], high[2 * n + 1]);
      mma(right[n], a[j].high, low[2 * n], low[2 * n + 1]);
      mma(main[n], a[j].high, high[2 * n], high[2 * n + 1]);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int m = 0; m < 4; ++m) sum[n][m] = main[n][m] + (left[n][m] + right[n][m]);
}

// The tile rows of tokens that the first and second warp of a pair take: 0 and 3, 1 and 2, the same work.
__device__ __forceinline__ int tile_row(int half, int which) { return which ? 3 - half : half; }

template <class T, int K> struct Updating {
  static constexpr int kColumns = K / 16, kSteps = K / 32;  // of eight columns each; of sixteen
  int warp, lane, rows, half, c;
  float s[kColumns][4];
  float least0 = 0, least1 = 0;  // of the rows' largest elements: below that, digits may be missing
  bool irregular = false;

  __device__ __forceinline__ Updating()
      : warp(threadIdx.x / kWarp), lane(threadIdx.x % kWarp), rows(warp / 2), half(warp % 2), c(2 * (lane % 4)) {}

  // f(value, row of the slice, column)
  template <class F> __device__ __forceinline__ void each(F f) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) f(s[n][i], rows * 16 + lane / 4 + i / 2 * 8, half * (K / 2) + n * 8 + c + i % 2);
  }

  __device__ __forceinline__ void tops(float& top0, float& top1) {
    row_tops(s, top0, top1);
    const auto regular = [](float top, float least) { return top >= least && top <= 0x1p100f; };  // not so of NaN
    irregular |= !regular(top0, least0) || !regular(top1, least1);
  }

  // product: of this half of K
  __device__ __forceinline__ void publish(const Stage<T, K>& now, Exchange<K>& x, float (&product)[8][4]) {
    float top0, top1;
    tops(top0, top1);
    const Power power0 = power_for<kTopState>(top0), power1 = power_for<kTopState>(top1);
    if (c == 0) x.state_up[rows][half][lane / 4] = power0.up, x.state_up[rows][half][lane / 4 + 8] = power1.up;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) product[n][i] = 0;
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      uint32_t b[8][4];
#pragma unroll
      for (int n = 0; n < 8; ++n)
        load_matrices(b[n], now.keys + (n * (K / 8) + half * kColumns + 2 * step) * 64 + lane * 8);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Fragment a = split(s[2 * (step + i)], s[2 * (step + i) + 1], power0.down, power1.down);
        store(x.state[rows][half * kSteps + step + i], lane, a);
#pragma unroll
        for (int n = 0; n < 8; ++n) mma(product[n], a.low, b[n][2 * i], b[n][2 * i + 1]);
#pragma unroll
        for (int n = 0; n < 8; ++n) mma(product[n], a.high, b[n][2 * i], b[n][2 * i + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      product[n][0] *= power0.up, product[n][1] *= power0.up, product[n][2] *= power1.up, product[n][3] *= power1.up;
      x.products[warp][n][lane] = *(const float4*)product[n];
    }
  }

  // up0, up1: what products with `writes` are to be multiplied by
  __device__ __forceinline__ void correct(const Stage<T, K>& now, Exchange<K>& x, float (&product)[8][4], float& up0,
                                          float& up1) {
    uint32_t v[4][4];  // of each sixteen tokens: this lane's two rows, two tokens each, of the first eight; of the rest
#pragma unroll
    for (int j = 0; j < 4; ++j)
      load_transposed(v[j], now.values + value_offset(j * 16 + lane / 16 * 8 + lane % 8, rows * 2 + lane % 16 / 8));
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float4 other = x.products[warp ^ 1][n][lane];
      const float2 read = *(const float2*)&now.head.scalars.read[n * 8 + c];
      const float2 above = unpack<T>(v[n / 2][n % 2 * 2]), below = unpack<T>(v[n / 2][n % 2 * 2 + 1]);
      float(&y)[4] = product[n];
      y[0] = fmaf(-read.x, y[0] + other.x, above.x), y[1] = fmaf(-read.y, y[1] + other.y, above.y);
      y[2] = fmaf(-read.x, y[2] + other.z, below.x), y[3] = fmaf(-read.y, y[3] + other.w, below.y);
    }
    float top0, top1;
    row_tops(product, top0, top1);
    irregular |= !scales(top0) || !scales(top1) || irregular_chunk(now.head.scalars);
    const Power power0 = power_for<kTopState>(top0), power1 = power_for<kTopState>(top1);
    Fragment a[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) a[j] = split(product[2 * j], product[2 * j + 1], power0.down, power1.down);

    // The sums of rows of `solve` bound u, below 2^(13 + 1 + 7 + 1): halves have room for 2^-7 of it.
    constexpr float down = 1.0f / (1 << kTopRows), up = 1 << kTopRows;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const int i = tile_row(half, which);
      float u[2][4];
      triangle_rows(u, a, now.head.solve, i);
      store(x.corrections[rows][i], lane, split(u[0], u[1], down, down));
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 write = *(const float2*)&now.head.scalars.write[(2 * i + n) * 8 + c];
        u[n][0] *= write.x, u[n][1] *= write.y, u[n][2] *= write.x, u[n][3] *= write.y;
      }
      store(x.writes[rows][i], lane, split(u[0], u[1], down, down));
    }
    if (half == 0 && c == 0) x.up[rows][lane / 4] = up * power0.up, x.up[rows][lane / 4 + 8] = up * power1.up;
    up0 = up * power0.up * now.head.scalars.write_up, up1 = up * power1.up * now.head.scalars.write_up;
    least0 = top0 > 0.0f ? 8.0f * up0 : 0.0f, least1 = top1 > 0.0f ? 8.0f * up1 : 0.0f;
  }

  __device__ __forceinline__ void update(const Stage<T, K>& now, const Exchange<K>& x, float up0, float up1) {
    float sum[kColumns][4] = {};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const Fragment a = load(x.writes[rows][step], lane);
      uint32_t b[kColumns / 2][4];
#pragma unroll
      for (int n = 0; n < kColumns / 2; ++n) {
        const int row = 2 * step + lane % 16 / 8, column = half * kColumns + 2 * n + lane / 16;  // the matrix named
        load_transposed(b[n], now.keys + (row * (K / 8) + column) * 64 + lane % 8 * 8);
      }
#pragma unroll
      for (int n = 0; n < kColumns; ++n) mma(sum[n], a.low, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) mma(sum[n], a.high, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
    const float decay = now.head.scalars.decay;
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = fmaf(sum[n][i], i < 2 ? up0 : up1, decay * s[n][i]);
  }
};

template <class T, int K> struct Reading {
  static constexpr int kColumns = K / 16, kSteps = K / 32;  // of half a row, as above
  int lane, rows, half, c;

  __device__ __forceinline__ Reading()
      : lane(threadIdx.x % kWarp), rows((threadIdx.x - kUpdating) / (2 * kWarp)), half(threadIdx.x / kWarp % 2),
        c(2 * (lane % 4)) {}

  // product: S q, of the warp's two tile rows of tokens
  __device__ __forceinline__ void ask(const Stage<T, K>& now, const Exchange<K>& x, float (&product)[4][4]) const {
    float sum[2][4][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        uint32_t b[4][4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int tokens = 2 * tile_row(half, n / 2) + n % 2;
          load_matrices(b[n], now.queries + (tokens * (K / 8) + part * kColumns + 2 * step) * 64 + lane * 8);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const Fragment a = load(x.state[rows][part * kSteps + step + i], lane);
#pragma unroll
          for (int n = 0; n < 4; ++n) mma(sum[part][n], a.low, b[n][2 * i], b[n][2 * i + 1]);
#pragma unroll
          for (int n = 0; n < 4; ++n) mma(sum[part][n], a.high, b[n][2 * i], b[n][2 * i + 1]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8;
        product[n][i] = sum[0][n][i] * x.state_up[rows][0][row] + sum[1][n][i] * x.state_up[rows][1][row];
      }
  }

  // out: of the chunk's first token, this slice's first row
  __device__ __forceinline__ void answer(const Stage<T, K>& now, const Exchange<K>& x, const float (&product)[4][4],
                                         T* out, int token_stride, int count) const {
    Fragment a[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) a[j] = load(x.corrections[rows][j], lane);
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const int i = tile_row(half, which);
      float sum[2][4];
      triangle_rows(sum, a, now.head.mix, i);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float(&y)[4] = product[2 * which + n];
        const float2 asked = *(const float2*)&now.head.scalars.ask[(2 * i + n) * 8 + c];
        const float2 own = *(const float2*)&now.head.scalars.own[(2 * i + n) * 8 + c];
        const int token = (2 * i + n) * 8 + lane / 4;
#pragma unroll
        for (int m = 0; m < 2; ++m) {  // eight rows
          const float up = x.up[rows][lane / 4 + m * 8];
          Pack<T, 2> pair;
          pair.at[0] = from_f32<T>(fmaf(asked.x, y[2 * m], own.x * (up * sum[n][2 * m])));
          pair.at[1] = from_f32<T>(fmaf(asked.y, y[2 * m + 1], own.y * (up * sum[n][2 * m + 1])));
          const uint32_t turned = transpose((const uint32_t&)pair);
          if (token < count) *(uint32_t*)(out + token * token_stride + rows * 16 + m * 8 + c) = turned;
        }
      }
    }
  }
};

}  // namespace
