// Attention's PTX beside gemm_mma.cuh's, which says how the fragments of m16n8k16 lie: matrices turned on the way.
#pragma once
#include "gemm_mma.cuh"

namespace {

// As load_matrices, of each matrix's transpose.
__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ uint32_t transpose(uint32_t matrix) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

template <class T>
__device__ __forceinline__ void mma(float* c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma<T>(c, a[0], a[1], a[2], a[3], b0, b1);
}

template <class T> __device__ __forceinline__ Pack<T, 2> unpack(uint32_t two) {
  static_assert(sizeof(Pack<T, 2>) == sizeof(two));
  Pack<T, 2> result;
  memcpy(&result, &two, sizeof(two));
  return result;
}

// 2^x within 2 ulp; below 2^-126 it is 0
__device__ __forceinline__ float fast_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace
