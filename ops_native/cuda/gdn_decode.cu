// gdn_decode: gates and one token of the gated delta rule per row, the state updated in place.
//
// Bound by the state, HV V K values read and written once per row of the batch (2 MB each way for 32 heads of 128 x 128
// in float32); everything else is 1/V of that. So a warp works alone: it holds q and k in registers, normalised, 16
// values per lane, and takes a few rows of the state through them. There is no shared memory and nothing to wait for
// but memory. A row of K values is spread over K/16 lanes: a warp has 4 rows of 128 in hand, and a product over K costs
// three shuffles for all four.
//
//   rows     K of 128, V in whole blocks. A warp takes 4, 8 or 16 rows, all in flight at once, and ends: so blocks
//            follow each other through memory, as a copy does. The larger the batch, the more, as gates and norms are
//            paid for less often. All that a warp reads is asked for at once, but for the state, whose slot must be
//            known.
//   lines    else K in whole lines of 16 values: a warp takes its rows one after the other.
//   general  anything else: a warp per row of the state.
#include "gdn.cuh"

namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarp;
constexpr int64_t kMostInGrid = 65535;  // along y and z

struct Decode {
  int64_t B, H, HV, K, V;
  const float *A_log, *dt_bias;
  int64_t a_stride, b_stride, state_stride;
  const int32_t* slots;
  int64_t slots_stride, null_index;
  float scale;
  bool l2norm;
  int lanes;       // that hold a row of the state
  int group;       // rows of the state per warp
  bool packs;      // q and k: in packs as wide as the state's
};

template <class T> struct Inputs {
  Rows<const T> q, k, v;
  const T *a, *b;
};

struct Gates {
  float decay, beta;
};

__device__ __forceinline__ Gates gates(float a, float b, float A_log, float dt_bias) {
  return {decay_of(-expf(A_log) * softplus(a + dt_bias)), sigmoid(b)};
}

__device__ __forceinline__ bool is_padding(const Decode& p, int64_t slot) { return slot < 0 || slot == p.null_index; }

// What a warp has to do: rows [first, last) of the state of one head of one row of the batch.
struct Task {
  int64_t row, head, first, last, slot;
  __device__ __forceinline__ Task(const Decode& p, int rows_per_warp) {
    const int64_t parts = ceil_div<int64_t>(p.V, rows_per_warp);
    const int64_t warp = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    row = warp / parts / p.HV, head = warp / parts % p.HV;
    first = warp % parts * rows_per_warp;
    last = first + rows_per_warp < p.V ? first + rows_per_warp : p.V;
    slot = row < p.B ? p.slots[row * p.slots_stride] : -1;
  }
  // Whether there is nothing else to do.
  template <class T> __device__ __forceinline__ bool clears(const Decode& p, T* o) const {
    if (!is_padding(p, slot)) return false;
    if (row < p.B)
      for (int64_t i = first + threadIdx.x % kWarp; i < last; i += kWarp) o[(row * p.HV + head) * p.V + i] = T(0.0f);
    return true;
  }
  template <class T> __device__ __forceinline__ Gates gates(const Decode& p, const Inputs<T>& in) const {
    return ::gates(to_f32(in.a[row * p.a_stride + head]), to_f32(in.b[row * p.b_stride + head]), p.A_log[head],
                   p.dt_bias[head]);
  }
};

// What lanes hold of a row of K values, in packs as wide as the state's: the i-th begins at (i lanes + lane) N.
template <class T, int N> using Held = Pack<T, N>[kPerLane / N];

template <class T, int N>
__device__ __forceinline__ void load_row(Held<T, N>& to, const T* row, int lane, int lanes, bool packs) {
#pragma unroll
  for (int i = 0; i < kPerLane / N; ++i) {
    const T* from = row + (i * lanes + lane) * N;
    if (packs) {
      to[i] = *(const Pack<T, N>*)from;
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) to[i].at[j] = from[j];
    }
  }
}
// Scaled to length 1.
template <int kLanes, class T, int N>
__device__ __forceinline__ void unit_row(float (&to)[kPerLane], const Held<T, N>& from, const Decode& p) {
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    to[i] = to_f32(from[i / N].at[i % N]);
    squares = fmaf(to[i], to[i], squares);
  }
  const float factor = unit_factor(row_sum<kLanes>(squares, p.lanes), p.l2norm);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) to[i] *= factor;
}

// One row of the state, changed in place; its output.
template <int kLanes, class S, int N>
__device__ __forceinline__ float step_row(Held<S, N>& row, const float (&q)[kPerLane], const float (&k)[kPerLane],
                                          Gates gate, float value, const Decode& p) {
  float x[kPerLane], product = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) x[i] = gate.decay * to_f32(row[i / N].at[i % N]);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) product = fmaf(x[i], k[i], product);
  const float u = gate.beta * (value - row_sum<kLanes>(product, p.lanes));
  product = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    x[i] = fmaf(u, k[i], x[i]);
    product = fmaf(x[i], q[i], product);
    row[i / N].at[i % N] = from_f32<S>(x[i]);
  }
  return p.scale * row_sum<kLanes>(product, p.lanes);
}

