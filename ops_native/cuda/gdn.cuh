// What the kernels of the gated delta rule share: where tensors lie, gates, norms, sums over the lanes of a state row.
//
// A row S_v of a state (K values) is held by `lanes` neighbouring lanes of a warp, a power of two, 16 values each: so a
// warp reads whole lines of memory and takes a product over K with log2(lanes) shuffles.
#pragma once
#include "opshim.cuh"

namespace {

constexpr int kPerLane = 16;
constexpr int kWidest = kPerLane * kWarp;  // the largest K that a warp holds

// A [T,H,D] tensor: any token and head stride, D contiguous.
template <class T> struct Rows {
  T* data;
  int64_t token_stride, head_stride;
  __device__ __forceinline__ T* at(int64_t token, int64_t head) const {
    return data + token * token_stride + head * head_stride;
  }
};
template <class T> Rows<T> rows(const void* data, int64_t token_stride, int64_t head_stride) {
  return {(T*)const_cast<void*>(data), token_stride, head_stride};
}
template <class T> bool aligned(int bytes, const Rows<T>& x) {
  return aligned(bytes, sizeof(T), x.data, x.token_stride, x.head_stride);
}

// The sum over the lanes of a row; every lane of the warp takes part, and gets its own row's. kLanes: how many they are
// where that is known, as for K of 128, else 0.
template <int kLanes> __device__ __forceinline__ float row_sum(float x, int lanes) {
#pragma unroll
  for (int offset = 1; offset < (kLanes ? kLanes : kWarp); offset *= 2)
    if (kLanes || offset < lanes) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}

// Comparisons with a NaN are false, so that it stays one.
__device__ __forceinline__ float decay_of(float g) { return expf(g > 0.0f ? 0.0f : g); }
__device__ __forceinline__ float softplus(float x) { return (x > 0.0f ? x : 0.0f) + log1pf(expf(-fabsf(x))); }
__device__ __forceinline__ float sigmoid(float x) {
  const float y = expf(-fabsf(x));
  return (x < 0.0f ? y : 1.0f) / (1.0f + y);
}

// What x is multiplied by to be of length 1.
__device__ __forceinline__ float unit_factor(float squares, bool l2norm) {
  return l2norm ? 1.0f / sqrtf(squares + 1e-6f) : 1.0f;
}

// f(T{}, S{}) with the types of activations and state; its status.
template <class F> int by_dtypes(int64_t dtype, int64_t state_dtype, F f) {
  return by_dtype(dtype, [&](auto t) {
    if (state_dtype == kF32) return f(t, float{});
    return state_dtype == dtype ? f(t, t) : int(kBadDtype);
  });
}

// The lanes that hold a row: as few as can.
inline int lanes_for(int64_t K) {
  int lanes = 1;
  while (lanes * kPerLane < K) lanes *= 2;
  return lanes;
}

}  // namespace
