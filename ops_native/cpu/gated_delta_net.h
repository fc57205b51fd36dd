// What the kernels of the gated delta rule share: gates, normalised queries and keys, slots.
#pragma once
#include "opshim.h"

namespace OPSHIM_ISA {

// A [T,H,D] tensor: any token and head stride, D contiguous.
template <class T>
struct Rows {
  T* data;
  int64_t token_stride, head_stride;
  T* at(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};
template <class T>
inline Rows<T> rows(const void* data, int64_t token_stride, int64_t head_stride) {
  return {static_cast<T*>(const_cast<void*>(data)), token_stride, head_stride};
}

// f(offset, lanes) over n values: whole vectors, then the rest.
template <class F>
inline void each_vector(int64_t count, F&& f) {
  int64_t i = 0;
  for (; i + W <= count; i += W) f(i, W);
  if (i < count) f(i, int(count - i));
}
template <class T>
inline vf load_up_to(const T* p, int n) { return n == W ? load(p) : load(p, n); }
template <class T>
inline void store_up_to(T* p, vf v, int n) { n == W ? store(p, v) : store(p, v, n); }

// log(1 + e^x) = max(x, 0) + log1p(y) with y = e^-|x| in [0, 1]; log1p(y) / y is a polynomial (interpolated in
// Chebyshev's points) that is right to 1.3 ulp.
inline vf softplus(vf x) {
  constexpr float c[] = {0.019542528f, -0.056373615f, 0.10543624f, -0.15269667f, 0.19663274f,
                         -0.24951616f, 0.33329710f,   -0.49999893f, 1.0f};
  const vf y = exp_of_negative(select(vi(x > 0.0f), -x, x));
  vf p = splat(-0.0031760570f);
  for (const float next : c) p = p * y + next;
  return vmax(vf{}, x) + p * y;
}
inline vf sigmoid(vf x) {
  const vi positive = vi(x > 0.0f);
  const vf y = exp_of_negative(select(positive, -x, x));
  return select(positive, splat(1), y) / (y + 1.0f);
}
inline vf decay_of(vf g) { return exp_of_negative(select(vi(g > 0.0f), vf{}, g)); }  // e^min(g, 0); NaN stays NaN

// Writes row x [K] to `out` in float32, divided by its norm when l2norm: vectors of W, `step` floats apart, the last
// one filled up with zeros.
template <class T>
inline void unit_row(const T* x, int64_t K, bool l2norm, float* out, int64_t step) {
  vf squares = {};
  float* to = out;
  each_vector(K, [&](int64_t i, int n) {
    const vf v = load_up_to(x + i, n);
    squares += v * v;
    store(to, v);
    to += step;
  });
  if (!l2norm) return;
  const float factor = 1.0f / std::sqrt(sum(squares) + 1e-6f);
  for (; out != to; out += step) store(out, load(out) * factor);
}

inline int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Into how many parts to split each task so that every thread has work. What is computed must not depend on it.
inline int64_t parts_for(int64_t tasks, int64_t threads, int64_t at_most) {
  const int64_t wanted = tasks > 0 ? (threads + tasks - 1) / tasks : 1;
  return wanted < 1 ? 1 : wanted < at_most ? wanted : at_most;
}

}  // namespace OPSHIM_ISA
