// gdn_prefill in chunks, phase 1: all that does not depend on the state, a block per chunk and query/key head.
//
// q and k are read once, scaled and handed on as halves; k k^T and q k^T come from tensor cores and stay in registers,
// of four warps each, for the value heads that share them. Each of these takes its decays, and inverts its I + A in
// float32: the four diagonal tiles of 16 x 16 by substitution, then twice the corner of a triangle of two, which is
// -T_22 A_21 T_11. Bound by what it hands on: 75 KB per block, for two value heads and K of 128.
#pragma once
#include "gdn_prefill_chunks.cuh"

namespace {

constexpr int kLocalThreads = 256;
constexpr int kPitch = kChunk + 4;  // of float32 matrices: rows on different banks

struct LocalShared {
  float triangle[kChunk][kPitch], inverse[kChunk][kPitch];  // their space is keys' and queries' first
  float near[4][16][17];                // decays D within the tiles on the diagonal
  float before[kChunk], after[kChunk];  // decays from the tile's start up to the token, and from there to its end
  float whole[4];                       // of a tile
  float decay[kChunk], beta[kChunk], unit_k[kChunk], unit_q[kChunk];
  float up[kChunk];                     // what rows of `solve` are to be multiplied by; 0 where the row is
  float most[2];
};

// The decay over the tiles between tile j and tile i.
__device__ __forceinline__ float between(const LocalShared& s, int i, int j) {
  float decay = 1;
  for (int tile = j + 1; tile < i; ++tile) decay *= s.whole[tile];
  return decay;
}

// Eight tokens' rows of K: lane l has row l % 8, and every fourth group of eight values from l / 8 on.
template <class T, int K> struct Eight {
  Pack<T, 8> at[K / 32];

  __device__ __forceinline__ void load(const Rows<const T>& x, int64_t token, int64_t head, bool real, bool packs) {
    const int part = threadIdx.x % kWarp / 8;
    const T* row = x.at(token, head) + part * 8;
#pragma unroll
    for (int i = 0; i < K / 32; ++i) {
      if (real && packs) {
        at[i] = *(const Pack<T, 8>*)(row + i * 32);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) at[i].at[j] = real ? row[i * 32 + j] : T(0.0f);
      }
    }
  }

  // Stores the rows as halves in their own scale, twice; unit: the factor that is left. False: beyond halves' range.
  __device__ __forceinline__ bool store(f16* to, f16* also_to, int eight, float* unit, bool l2norm, float factor) {
    const int lane = threadIdx.x % kWarp;
    float top = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < K / 32; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float x = to_f32(at[i].at[j]);
        top = larger(top, fabsf(x));
        squares = fmaf(x, x, squares);
      }
#pragma unroll
    for (int offset = 8; offset < kWarp; offset *= 2) {
      top = larger(top, __shfl_xor_sync(kAllLanes, top, offset));
      squares += __shfl_xor_sync(kAllLanes, squares, offset);
    }
    const Power power = power_for<kTopInputs>(top);
    if (lane < 8) unit[eight * 8 + lane] = unit_factor(squares, l2norm) * power.up * factor;
#pragma unroll
    for (int i = 0; i < K / 32; ++i) {
      Pack<f16, 8> halves;
#pragma unroll
      for (int j = 0; j < 8; ++j) halves.at[j] = from_f32<f16>(to_f32(at[i].at[j]) * power.down);
      const int offset = ((eight * (K / 8) + i * 4 + lane / 8) * 8 + lane % 8) * 8;
      *(Pack<f16, 8>*)(to + offset) = halves;
      *(Pack<f16, 8>*)(also_to + offset) = halves;
    }
    return scales(top);
  }
};

// Substitution in one tile of the diagonal, a column per lane.
__device__ __forceinline__ void invert_tile(LocalShared& s, int tile) {
  const int lane = threadIdx.x % kWarp, column = lane % 16;
  float t[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    t[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 four = *(const float4*)&s.triangle[tile * 16 + i][tile * 16 + j];
      const float row[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int l = 0; l < 4; ++l)
        if (j + l < i) t[i] = fmaf(-row[l], t[j + l], t[i]);
    }
  }
  if (lane < 16)
#pragma unroll
    for (int i = 0; i < 16; ++i) s.inverse[tile * 16 + i][tile * 16 + column] = t[i];
}

// Four columns of one row of x y, from l = first on to l = end: steps of four.
__device__ __forceinline__ float4 multiply(const float* x, const float* y, int first, int end) {
  float4 sum = {};
#pragma unroll 4
  for (int l = first; l < end; l += 4) {
    const float4 row = *(const float4*)(x + l);
    const float value[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float4 columns = *(const float4*)(y + (l + m) * kPitch);
      sum.x = fmaf(value[m], columns.x, sum.x), sum.y = fmaf(value[m], columns.y, sum.y);
      sum.z = fmaf(value[m], columns.z, sum.z), sum.w = fmaf(value[m], columns.w, sum.w);
    }
  }
  return sum;
}

// The corners below the diagonal of the pairs of triangles of kSize rows: x = A_21 T_11, which is kept in the unused
// corner above the diagonal, then -T_22 x. Both stop at the triangles' zeros, in steps of tiles.
template <int kSize> __device__ __forceinline__ void invert_corners(LocalShared& s) {
  constexpr int kEach = kSize * kSize / 4;  // threads
  const int base = threadIdx.x / kEach * 2 * kSize, thread = threadIdx.x % kEach;
  const int row = thread / (kSize / 4), column = thread % (kSize / 4) * 4;
  const bool works = base < kChunk;
  if (works)
    *(float4*)&s.inverse[base + row][base + kSize + column] =
        multiply(&s.triangle[base + kSize + row][base], &s.inverse[base][base + column], column / 16 * 16, kSize);
  __syncthreads();
  if (works) {
    const float4 x = multiply(&s.inverse[base + kSize + row][base + kSize], &s.inverse[base][base + kSize + column], 0,
                              row / 16 * 16 + 16);
    *(float4*)&s.inverse[base + kSize + row][base + column] = {-x.x, -x.y, -x.z, -x.w};
  }
  __syncthreads();
}

// A warp's 16 rows of a lower triangle, tile row i, as fragments C, to global memory: each row in two parts, scaled so
// that its magnitudes' sum is below 2^8. False: beyond the range of halves. up0, up1: what this lane's rows are to be
// multiplied by. tile(j, x) makes x the fragments of tile j; it is asked twice, which is cheaper than to keep them.
template <class F> __device__ __forceinline__ bool store_rows(f16* to, int i, float& up0, float& up1, F tile) {
  const int lane = threadIdx.x % kWarp;
  float x[2][4], sum0 = 0, sum1 = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j > i) continue;
    tile(j, x);
#pragma unroll
    for (int n = 0; n < 2; ++n)
      sum0 += fabsf(x[n][0]) + fabsf(x[n][1]), sum1 += fabsf(x[n][2]) + fabsf(x[n][3]);
  }
#pragma unroll
  for (int offset = 1; offset < 4; offset *= 2) {
    sum0 += __shfl_xor_sync(kAllLanes, sum0, offset);
    sum1 += __shfl_xor_sync(kAllLanes, sum1, offset);
  }
  const Power power0 = power_for<kTopRows>(sum0), power1 = power_for<kTopRows>(sum1);
  up0 = sum0 == 0.0f ? 0.0f : power0.up, up1 = sum1 == 0.0f ? 0.0f : power1.up;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j > i) continue;
    tile(j, x);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      f16* matrix = to + tile_offset(i, j) + n * 64 + 2 * lane;
      uint32_t high, low;
      split(x[n][0] * power0.down, x[n][1] * power0.down, high, low);
      *(uint32_t*)matrix = high, *(uint32_t*)(matrix + 256) = low;
      split(x[n][2] * power1.down, x[n][3] * power1.down, high, low);
      *(uint32_t*)(matrix + 128) = high, *(uint32_t*)(matrix + 256 + 128) = low;
    }
  }
  return scales(sum0) && scales(sum1);
}

