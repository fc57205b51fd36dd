// gdn_prefill in chunks, phase 1: all that does not depend on the state, a block per chunk and two value heads of a
// query/key head.
//
// q and k are read once, scaled and handed on as halves. Then four warps work on each value head: a warp takes a row of
// tiles of k k^T and q k^T, 16 tokens, from tensor cores, and 16 rows of T, which need nothing of the other rows: from
// T (I + A) = I, in blocks of 8 x 8 and from the right,
//
//     T_ij = (I_ij - sum_{l > j} T_il A_lj) (I + A_jj)^-1
//
// The blocks on the diagonal are inverted by substitution. The products are tensor cores' in tf32: each operand is the
// sum of two parts, as exact as float32 and of its range. Results are operands A of the next product as they are, and
// operands B are transposed blocks of k k^T. What counts is the number of instructions.
#pragma once
#include "gdn_prefill_chunks.cuh"

namespace {

constexpr int kHeads = 2;            // value heads of a block
constexpr int kHeadThreads = 128;    // of each
constexpr int kLocalThreads = kHeads * kHeadThreads;
constexpr int kBlocks = kChunk / 8;  // along a side, of 8 x 8

struct HeadShared {  // of one value head
  Pair lower[kBlocks * (kBlocks - 1) / 2][kWarp];  // blocks of A below the diagonal, operands B; see block_at
  Pair inverse[kBlocks][kWarp];                    // of those on the diagonal, likewise
  float diagonal[kBlocks][8][8];                   // A there
  float near[4][16][17];                           // decays D within the tiles on the diagonal
  float before[kChunk], after[kChunk];  // decays from the tile's start up to the token, and from there to its end
  float beta[kChunk];
  float up[kChunk];                     // what rows of `solve` are to be multiplied by; 0 where the row is
};
template <int K> struct alignas(16) LocalShared {
  f16 keys[kChunk * K], queries[kChunk * K];
  HeadShared heads[kHeads];
  float unit_k[kChunk], unit_q[kChunk];
};

__device__ __forceinline__ int block_at(int i, int j) { return i * (i - 1) / 2 + j; }

// The decay over tile i.
__device__ __forceinline__ float whole(const HeadShared& s, int i) { return s.before[i * 16 + 15]; }

// Eight tokens' rows of K: lane l has row l % 8, and every fourth group of eight values from l / 8 on.
template <class T, int K> struct Eight {
  Pack<T, 8> at[K / 32];

  __device__ __forceinline__ float2 pair(int i, int j) const { return unpack<T>(((const uint32_t(&)[4])at[i])[j]); }

  __device__ __forceinline__ void load(const Rows<const T>& x, int64_t token, int64_t head, bool real, bool packs) {
    const int part = threadIdx.x % kWarp / 8;
    const T* row = x.at(token, head) + part * 8;
    if (packs) {
#pragma unroll
      for (int i = 0; i < K / 32; ++i) {
        const uint4 eight = *(const uint4*)(row + i * 32), none = {};
        (uint4&)at[i] = real ? eight : none;
      }
    } else {
#pragma unroll
      for (int i = 0; i < K / 32; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const T one = row[i * 32 + j];
          at[i].at[j] = real ? one : T(0.0f);
        }
    }
  }

  // Stores the rows as halves in their own scale, and also_to where that is given; unit: the factor left. False:
  // beyond halves' range.
  __device__ __forceinline__ bool store(f16* to, f16* also_to, int eight, float* unit, bool l2norm, float factor) {
    const int lane = threadIdx.x % kWarp;
    float top = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < K / 32; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = pair(i, j);
        top = larger(larger(top, fabsf(x.x)), fabsf(x.y));
        squares = fmaf(x.x, x.x, squares), squares = fmaf(x.y, x.y, squares);
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
      Pack<__half2, 4> halves;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = pair(i, j);
        halves.at[j] = __floats2half2_rn(x.x * power.down, x.y * power.down);
      }
      const int offset = ((eight * (K / 8) + i * 4 + lane / 8) * 8 + lane % 8) * 8;
      *(Pack<__half2, 4>*)(to + offset) = halves;
      if (also_to) *(Pack<__half2, 4>*)(also_to + offset) = halves;
    }
    return scales(top);
  }
};

