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

// log(1 + e^x) = max(x, 0) + log1p(y), y = e^-|x|; log1p(y) = 2 atanh(z), z = y / (2 + y) <= 1/3, by its series.
inline vf softplus(vf x) {
  const vf y = vexp(select(vi(x > 0.0f), -x, x)), z = y / (y + 2.0f), s = z * z;
  vf p = s * (1.0f / 17) + 1.0f / 15;
  p = p * s + 1.0f / 13;
  p = p * s + 1.0f / 11;
  p = p * s + 1.0f / 9;
  p = p * s + 1.0f / 7;
  p = p * s + 1.0f / 5;
  p = p * s + 1.0f / 3;
  return vmax(vf{}, x) + (p * s * z + z) * 2.0f;
}
inline vf sigmoid(vf x) { return 1.0f / (vexp(-x) + 1.0f); }
inline vf gate(vf a, vf A_log, vf dt_bias) { return -vexp(A_log) * softplus(a + dt_bias); }
inline vf decay_of(vf g) { return vexp(select(vi(g > 0.0f), vf{}, g)); }  // e^min(g, 0); NaN stays NaN

// Writes row x [K] to `out` in float32, divided by its norm when l2norm: vectors of W, `step` floats apart, the last
// one filled up with zeros.
template <class T>
inline void unit_row(const T* x, int64_t K, bool l2norm, float* out, int64_t step) {
  const int64_t whole = K / W;
  const int rest = int(K % W);
  vf squares = {};
  for (int64_t i = 0; i < whole; ++i) {
    const vf v = load(x + i * W);
    squares += v * v;
    store(out + i * step, v);
  }
  if (rest) {
    const vf v = load(x + whole * W, rest);
    squares += v * v;
    store(out + whole * step, v);
  }
  if (!l2norm) return;
  const float factor = 1.0f / std::sqrt(sum(squares) + 1e-6f);
  for (int64_t i = 0; i < whole + (rest > 0); ++i) store(out + i * step, load(out + i * step) * factor);
}

inline int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Into how many parts to split each of `tasks` so that every thread has work; what a part computes does not depend on it.
inline int64_t parts_for(int64_t tasks, int64_t threads, int64_t at_most) {
  const int64_t wanted = tasks > 0 ? (threads + tasks - 1) / tasks : 1;
  return wanted < 1 ? 1 : wanted < at_most ? wanted : at_most;
}

}  // namespace OPSHIM_ISA