template <class T, int K>
__global__ void __launch_bounds__(kLocalThreads, 3) local_kernel(
    Prefill p, Rows<const T> q, Rows<const T> k, Scratch scratch, Part part, bool packs) {
  extern __shared__ __align__(16) unsigned char memory[];
  LocalShared& s = *(LocalShared*)memory;
  f16 *keys = (f16*)memory, *queries = keys + kChunk * K;
  static_assert(2 * kChunk * K * sizeof(f16) <= sizeof(s.triangle) + sizeof(s.inverse), "room for keys and queries");

  const int heads = int(p.H), place = int(blockIdx.x) / heads, shared = int(blockIdx.x) % heads;
  const int64_t chunk = part.first + place;
  const int64_t n = sequence_of(p, chunk);
  if (n < 0) return;
  const int first = p.bounds[n] + int(chunk - first_chunk(p, n)) * kChunk, left = p.bounds[n + 1] - first;
  if (left <= 0) return;
  const int count = left < kChunk ? left : kChunk;  // of tokens
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

  // Of every token, by the first 64 threads. False: beyond the range of halves.
  const auto load_gates = [&](int head) {
    const int64_t token = first + int(threadIdx.x);
    const bool real = threadIdx.x < count;
    const float decay = decay_of(real ? p.g[token * p.g_stride + head] : 0.0f);
    const float beta = real ? p.beta[token * p.beta_stride + head] : 0.0f;
    s.decay[threadIdx.x] = decay, s.beta[threadIdx.x] = beta;
    return decay <= 1.0f && scales(fabsf(beta));
  };

  const int group = int(p.HV) / heads;
  bool regular, fits = true;
  {
    Eight<T, K> key, query;
    const bool real = warp * 8 + lane % 8 < count;
    const int token = first + (real ? warp * 8 + lane % 8 : 0);
    key.load(k, token, shared, real, packs);
    query.load(q, token, shared, real, packs);
    if (threadIdx.x < kChunk) fits = load_gates(shared * group);
    f16* out = scratch.keys + int64_t(blockIdx.x) * 2 * kChunk * K;
    regular = key.store(keys, out, warp, s.unit_k, p.l2norm, 1.0f);
    regular &= query.store(queries, out + kChunk * K, warp, s.unit_q, p.l2norm, p.scale);
  }
  __syncthreads();

  // This lane's elements of rows row0 and row1 of k k^T or q k^T: of each eight columns, c and c + 1.
  const bool asks = warp >= 4;
  const int i = warp % 4, row0 = i * 16 + lane / 4, row1 = row0 + 8, c = 2 * (lane % 4);
  float product[8][4] = {};
#pragma unroll
  for (int step = 0; step < K / 16; ++step) {
    uint32_t a[4];
    const int row = 2 * i + lane % 16 / 8, column = 2 * step + lane / 16;  // the matrix that this lane names
    load_matrices(a, (asks ? queries : keys) + (row * (K / 8) + column) * 64 + lane % 8 * 8);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j > i) continue;
      uint32_t b[4];
      load_matrices(b, keys + ((2 * j + lane / 16) * (K / 8) + 2 * step + lane % 16 / 8) * 64 + lane % 8 * 8);
      mma(product[2 * j], a, b[0], b[1]);
      mma(product[2 * j + 1], a, b[2], b[3]);
    }
  }

  __syncthreads();  // all have left keys and queries

  for (int head = shared * group; head < (shared + 1) * group; ++head) {
    HeadChunk& result = scratch.heads[place * p.HV + head];
    fits &= regular;
    if (threadIdx.x < 2 * kChunk) {
      const unsigned token = threadIdx.x % kChunk, tile = token / 16, within = token % 16;
      float decays[16], decay = 1;
#pragma unroll
      for (int l = 0; l < 16; l += 4) *(float4*)(decays + l) = *(const float4*)&s.decay[tile * 16 + l];
      if (threadIdx.x < kChunk) {
#pragma unroll
        for (int l = 0; l < 16; ++l) {
          if (l > within) decay *= decays[l];
          if (l >= within) s.near[tile][l][within] = decay;
        }
        s.after[token] = decay;
      } else {
#pragma unroll
        for (int l = 0; l < 16; ++l)
          if (l <= within) decay *= decays[l];
        s.before[token] = decay;
        if (within == 15) s.whole[tile] = decay;
      }
    }
    __syncthreads();

    // D of this lane's elements of tile j: its rows' decays up to the tile's start, or within the tile on the diagonal
    const auto decays = [&](int j, float (&d)[2][4]) {
      const float over = between(s, i, j);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int row = lane / 4 + m / 2 * 8, column = n * 8 + c + m % 2;
          d[n][m] = j < i          ? over * s.after[j * 16 + column] * s.before[i * 16 + row]
                    : column > row ? 0.0f
                                   : s.near[j][row][column];
        }
    };

    if (!asks) {
      const float left0 = s.beta[row0] * s.unit_k[row0], left1 = s.beta[row1] * s.unit_k[row1];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j > i) continue;
        float d[2][4];
        decays(j, d);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int column = j * 16 + n * 8 + c;
          const float2 right = *(const float2*)&s.unit_k[column];
          const float(&x)[4] = product[2 * j + n];
          *(float2*)&s.triangle[row0][column] = {left0 * right.x * d[n][0] * x[0], left0 * right.y * d[n][1] * x[1]};
          *(float2*)&s.triangle[row1][column] = {left1 * right.x * d[n][2] * x[2], left1 * right.y * d[n][3] * x[3]};
        }
      }
    }
    __syncthreads();
    if (!asks) invert_tile(s, i);
    __syncthreads();
    invert_corners<16>(s);
    invert_corners<32>(s);

    float up0, up1;
    if (!asks) {
      fits &= store_rows(result.solve, i, up0, up1, [&](int j, float (&x)[2][4]) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int column = j * 16 + n * 8 + c;
          const float2 beta = *(const float2*)&s.beta[column];
          const float2 above = *(const float2*)&s.inverse[row0][column];
          const float2 below = *(const float2*)&s.inverse[row1][column];
          x[n][0] = above.x * beta.x, x[n][1] = above.y * beta.y;
          x[n][2] = below.x * beta.x, x[n][3] = below.y * beta.y;
        }
      });
      if (c == 0) s.up[row0] = up0, s.up[row1] = up1;
    }
    __syncthreads();
    if (asks) {
      const float left0 = s.unit_q[row0], left1 = s.unit_q[row1];
      fits &= store_rows(result.mix, i, up0, up1, [&](int j, float (&x)[2][4]) {
        float d[2][4];
        decays(j, d);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int column = j * 16 + n * 8 + c;
          const float2 unit = *(const float2*)&s.unit_k[column], up = *(const float2*)&s.up[column];
          const float(&y)[4] = product[2 * j + n];
          x[n][0] = left0 * (unit.x * up.x) * d[n][0] * y[0], x[n][1] = left0 * (unit.y * up.y) * d[n][1] * y[1];
          x[n][2] = left1 * (unit.x * up.x) * d[n][2] * y[2], x[n][3] = left1 * (unit.y * up.y) * d[n][3] * y[3];
        }
      });
      if (c == 0) result.scalars.own[row0] = up0, result.scalars.own[row1] = up1;
    }
    float write = 0;
    const unsigned token = threadIdx.x, tile = token / 16;
    if (token < kChunk) {
      const float decay = between(s, tile, -1) * s.before[token];  // from the chunk's start
      write = s.after[token] * between(s, 4, tile) * s.unit_k[token] * s.up[token];
      const float read = decay * s.unit_k[token], ask = decay * s.unit_q[token];
      result.scalars.read[token] = read, result.scalars.ask[token] = ask;
      if (token == kChunk - 1) result.scalars.decay = decay;
      float most = fabsf(write);
#pragma unroll
      for (int offset = kWarp / 2; offset; offset /= 2) most = larger(most, __shfl_xor_sync(kAllLanes, most, offset));
      if (lane == 0) s.most[warp] = most;
      fits &= fabsf(read) <= 0x1p100f && fabsf(ask) <= 0x1p100f;
    }
    const bool fitted = fits;
    fits = true;
    if (token < kChunk && head + 1 < (shared + 1) * group) fits = load_gates(head + 1);
    const bool irregular = __syncthreads_or(!fitted);
    if (token < kChunk) {
      const float most = larger(s.most[0], s.most[1]);
      const Power power = power_for<-1>(most);
      result.scalars.write[token] = write * power.down;
      if (token == 0) {
        result.scalars.write_up = most == 0.0f ? 0.0f : power.up;
        result.scalars.irregular = irregular || !scales(most);
      }
    }
  }
}

}  // namespace
