// gdn_prefill token by token: the recurrence as it stands, in float32.
//
// A block takes 32 rows of one head's state through a sequence. The rows live in registers, 16 values per lane, for the
// whole sequence, so that a token costs no more than its q, k and v. These are prepared (to float32, normalised, by 4
// warps of their own) a tile of tokens ahead, in shared memory. What is left is the chain from one token to the next: a
// product over K, three shuffles of it for K = 128, and an update.
#pragma once
#include "gdn_prefill.cuh"

namespace {

constexpr int kPreparing = 4;  // warps
constexpr int kPerSM = 2 * (kPreparing * kWarp + 8 * kSlice);  // threads: two blocks for K of 128, one for any other

struct Tile {  // of tokens, in shared memory: keys and queries [tokens][width], values [tokens][rows], gates
  int tokens, width, rows;
  __host__ __device__ Tile(int lanes)
      : tokens(lanes <= 8 ? 16 : 128 / lanes), width(lanes * kPerLane), rows(lanes < kWarp ? kSlice : kSlice / 2) {}
  __host__ __device__ int size() const { return tokens * (2 * width + rows + 2); }
};

template <class T>
__device__ __forceinline__ void prepare(
    const Prefill& p, const Tokens<T>& in, const Sequence& s, const Tile& tile, float* k, int64_t token, int count,
    int row) {
  float *q = k + tile.tokens * tile.width, *v = q + tile.tokens * tile.width, *decay = v + tile.tokens * tile.rows;
  float* beta = decay + tile.tokens;
  const int lane = threadIdx.x % 16;  // half a warp per token
  for (int first = 0; first < count; first += 2 * kPreparing) {
    const int i = first + threadIdx.x / 16;
    const bool real = i < count;
    const int64_t t = token + i;
    float squares_k = 0, squares_q = 0;
    if (real) {
      const T *key = in.k.at(t, s.shared), *query = in.q.at(t, s.shared), *value = in.v.at(t, s.head) + row;
#pragma unroll 4
      for (int j = lane; j < tile.width; j += 16) {
        const float x = j < p.K ? to_f32(key[j]) : 0.0f, y = j < p.K ? to_f32(query[j]) : 0.0f;
        k[i * tile.width + j] = x, q[i * tile.width + j] = y;
        squares_k = fmaf(x, x, squares_k), squares_q = fmaf(y, y, squares_q);
      }
      for (int j = lane; j < tile.rows; j += 16) v[i * tile.rows + j] = row + j < p.V ? to_f32(value[j]) : 0.0f;
      if (lane == 0) {
        decay[i] = decay_of(p.g[t * p.g_stride + s.head]);
        beta[i] = p.beta[t * p.beta_stride + s.head];
      }
    }
    const float unit_k = unit_factor(row_sum<16>(squares_k, 16), p.l2norm);
    const float unit_q = unit_factor(row_sum<16>(squares_q, 16), p.l2norm);
    if (real)
      for (int j = lane; j < tile.width; j += 16) k[i * tile.width + j] *= unit_k, q[i * tile.width + j] *= unit_q;
  }
}

// redo: of each block, whether it has anything to do; or null.
template <class T, class S, int kLanes>
__global__ void __launch_bounds__(kPerSM) steps_kernel(
    Prefill p, Tokens<T> in, S* pool, T* o, const int32_t* redo, int any_lanes, bool packs) {
  extern __shared__ __align__(16) unsigned char memory[];
  start_early();
  if (redo && !redo[blockIdx.x]) return;
  const int lanes = kLanes ? kLanes : any_lanes;
  const Tile tile(lanes);
  const int slices = int(ceil_div<int64_t>(p.V, tile.rows)), heads = int(p.HV);
  const int first_row = int(blockIdx.x) % slices * tile.rows, head = int(blockIdx.x) / slices % heads;
  const Sequence s(p, int(blockIdx.x) / slices / heads, head);
  clear_uncovered(p, s, o, first_row, tile.rows);

  const int worker = int(threadIdx.x) - kPreparing * kWarp;  // negative in the warps that prepare
  const int lane = worker % lanes, mine = worker / lanes;
  const int row = first_row + mine;
  const bool works = worker >= 0 && row < p.V;
  float x[kPerLane] = {};
  S* const held = pool + s.state + row * p.K + 4 * lane;
  const auto state = [&](auto each) {  // each(four values of x, where they lie, how many of them are there)
    if (!works || !s.kept) return;
#pragma unroll
    for (int i = 0; i < kPerLane; i += 4) {
      const int there = int(p.K) - i * lanes - 4 * lane;
      each(x + i, held + i * lanes, there < 4 ? there : 4);
    }
  };
  if (s.continued)
    state([&](float* to, const S* from, int there) {
      if (packs) {
        const Pack<S, 4> pack = *(const Pack<S, 4>*)from;
#pragma unroll
        for (int j = 0; j < 4; ++j) to[j] = to_f32(pack.at[j]);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (j < there) to[j] = to_f32(from[j]);
      }
    });

  const auto count_at = [&](int64_t token) { return s.end - token < tile.tokens ? int(s.end - token) : tile.tokens; };
  float* now = (float*)memory;
  float* next = now + tile.size();
  if (worker < 0 && s.first < s.end) prepare(p, in, s, tile, now, s.first, count_at(s.first), first_row);
  __syncthreads();
  for (int64_t token = s.first; token < s.end; token += tile.tokens) {
    if (worker < 0) {
      const int64_t later = token + tile.tokens;
      if (later < s.end) prepare(p, in, s, tile, next, later, count_at(later), first_row);
    } else {
      const float *q = now + tile.tokens * tile.width, *v = q + tile.tokens * tile.width;
      const float *decay = v + tile.tokens * tile.rows, *beta = decay + tile.tokens;
      T* out = o + (token * p.HV + head) * p.V + row;
      const int count = count_at(token);
      for (int t = 0; t < count; ++t, out += p.HV * p.V) {
        const float4* keys = (const float4*)(now + t * tile.width) + lane;
        const float4* queries = (const float4*)(q + t * tile.width) + lane;
        float k[kPerLane], product[4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) *(float4*)(k + 4 * i) = keys[i * lanes];
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          x[i] *= decay[t];
          product[i % 4] = fmaf(x[i], k[i], product[i % 4]);
        }
        const float read = row_sum<kLanes>((product[0] + product[1]) + (product[2] + product[3]), lanes);
        const float u = beta[t] * (v[t * tile.rows + mine] - read);
#pragma unroll
        for (int i = 0; i < 4; ++i) product[i] = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float4 query = queries[i * lanes];
          const float y[4] = {query.x, query.y, query.z, query.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            x[4 * i + j] = fmaf(u, k[4 * i + j], x[4 * i + j]);
            product[j] = fmaf(x[4 * i + j], y[j], product[j]);
          }
        }
        const float result = row_sum<kLanes>((product[0] + product[1]) + (product[2] + product[3]), lanes);
        if (lane == 0 && works) *out = from_f32<T>(p.scale * result);
      }
    }
    float* const done = now;
    now = next, next = done;
    __syncthreads();
  }

  state([&](float* from, S* to, int there) {
    Pack<S, 4> pack;
#pragma unroll
    for (int j = 0; j < 4; ++j) pack.at[j] = from_f32<S>(from[j]);
    if (packs) {
      *(Pack<S, 4>*)to = pack;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (j < there) to[j] = pack.at[j];
    }
  });
}