// Gates of the chunk, by four warps: a lane has one token of a tile for the decays towards its end, by the first two
// warps, or from its start. False: beyond the range of halves.
__device__ __forceinline__ bool load_gates(const Prefill& p, HeadShared& s, int head, int first, int count) {
  const int thread = threadIdx.x % kHeadThreads, token = thread % kChunk, tile = token / 16, within = token % 16;
  const bool real = token < count;
  const float own = decay_of(real ? p.g[int64_t(first + token) * p.g_stride + head] : 0.0f);
  const float beta = real ? p.beta[int64_t(first + token) * p.beta_stride + head] : 0.0f;
  float decay = 1;
  if (thread < kChunk) {
#pragma unroll
    for (int l = 0; l < 16; ++l) {
      const float other = __shfl_sync(kAllLanes, own, (thread & 16) + l);
      if (l > within) decay *= other;
      s.near[tile][l][within] = decay;  // above the diagonal anything
    }
    s.after[token] = decay, s.beta[token] = beta;
  } else {
#pragma unroll
    for (int l = 0; l < 16; ++l) {
      const float other = __shfl_sync(kAllLanes, own, (thread & 16) + l);
      if (l <= within) decay *= other;
    }
    s.before[token] = decay;
  }
  return own <= 1.0f && scales(fabsf(beta));
}

// A warp's column j of tiles of A on and below the diagonal, from k k^T: product[2 l + n] has in its rows the tokens of
// tile j, and in its columns those of half n of tile l.
__device__ __forceinline__ void store_column(HeadShared& s, const float* unit, int j, const float (&product)[8][4]) {
  const int lane = threadIdx.x % kWarp, row = lane / 4, c = 2 * (lane % 4);
  const float unit0 = unit[j * 16 + row], unit1 = unit[j * 16 + row + 8];
  const float after0 = unit0 * s.after[j * 16 + row], after1 = unit1 * s.after[j * 16 + row + 8];
  float over = 1;  // the decay between the tiles
#pragma unroll
  for (int l = 0; l < 4; ++l) {
    if (l < j) continue;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int token = l * 16 + n * 8 + c, block = 2 * l + n;
      const float2 beta = *(const float2*)&s.beta[token], right = *(const float2*)&unit[token];
      const float(&x)[4] = product[block];
      float x0 = beta.x * right.x, x1 = beta.y * right.y;
      if (l > j) {
        const float2 before = *(const float2*)&s.before[token];
        x0 *= before.x * over, x1 *= before.y * over;
        s.lower[block_at(block, 2 * j)][lane] = pair_of(x0 * after0 * x[0], x1 * after0 * x[1]);
        s.lower[block_at(block, 2 * j + 1)][lane] = pair_of(x0 * after1 * x[2], x1 * after1 * x[3]);
        continue;
      }
      const float(&near)[16][17] = s.near[j];
      const float y0 = x0 * unit0 * near[n * 8 + c][row] * x[0], y1 = x1 * unit0 * near[n * 8 + c + 1][row] * x[1];
      if (n == 0) {
        s.diagonal[block][c][row] = y0, s.diagonal[block][c + 1][row] = y1;
      } else {
        s.lower[block_at(block, block - 1)][lane] = pair_of(y0, y1);
        s.diagonal[block][c][row] = x0 * unit1 * near[8 + c][row + 8] * x[2];
        s.diagonal[block][c + 1][row] = x1 * unit1 * near[8 + c + 1][row + 8] * x[3];
      }
    }
    if (l > j) over *= whole(s, l);
  }
}

// Two blocks on the diagonal, of tile j, by substitution: a column per lane, twice.
__device__ __forceinline__ void invert_diagonal(HeadShared& s, int j) {
  const int lane = threadIdx.x % kWarp, block = 2 * j + lane / 8 % 2, column = lane % 8;
  float t[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    t[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int l = 0; l < i; l += 4) {
      const float4 four = *(const float4*)&s.diagonal[block][i][l];
      const float row[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int m = 0; m < 4; ++m)
        if (l + m < i) t[i] = fmaf(-row[m], t[l + m], t[i]);
    }
  }
  if (lane < 16)
#pragma unroll
    for (int i = 0; i < 4; ++i) s.inverse[block][column * 4 + i] = pair_of(t[2 * i], t[2 * i + 1]);
}

