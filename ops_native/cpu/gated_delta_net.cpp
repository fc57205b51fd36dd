// gdn_gating and gdn_decode: one token per row through the gated delta rule.
//
// Decode is bound by the state: HV*V*K values read and written once per row, everything else is 1/V of that. So each
// row S_v of a state is visited once. With d = e^min(g, 0) applied on load, a first pass takes its product with k;
// u = beta (v - S_v k) follows; a second pass, while the row is in the first-level cache, writes S_v + u k^T and takes
// the new row's product with q.
#include "gated_delta_net.h"

namespace OPSHIM_ISA {

constexpr int kRows = 4;  // state rows at a time

inline vf only(vf v, int n) {  // the first n lanes; the others 0, whatever they hold
  if (n == W) return v;
  float lanes[W];
  store(lanes, v);
  return load(lanes, n);
}

// R rows of one head's state, which share the loads of k and q.
template <int R, class A, class S>
inline void step_rows(S* s, int64_t K, const float* k, const float* q, const A* v, A* o, float decay, float beta,
                      float scale) {
  vf sk[R] = {}, sq[R] = {}, u[R];
  each_vector(K, [&](int64_t i, int n) {
    const vf kv = load(k + i);
    for (int r = 0; r < R; ++r) sk[r] += load_up_to(s + r * K + i, n) * decay * kv;
  });
  for (int r = 0; r < R; ++r) u[r] = splat(beta * (to_f32(v[r]) - sum(sk[r])));
  each_vector(K, [&](int64_t i, int n) {
    const vf kv = load(k + i), qv = load(q + i);
    for (int r = 0; r < R; ++r) {
      const vf x = only(load_up_to(s + r * K + i, n) * decay + kv * u[r], n);
      store_up_to(s + r * K + i, x, n);
      sq[r] += x * qv;
    }
  });
  for (int r = 0; r < R; ++r) o[r] = from_f32<A>(scale * sum(sq[r]));
}

struct Decode {
  int64_t B, H, HV, K, V, S;
  const void *a, *b;
  int64_t a_stride, b_stride;
  const float *A_log, *dt_bias;
  int64_t state_stride;
  const int32_t* slots;
  int64_t slots_stride;
  float scale;
  bool l2norm;
  int64_t null_index, threads;