template <class S, int N>
__device__ __forceinline__ void load_state(Held<S, N>& to, const S* from, int lanes) {
#pragma unroll
  for (int i = 0; i < kPerLane / N; ++i) (int4&)to[i] = __ldcg((const int4*)(from + i * lanes * N));
}
template <class S, int N>
__device__ __forceinline__ void store_state(S* to, const Held<S, N>& from, int lanes) {
#pragma unroll
  for (int i = 0; i < kPerLane / N; ++i) __stcg((int4*)(to + i * lanes * N), (const int4&)from[i]);
}

// A block is of one head of one row of the batch; its warps take 4 kVisits rows of the state each.
constexpr int kRow = 128, kRowLanes = kRow / kPerLane, kAtOnce = kWarp / kRowLanes;
template <class T, class S, int kVisits>
__global__ void __launch_bounds__(kThreads, kVisits == 1 ? 6 : 4) rows_kernel(Decode p, Inputs<T> in, S* state, T* o) {
  constexpr int N = 16 / sizeof(S);
  start_early();
  const int lane = threadIdx.x % kRowLanes, mine = threadIdx.x % kWarp / kRowLanes;
  const int row = blockIdx.z, head = blockIdx.y, shared = head / int(p.HV / p.H);
  const int first = (blockIdx.x * kWarps + threadIdx.x / kWarp) * kAtOnce * kVisits + mine;
  const int64_t slot = p.slots[row * p.slots_stride];
  Held<T, N> query, key;
  load_row(key, in.k.at(row, shared), lane, kRowLanes, p.packs);
  load_row(query, in.q.at(row, shared), lane, kRowLanes, p.packs);
  const T a = in.a[row * p.a_stride + head], b = in.b[row * p.b_stride + head];
  const float A_log = p.A_log[head], dt_bias = p.dt_bias[head];
  T values[kVisits];
#pragma unroll
  for (int i = 0; i < kVisits; ++i) values[i] = in.v.at(row, head)[first + i * kAtOnce];

  T* out = o + (row * p.HV + head) * p.V + first;
  if (is_padding(p, slot)) {
    if (lane == 0)
      for (int i = 0; i < kVisits; ++i) out[i * kAtOnce] = T(0.0f);
    return;
  }
  S* s = state + slot * p.state_stride + (int64_t(head) * p.V + first) * kRow + lane * N;
  Held<S, N> held[kVisits];
#pragma unroll
  for (int i = 0; i < kVisits; ++i) load_state(held[i], s + i * kAtOnce * kRow, kRowLanes);

  float q[kPerLane], k[kPerLane];
  unit_row<kRowLanes>(k, key, p);
  unit_row<kRowLanes>(q, query, p);
  const Gates gate = gates(to_f32(a), to_f32(b), A_log, dt_bias);
#pragma unroll
  for (int i = 0; i < kVisits; ++i) {
    const float product = step_row<kRowLanes>(held[i], q, k, gate, to_f32(values[i]), p);
    store_state(s + i * kAtOnce * kRow, held[i], kRowLanes);
    if (lane == 0) out[i * kAtOnce] = from_f32<T>(product);
  }
}

template <class T, class S>
__global__ void __launch_bounds__(kThreads, 4) lines_kernel(Decode p, Inputs<T> in, S* state, T* o) {
  constexpr int N = 16 / sizeof(S);
  start_early();
  const Task task(p, p.group);
  if (task.clears(p, o)) return;
  const int lane = threadIdx.x % p.lanes, mine = threadIdx.x % kWarp / p.lanes, step = kWarp / p.lanes;
  const int64_t shared = task.head / (p.HV / p.H);
  S* s = state + task.slot * p.state_stride + task.head * p.V * p.K + lane * N;
  const T* v = in.v.at(task.row, task.head);
  T* out = o + (task.row * p.HV + task.head) * p.V;

  Held<S, N> next = {};
  float value = 0;
  const auto fetch = [&](int64_t row) {
    if (row >= task.last) return;
    load_state(next, s + row * p.K, p.lanes);
    value = to_f32(v[row]);
  };
  fetch(task.first + mine);

  Held<T, N> query, key;
  load_row(key, in.k.at(task.row, shared), lane, p.lanes, p.packs);
  load_row(query, in.q.at(task.row, shared), lane, p.lanes, p.packs);
  float q[kPerLane], k[kPerLane];
  unit_row<0>(k, key, p);
  unit_row<0>(q, query, p);
  const Gates gate = task.gates(p, in);

  for (int64_t first = task.first; first < task.last; first += step) {  // the same count in every lane
    const int64_t row = first + mine;
    Held<S, N> held;
#pragma unroll
    for (int i = 0; i < kPerLane / N; ++i) held[i] = next[i];
    const float wanted = value;
    fetch(row + step);
    const float product = step_row<0>(held, q, k, gate, wanted, p);
    if (row >= task.last) continue;
    store_state(s + row * p.K, held, p.lanes);
    if (lane == 0) out[row] = from_f32<T>(product);
  }
}