// K beyond what a warp holds in registers: a warp per row of the state, which it keeps in shared memory.
template <class T, class S>
__global__ void __launch_bounds__(kWarp) wide_steps_kernel(Prefill p, Tokens<T> in, S* pool, T* o) {
  extern __shared__ __align__(16) unsigned char memory[];
  float* const x = (float*)memory;
  start_early();
  const int64_t row = blockIdx.x % p.V, head = blockIdx.x / p.V % p.HV;
  const Sequence s(p, blockIdx.x / p.V / p.HV, head);
  const int lane = threadIdx.x;
  clear_uncovered(p, s, o, row, 1);
  for (int64_t i = lane; i < p.K; i += kWarp) x[i] = s.continued ? to_f32(pool[s.state + row * p.K + i]) : 0.0f;
  for (int64_t t = s.first; t < s.end; ++t) {
    const T *k = in.k.at(t, s.shared), *q = in.q.at(t, s.shared);
    const float decay = decay_of(p.g[t * p.g_stride + head]);
    float squares_k = 0, squares_q = 0, product = 0;
    for (int64_t i = lane; i < p.K; i += kWarp) {
      const float key = to_f32(k[i]), query = to_f32(q[i]);
      squares_k = fmaf(key, key, squares_k), squares_q = fmaf(query, query, squares_q);
    }
    const float unit_k = unit_factor(warp_sum(squares_k), p.l2norm);
    const float unit_q = unit_factor(warp_sum(squares_q), p.l2norm);
    for (int64_t i = lane; i < p.K; i += kWarp) product = fmaf(decay * x[i], unit_k * to_f32(k[i]), product);
    const float u = p.beta[t * p.beta_stride + head] * (to_f32(in.v.at(t, head)[row]) - warp_sum(product));
    product = 0;
    for (int64_t i = lane; i < p.K; i += kWarp) {
      x[i] = fmaf(u, unit_k * to_f32(k[i]), decay * x[i]);
      product = fmaf(x[i], unit_q * to_f32(q[i]), product);
    }
    product = warp_sum(product);
    if (lane == 0) o[(t * p.HV + head) * p.V + row] = from_f32<T>(p.scale * product);
  }
  if (s.kept)
    for (int64_t i = lane; i < p.K; i += kWarp) pool[s.state + row * p.K + i] = from_f32<S>(x[i]);
}

// redo: as the kernel's, per sequence, value head and slice of 32 rows; or null.
template <class T, class S>
int launch_steps(const Prefill& p, const Tokens<T>& in, S* pool, T* o, const int32_t* redo, void* stream) {
  const int64_t heads = p.N * p.HV;
  if (p.K > kWidest) {
    if (p.K * int64_t(sizeof(float)) > shared_memory_limit()) return kBadArgument;
    return launch_early(wide_steps_kernel<T, S>, dim3(heads * p.V), dim3(kWarp), p.K * sizeof(float), stream, p, in,
                        pool, o);
  }
  const int lanes = lanes_for(p.K);
  const Tile tile(lanes);
  const bool packs = p.K == lanes * kPerLane && aligned(4 * sizeof(S), sizeof(S), pool, p.state_stride);
  const auto kernel = lanes == 8 ? steps_kernel<T, S, 8> : steps_kernel<T, S, 0>;
  return launch_early(kernel, dim3(heads * ceil_div<int64_t>(p.V, tile.rows)),
                      dim3(kPreparing * kWarp + tile.rows * lanes), 2 * tile.size() * sizeof(float), stream, p, in,
                      pool, o, redo, lanes, packs);
}

}  // namespace