// x: 16 rows of T, tile row i, in fragments C of eight columns.
__device__ __forceinline__ void invert_rows(const HeadShared& s, int i, float (&x)[8][4]) {
  const int lane = threadIdx.x % kWarp, row = lane / 4, c = 2 * (lane % 4);
  const float one0 = row == c ? 1.0f : 0.0f, one1 = row == c + 1 ? 1.0f : 0.0f;
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int m = 0; m < 4; ++m) x[n][m] = 0;
#pragma unroll
  for (int l = 7; l >= 0; --l) {
    if (l / 2 > i) continue;
    const bool here = l / 2 == i;
    float(&y)[4] = x[l];
    const float rest[4] = {(here && l % 2 == 0 ? one0 : 0.0f) - y[0], (here && l % 2 == 0 ? one1 : 0.0f) - y[1],
                           (here && l % 2 == 1 ? one0 : 0.0f) - y[2], (here && l % 2 == 1 ? one1 : 0.0f) - y[3]};
#pragma unroll
    for (int m = 0; m < 4; ++m) y[m] = 0;
    multiply(y, Parts(rest), s.inverse[l][lane]);
    const Parts parts(y);
#pragma unroll
    for (int j = 0; j < l; ++j) multiply(x[j], parts, s.lower[block_at(l, j)][lane]);
  }
}

// A warp's 16 rows of a lower triangle, tile row i, to global memory: each row in two parts, scaled so that its
// magnitudes' sum is below 2^5. False: beyond the range of halves. up0, up1: what this lane's rows are to be multiplied
// by.
__device__ __forceinline__ bool store_rows(f16* to, int i, const float (&x)[8][4], float& up0, float& up1) {
  const int lane = threadIdx.x % kWarp;
  float sum0 = 0, sum1 = 0;
#pragma unroll
  for (int n = 0; n < 8; ++n)
    if (n / 2 <= i) sum0 += fabsf(x[n][0]) + fabsf(x[n][1]), sum1 += fabsf(x[n][2]) + fabsf(x[n][3]);
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
    const Fragment f = split(x[2 * j], x[2 * j + 1], power0.down, power1.down);
    uint32_t* tile = (uint32_t*)(to + tile_offset(i, j)) + lane;
#pragma unroll
    for (int m = 0; m < 4; ++m) {  // matrices row by row, those of fragments column by column
      tile[m * kWarp] = f.high[m / 2 + m % 2 * 2];
      tile[(4 + m) * kWarp] = f.low[m / 2 + m % 2 * 2];
    }
  }
  return scales(sum0) && scales(sum1);
}

template <class T, int K>
__global__ void __launch_bounds__(kLocalThreads, 2) local_kernel(
    Prefill p, Rows<const T> q, Rows<const T> k, Scratch scratch, Part part, bool packs) {
  extern __shared__ __align__(16) unsigned char memory[];
  LocalShared<K>& all = *(LocalShared<K>*)memory;
  start_early();

  const unsigned heads = unsigned(p.H), group = unsigned(p.HV) / heads, pairs = ceil_div(group, unsigned(kHeads));
  const int pair = blockIdx.x % pairs, shared = blockIdx.x / pairs % heads, place = blockIdx.x / pairs / heads;
  const int64_t chunk = part.first + place;
  const int64_t n = sequence_of(p, chunk);
  if (n < 0) return;
  const int first = p.bounds[n] + int(chunk - first_chunk(p, n)) * kChunk, left = p.bounds[n + 1] - first;
  if (left <= 0) return;
  const int count = left < kChunk ? left : kChunk;  // of tokens
  // The compiler is to see that they are a warp's.
  const int warp = __shfl_sync(kAllLanes, int(threadIdx.x) / kWarp, 0), i = warp % 4, of_pair = warp / 4;
  const int lane = threadIdx.x % kWarp, head = shared * int(group) + pair * kHeads + of_pair;
  const bool works = pair * kHeads + of_pair < int(group);
  HeadShared& s = all.heads[of_pair];

  bool fits = true, regular;
  {
    Eight<T, K> key, query;
    const bool real = warp * 8 + lane % 8 < count;
    const int token = first + (real ? warp * 8 + lane % 8 : 0);
    key.load(k, token, shared, real, packs);
    query.load(q, token, shared, real, packs);
    if (works) fits = load_gates(p, s, head, first, count);
    f16* out = pair == 0 ? scratch.keys + (int64_t(place) * p.H + shared) * 2 * kChunk * K : nullptr;
    regular = key.store(all.keys, out, warp, all.unit_k, p.l2norm, 1.0f);
    regular &= query.store(all.queries, out ? out + kChunk * K : nullptr, warp, all.unit_q, p.l2norm, p.scale);
  }
  fits &= !__syncthreads_or(!regular);
  if (!works) return;

  float keys[8][4] = {}, queries[8][4] = {};  // k k^T from tile i on, q k^T up to it
#pragma unroll
  for (int step = 0; step < K / 16; ++step) {
    uint32_t a[4], asked[4];
    const int own = ((2 * i + lane % 16 / 8) * (K / 8) + 2 * step + lane / 16) * 64 + lane % 8 * 8;
    load_matrices(a, all.keys + own);
    load_matrices(asked, all.queries + own);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t b[4];
      load_matrices(b, all.keys + ((2 * j + lane / 16) * (K / 8) + 2 * step + lane % 16 / 8) * 64 + lane % 8 * 8);
      if (j >= i) mma(keys[2 * j], a, b[0], b[1]), mma(keys[2 * j + 1], a, b[2], b[3]);
      if (j <= i) mma(queries[2 * j], asked, b[0], b[1]), mma(queries[2 * j + 1], asked, b[2], b[3]);
    }
  }
  store_column(s, all.unit_k, i, keys);
  __syncwarp();
  invert_diagonal(s, i);
  meet(kHeadThreads, 1 + of_pair);

  HeadChunk& result = scratch.heads[place * p.HV + head];
  const int row0 = i * 16 + lane / 4, row1 = row0 + 8, c = 2 * (lane % 4);  // this lane's
  float up0, up1;
  {
    float solve[8][4];
    invert_rows(s, i, solve);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 beta = *(const float2*)&s.beta[n * 8 + c];
      solve[n][0] *= beta.x, solve[n][1] *= beta.y, solve[n][2] *= beta.x, solve[n][3] *= beta.y;
    }
    fits &= store_rows(result.solve, i, solve, up0, up1);
    if (c == 0) s.up[row0] = up0, s.up[row1] = up1;
  }
  meet(kHeadThreads, 1 + of_pair);

  const float unit0 = all.unit_q[row0], unit1 = all.unit_q[row1];
  const float before0 = unit0 * s.before[row0], before1 = unit1 * s.before[row1];
  float over = 1;