  bool padding(int64_t row) const {
    const int32_t slot = slots[row * slots_stride];
    return slot < 0 || slot == null_index;
  }
};

template <class A, class S>
int decode(const Decode& p, Rows<A> q, Rows<A> k, Rows<A> v, S* state, A* o) {
  for (int64_t row = 0; row < p.B; ++row)
    if (!p.padding(row) && p.slots[row * p.slots_stride] >= p.S) return kBadArgument;
  const int64_t padded = rounded_up(p.K, W), parts = parts_for(p.B * p.HV, p.threads, (p.V + 15) / 16);
  int status = kOk;
  parallel_for(p.B * p.HV * parts, p.threads, [&](int64_t task) {
    const int64_t row = task / parts / p.HV, head = task / parts % p.HV, part = task % parts;
    const int64_t first = p.V * part / parts, last = p.V * (part + 1) / parts;
    A* out = o + (row * p.HV + head) * p.V;
    if (p.padding(row)) {
      std::memset(out + first, 0, (last - first) * sizeof(A));
      return;
    }
    float* kq = scratch<Decode, float>(2 * padded);
    if (!kq) {
      __atomic_store_n(&status, kNoMemory, __ATOMIC_RELAXED);
      return;
    }
    const int64_t shared = head / (p.HV / p.H);
    unit_row(k.at(row, shared), p.K, p.l2norm, kq, W);
    unit_row(q.at(row, shared), p.K, p.l2norm, kq + padded, W);
    const float a = to_f32(static_cast<const A*>(p.a)[row * p.a_stride + head]);
    const float b = to_f32(static_cast<const A*>(p.b)[row * p.b_stride + head]);
    const vf g = softplus(splat(a + p.dt_bias[head])) * -vexp(splat(p.A_log[head]));
    const float decay = decay_of(g)[0], beta = sigmoid(splat(b))[0];

    S* s = state + p.slots[row * p.slots_stride] * p.state_stride + head * p.V * p.K;
    const A* values = v.at(row, head);
    int64_t i = first;
    for (; i + kRows <= last; i += kRows)
      step_rows<kRows>(s + i * p.K, p.K, kq, kq + padded, values + i, out + i, decay, beta, p.scale);
    for (; i < last; ++i)
      step_rows<1>(s + i * p.K, p.K, kq, kq + padded, values + i, out + i, decay, beta, p.scale);
  });
  return status;
}

struct Gating;  // names its scratch

template <class A>
int gating(const A* a, int64_t a_stride, const A* b, int64_t b_stride, const float* A_log, const float* dt_bias,
           float* g, float* beta, int64_t T, int64_t HV, int64_t threads) {
  constexpr int64_t rows = 64;  // of a task
  int status = kOk;
  parallel_for((T + rows - 1) / rows, threads, [&](int64_t task) {
    float* rate = scratch<Gating, float>(rounded_up(HV, W));
    if (!rate) return __atomic_store_n(&status, kNoMemory, __ATOMIC_RELAXED);
    each_vector(HV, [&](int64_t i, int n) { store(rate + i, -vexp(load_up_to(A_log + i, n))); });
    for (int64_t t = task * rows; t < T && t < (task + 1) * rows; ++t)
      each_vector(HV, [&](int64_t i, int n) {
        const vf x = load_up_to(a + t * a_stride + i, n) + load_up_to(dt_bias + i, n);
        store_up_to(g + t * HV + i, softplus(x) * load(rate + i), n);
        store_up_to(beta + t * HV + i, sigmoid(load_up_to(b + t * b_stride + i, n)), n);
      });
  });
  return status;
}

}  // namespace OPSHIM_ISA

using namespace OPSHIM_ISA;

// a, b [T,HV] with row strides, A_log, dt_bias [HV] -> g, beta [T,HV] contiguous.
extern "C" int OPSHIM(gdn_gating)(const void* a, const void* b, const float* A_log, const float* dt_bias, float* g,
                                  float* beta, int64_t T, int64_t HV, int64_t a_stride, int64_t b_stride,
                                  int64_t dtype, int64_t threads) {
  return with_dtype(dtype, [&](auto type) {
    using A = decltype(type);
    return gating(static_cast<const A*>(a), a_stride, static_cast<const A*>(b), b_stride, A_log, dt_bias, g, beta, T,
                  HV, threads);
  });
}

// q, k [B,H,K], v [B,HV,V] with token and head strides; a, b [B,HV] with row strides; state [S,HV,V,K] with a stride
// of its slots; state_indices [B] with a stride -> o [B,HV,V] contiguous.
extern "C" int OPSHIM(gdn_decode)(const void* q, const void* k, const void* v, const void* a, const void* b,
                                  const float* A_log, const float* dt_bias, void* state, const int32_t* state_indices,
                                  void* o, int64_t B, int64_t H, int64_t HV, int64_t K, int64_t V, int64_t S,
                                  int64_t q_token, int64_t q_head, int64_t k_token, int64_t k_head, int64_t v_token,
                                  int64_t v_head, int64_t a_stride, int64_t b_stride, int64_t state_stride,
                                  int64_t indices_stride, double scale, int64_t l2norm, int64_t null_index,
                                  int64_t dtype, int64_t state_dtype, int64_t threads) {
  const Decode p = {B, H, HV, K, V, S, a, b, a_stride, b_stride, A_log, dt_bias, state_stride, state_indices,
                    indices_stride, float(scale), l2norm != 0, null_index, threads};
  return with_dtype(dtype, [&](auto act) {
    using A = decltype(act);
    return with_dtype(state_dtype, [&](auto kept) {
      using T = decltype(kept);
      return decode<A, T>(p, rows<A>(q, q_token, q_head), rows<A>(k, k_token, k_head), rows<A>(v, v_token, v_head),
                          static_cast<T*>(state), static_cast<A*>(o));
    });
  });
}
