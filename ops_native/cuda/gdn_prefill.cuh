// What the kernels of gdn_prefill share: the problem, and the sequence that a block works on.
#pragma once
#include "gdn.cuh"

namespace {

constexpr int kSlice = 32;  // rows of a state that a block takes through a sequence

struct Prefill {
  int64_t T, N, H, HV, K, V;
  const float *g, *beta;
  int64_t g_stride, beta_stride, state_stride;
  const int32_t* slots;
  int64_t slots_stride;
  const bool* continued;
  const int32_t* bounds;
  float scale;
  bool l2norm;
};

template <class T> struct Tokens {
  Rows<const T> q, k, v;
};

// One sequence and value head: its tokens, and where its state lies in the pool, if it has a slot there.
struct Sequence {
  int64_t n, head, shared, first, end;  // shared: its query/key head; tokens [first, end)
  bool kept, continued;
  int64_t state;

  __device__ __forceinline__ Sequence(const Prefill& p, int64_t index, int64_t value_head)
      : n(index), head(value_head), shared(head / (p.HV / p.H)), first(p.bounds[n]), end(p.bounds[n + 1]) {
    const int64_t slot = p.slots[n * p.slots_stride];
    kept = slot >= 0;
    continued = kept && p.continued[n];
    state = slot * p.state_stride + head * p.V * p.K;
  }
};

// Tokens before the first and after the last sequence have output zero: the blocks of those sequences see to it, each
// for its columns [column, column + columns) of o [T,HV,V].
template <class T>
__device__ __forceinline__ void clear_uncovered(const Prefill& p, const Sequence& s, T* o, int64_t column,
                                                int columns) {
  const auto clear = [&](int64_t from, int64_t to) {
    for (int64_t i = threadIdx.x; i < (to - from) * columns; i += blockDim.x)
      if (column + i % columns < p.V) o[((from + i / columns) * p.HV + s.head) * p.V + column + i % columns] = T(0.0f);
  };
  if (s.n == 0) clear(0, s.first);
  if (s.n == p.N - 1) clear(s.end, p.T);
}

}  // namespace