#pragma unroll
  for (int j = 3; j >= 0; --j) {
    if (j > i) continue;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int token = j * 16 + n * 8 + c;
      const float2 unit = *(const float2*)&all.unit_k[token], up = *(const float2*)&s.up[token];
      float(&x)[4] = queries[2 * j + n];
      const float x0 = unit.x * up.x, x1 = unit.y * up.y;
      if (j < i) {
        const float2 after = *(const float2*)&s.after[token];
        const float y0 = x0 * (after.x * over), y1 = x1 * (after.y * over);
        x[0] *= before0 * y0, x[1] *= before0 * y1, x[2] *= before1 * y0, x[3] *= before1 * y1;
      } else {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int row = lane / 4 + m / 2 * 8, column = n * 8 + c + m % 2;
          const float decay = column > row ? 0.0f : s.near[i][row][column];
          x[m] *= (m < 2 ? unit0 : unit1) * (m % 2 ? x1 : x0) * decay;
        }
      }
    }
    if (j < i) over *= whole(s, j);
  }
  fits &= store_rows(result.mix, i, queries, up0, up1);
  Scalars& scalars = result.scalars;
  if (c == 0) scalars.own[row0] = up0, scalars.own[row1] = up1;

  if (i == 0) {  // two tokens per lane
    float write[2], most = 0;
#pragma unroll
    for (int l = 0; l < 2; ++l) {
      const int token = l * kWarp + lane;
      float decay = s.before[token], rest = s.after[token];  // from the chunk's start, and to its end
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        if (tile < token / 16) decay *= whole(s, tile);
        if (tile > token / 16) rest *= whole(s, tile);
      }
      const float read = decay * all.unit_k[token], ask = decay * all.unit_q[token];
      scalars.read[token] = read, scalars.ask[token] = ask;
      if (token == kChunk - 1) scalars.decay = decay;
      fits &= fabsf(read) <= 0x1p100f && fabsf(ask) <= 0x1p100f;
      write[l] = rest * all.unit_k[token] * s.up[token];
      most = larger(most, fabsf(write[l]));
    }
#pragma unroll
    for (int offset = kWarp / 2; offset; offset /= 2) most = larger(most, __shfl_xor_sync(kAllLanes, most, offset));
    const Power power = power_for<-1>(most);
    scalars.write[lane] = write[0] * power.down, scalars.write[kWarp + lane] = write[1] * power.down;
    if (lane == 0) scalars.write_up = most == 0.0f ? 0.0f : power.up;
    fits &= scales(most);
  }
  const bool irregular = __any_sync(kAllLanes, !fits);
  if (lane == 0) scalars.irregular[i] = irregular;
}

}  // namespace
