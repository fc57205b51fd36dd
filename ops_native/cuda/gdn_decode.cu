// gdn_decode: gates and one token of the gated delta rule per row, the state updated in place.
//
// Bound by the state, HV V K values read and written once per row of the batch (2 MB each way for 32 heads of 128 x 128
// in float32); everything else is 1/V of that. So a warp works alone: it holds q and k in registers, normalised, 16
// values per lane, and takes a few rows of the state through them, whole lines at a time, while the next ones are on
// their way. There is no shared memory and nothing to wait for but memory. A row of K values is spread over K/16 lanes:
// a warp has 4 rows of 128 in hand, and a product over K costs three shuffles for all four.
//
// Few rows in the batch: each warp takes 4 rows of the state, and all of it is in flight at once. Many: up to 32, so
// that gates and norms are paid for less often. Sizes that do not come in whole lines: one warp per row of the state.
#include "gdn.cuh"

namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarp;

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

template <class T>
__device__ __forceinline__ Gates gates(const Decode& p, const T* a, const T* b, int64_t row, int64_t head) {
  const float x = to_f32(a[row * p.a_stride + head]) + p.dt_bias[head];
  return {decay_of(-expf(p.A_log[head]) * softplus(x)), sigmoid(to_f32(b[row * p.b_stride + head]))};
}

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
  template <class T> __device__ __forceinline__ bool is_padding(const Decode& p, T* o) const {
    if (slot >= 0 && slot != p.null_index) return false;
    if (row < p.B)
      for (int64_t i = first + threadIdx.x % kWarp; i < last; i += kWarp) o[(row * p.HV + head) * p.V + i] = T(0.0f);
    return true;
  }
};

// This lane's 16 values of a query or key, of length 1.
template <int kLanes, class T, int N>
__device__ __forceinline__ void unit_row(float* to, const T* x, int lane, const Decode& p) {
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kPerLane / N; ++i) {
    const T* from = x + (i * (kLanes ? kLanes : p.lanes) + lane) * N;
    Pack<T, N> pack;
    if (p.packs) {
      pack = *(const Pack<T, N>*)from;
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) pack.at[j] = from[j];
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      to[i * N + j] = to_f32(pack.at[j]);
      squares = fmaf(to[i * N + j], to[i * N + j], squares);
    }
  }
  const float factor = unit_factor(row_sum<kLanes>(squares, p.lanes), p.l2norm);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) to[i] *= factor;
}

template <class T, class S, int kLanes>
__global__ void __launch_bounds__(kThreads, 4) decode_kernel(Decode p, Inputs<T> in, S* state, T* o) {
  constexpr int N = 16 / sizeof(S), packs = kPerLane / N;  // 16 bytes of the state at a time
  start_early();
  const Task task(p, p.group);
  if (task.is_padding(p, o)) return;
  const int lanes = kLanes ? kLanes : p.lanes;
  const int lane = threadIdx.x % lanes, mine = threadIdx.x % kWarp / lanes, step = kWarp / lanes;
  const int64_t shared = task.head / (p.HV / p.H);
  S* s = state + task.slot * p.state_stride + task.head * p.V * p.K + lane * N;
  const T* v = in.v.at(task.row, task.head);
  T* out = o + (task.row * p.HV + task.head) * p.V;

  int4 next[packs];
  float value = 0;
  const auto fetch = [&](int64_t row) {
    if (row >= task.last) return;
#pragma unroll
    for (int i = 0; i < packs; ++i) next[i] = __ldcg((const int4*)(s + row * p.K + i * lanes * N));
    value = to_f32(v[row]);
  };
#pragma unroll
  for (int i = 0; i < packs; ++i) next[i] = {};
  fetch(task.first + mine);

  float q[kPerLane], k[kPerLane];
  unit_row<kLanes, T, N>(k, in.k.at(task.row, shared), lane, p);
  unit_row<kLanes, T, N>(q, in.q.at(task.row, shared), lane, p);
  const Gates gate = gates(p, in.a, in.b, task.row, task.head);

  for (int64_t first = task.first; first < task.last; first += step) {  // the same count in every lane
    const int64_t row = first + mine;
    float x[kPerLane], product = 0;
#pragma unroll
    for (int i = 0; i < packs; ++i)
#pragma unroll
      for (int j = 0; j < N; ++j) x[i * N + j] = gate.decay * to_f32(((const Pack<S, N>&)next[i]).at[j]);
    const float wanted = value;
    fetch(row + step);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) product = fmaf(x[i], k[i], product);
    const float u = gate.beta * (wanted - row_sum<kLanes>(product, p.lanes));

    product = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      x[i] = fmaf(u, k[i], x[i]);
      product = fmaf(x[i], q[i], product);
    }
    if (row < task.last) {
#pragma unroll
      for (int i = 0; i < packs; ++i) {
        Pack<S, N> pack;
#pragma unroll
        for (int j = 0; j < N; ++j) pack.at[j] = from_f32<S>(x[i * N + j]);
        __stcg((int4*)(s + row * p.K + i * lanes * N), (const int4&)pack);
      }
    }
    product = row_sum<kLanes>(product, p.lanes);
    if (lane == 0 && row < task.last) out[row] = from_f32<T>(p.scale * product);
  }
}

// Any K and any alignment: a warp per row of the state, which is read twice.
template <class T, class S>
__global__ void __launch_bounds__(kThreads) any_decode_kernel(Decode p, Inputs<T> in, S* state, T* o) {
  start_early();
  const Task task(p, 1);
  if (task.is_padding(p, o)) return;
  const int lane = threadIdx.x % kWarp;
  const int64_t shared = task.head / (p.HV / p.H), row = task.first;
  const T *q = in.q.at(task.row, shared), *k = in.k.at(task.row, shared);
  S* s = state + task.slot * p.state_stride + (task.head * p.V + row) * p.K;
  const Gates gate = gates(p, in.a, in.b, task.row, task.head);

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
    const int64_t warps = B * HV * ceil_div<int64_t>(V, group);
    const auto kernel = !whole ? any_decode_kernel<T, S> : lanes == 8 ? decode_kernel<T, S, 8> : decode_kernel<T, S, 0>;
    return launch_early(kernel, dim3(ceil_div<int64_t>(warps, kWarps)), dim3(kThreads), 0, stream, p, in, (S*)state,
                        (T*)o);
  });
}