// Any K and any alignment: a warp per row of the state, which is read twice.
template <class T, class S>
__global__ void __launch_bounds__(kThreads) general_kernel(Decode p, Inputs<T> in, S* state, T* o) {
  start_early();
  const Task task(p, 1);
  if (task.clears(p, o)) return;
  const int lane = threadIdx.x % kWarp;
  const int64_t shared = task.head / (p.HV / p.H), row = task.first;
  const T *q = in.q.at(task.row, shared), *k = in.k.at(task.row, shared);
  S* s = state + task.slot * p.state_stride + (task.head * p.V + row) * p.K;
  const Gates gate = task.gates(p, in);

  float squares_q = 0, squares_k = 0;
  for (int64_t i = lane; i < p.K; i += kWarp) {
    const float x = to_f32(q[i]), y = to_f32(k[i]);
    squares_q = fmaf(x, x, squares_q), squares_k = fmaf(y, y, squares_k);
  }
  const float unit_q = unit_factor(warp_sum(squares_q), p.l2norm), unit_k = unit_factor(warp_sum(squares_k), p.l2norm);
  float product = 0;
  for (int64_t i = lane; i < p.K; i += kWarp)
    product = fmaf(gate.decay * to_f32(s[i]), unit_k * to_f32(k[i]), product);
  const float u = gate.beta * (to_f32(in.v.at(task.row, task.head)[row]) - warp_sum(product));
  product = 0;
  for (int64_t i = lane; i < p.K; i += kWarp) {
    const float x = fmaf(u, unit_k * to_f32(k[i]), gate.decay * to_f32(s[i]));
    s[i] = from_f32<S>(x);
    product = fmaf(x, unit_q * to_f32(q[i]), product);
  }
  product = warp_sum(product);
  if (lane == 0) o[(task.row * p.HV + task.head) * p.V + row] = from_f32<T>(p.scale * product);
}

// Rows of the state per warp: as many as leave each SM some 16 warps, and at most 8 visits of what a warp holds.
int group_for(int64_t rows, int at_once) {
  const int64_t visits = rows / at_once / (16 * sm_count());
  int group = at_once;
  while (group < 8 * at_once && 2 * group <= visits * at_once) group *= 2;
  return group;
}

}  // namespace

// q, k [B,H,K], v [B,HV,V] with token and head strides; a, b [B,HV] with row strides; state [S,HV,V,K] with a stride
// of its slots; state_indices [B] with a stride -> o [B,HV,V] contiguous.
extern "C" int OPSHIM(gdn_decode)(
    const void* q, const void* k, const void* v, const void* a, const void* b, const float* A_log, const float* dt_bias,
    void* state, const int32_t* state_indices, void* o, int64_t B, int64_t H, int64_t HV, int64_t K, int64_t V, int64_t,
    int64_t q_token, int64_t q_head, int64_t k_token, int64_t k_head, int64_t v_token, int64_t v_head, int64_t a_stride,
    int64_t b_stride, int64_t state_stride, int64_t indices_stride, double scale, int64_t l2norm, int64_t null_index,
    int64_t dtype, int64_t state_dtype, int64_t device, void* stream) {
  OnDevice on(device);
  return by_dtypes(dtype, state_dtype, [&](auto t, auto s) {
    using T = decltype(t);
    using S = decltype(s);
    const Inputs<T> in = {rows<const T>(q, q_token, q_head), rows<const T>(k, k_token, k_head),
                          rows<const T>(v, v_token, v_head), (const T*)a, (const T*)b};
    constexpr int N = 16 / sizeof(S);
    const int lanes = lanes_for(K);
    const bool whole = K == lanes * kPerLane && lanes <= kWarp && aligned(16, sizeof(S), state, state_stride);
    const bool packs = aligned(N * sizeof(T), in.q) && aligned(N * sizeof(T), in.k);
    const int group = whole ? group_for(B * HV * V, kWarp / lanes) : 1;
    const Decode p = {B, H, HV, K, V, A_log, dt_bias, a_stride, b_stride, state_stride, state_indices, indices_stride,
                      null_index, float(scale), l2norm != 0, lanes, group, packs};
    const auto run = [&](auto kernel, dim3 grid) {
      return launch_early(kernel, grid, dim3(kThreads), 0, stream, p, in, (S*)state, (T*)o);
    };
    constexpr int kBlock = kWarps * kAtOnce;  // rows of the state, visited once
    if (whole && K == kRow && V % kBlock == 0 && HV <= kMostInGrid && B <= kMostInGrid) {
      const int64_t blocks = B * HV * V / kBlock, sms = sm_count();
      const auto grid = [&](int visits) { return dim3(V / (visits * kBlock), HV, B); };
      if (V % (4 * kBlock) == 0 && blocks >= 24 * sms) return run(rows_kernel<T, S, 4>, grid(4));
      if (V % (2 * kBlock) == 0 && blocks >= 4 * sms) return run(rows_kernel<T, S, 2>, grid(2));
      return run(rows_kernel<T, S, 1>, grid(1));
    }
    const int64_t warps = B * HV * ceil_div<int64_t>(V, group);
    return run(whole ? lines_kernel<T, S> : general_kernel<T, S>, dim3(ceil_div<int64_t>(warps, kWarps)));
  });
}
