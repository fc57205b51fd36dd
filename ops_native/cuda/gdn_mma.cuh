// The PTX of the gated delta rule in chunks: copies into shared memory and barriers that wait for them, matrix
// fragments, mma.sync.
//
// Fragments of m16n8k16, for lane l with r = l / 4 and c = 2 (l % 4), a register holding two neighbours:
//   A [16,16]   a0 (r, c)  a1 (r + 8, c)  a2 (r, c + 8)  a3 (r + 8, c + 8)
//   B [16,8]    b0 (c, r)  b1 (c + 8, r)                                        pairs along the first index
//   C [16,8]    c0 c1 (r, c)  c2 c3 (r + 8, c)                                  float32
// So the results of two products side by side, rounded, are a fragment A of the next.
// Of m16n8k8 with tf32 they are the same with k in another order, which sums do not see:
//   A [16,8]    a0 (r, c)  a1 (r + 8, c)  a2 (r, c + 1)  a3 (r + 8, c + 1)
//   B [8,8]     b0 (c, r)  b1 (c + 1, r)
// So a result is an operand A of the next as it is, and an operand B of its transpose.
#pragma once
#include "copies.cuh"

namespace {

// `threads` threads of the block, from wherever their warps are. Barrier 0 is __syncthreads'.
__device__ __forceinline__ void meet(int threads, int barrier = 1) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- barriers in shared memory: a phase is over when `count` have arrived and all bytes expected have come ----------

using Barrier = uint64_t;

__device__ __forceinline__ void init(Barrier& barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(Barrier& barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(shared_address(&barrier))
               : "memory");
}
// By all lanes of a warp: it arrives once.
__device__ __forceinline__ void arrive_warp(Barrier& barrier) {
  __syncwarp();
  if (threadIdx.x % kWarp == 0) arrive(barrier);
}
// Waits for the end of the phase of that parity: at once for 1 where none has ended yet.
__device__ __forceinline__ void wait(Barrier& barrier, int parity) {
  uint32_t over;
  do {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.b32 %0, 1, 0, p;\n}"
                 : "=r"(over)
                 : "r"(shared_address(&barrier)), "r"(parity)
                 : "memory");
#else
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
                 : "=r"(over)
                 : "r"(shared_address(&barrier)), "r"(parity)
                 : "memory");
#endif
  } while (!over);
}

// ---- copies from global to shared memory ----------------------------------------------------------------------------

// Arrives when all copies of 16 bytes that this thread has started are there.
__device__ __forceinline__ void arrive_after_copies(Barrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// ---- matrices -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const void* row) {
  load_matrices(to, shared_address(row));
}
// Likewise of the transposes.
__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], const void* row) {
  load_transposed(to, shared_address(row));
}
__device__ __forceinline__ uint32_t transpose(uint32_t matrix) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- float32 as sums of two tf32, as exact: what a product leaves out is some 2^-23 of it ---------------------------

// To the nearest, in two instructions. The hardware drops the bits after tf32's: low parts may keep them.
__device__ __forceinline__ float to_tf32(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x1000) & 0xffffe000);
}
__device__ __forceinline__ void mma_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
  const auto bits = [](float x) { return __float_as_uint(x); };
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(bits(a[0])), "r"(bits(a[1])), "r"(bits(a[2])), "r"(bits(a[3])), "r"(bits(b0)), "r"(bits(b1)));
}

struct alignas(16) Pair {  // a lane's two elements of an operand B
  float high0, high1, low0, low1;
};
__device__ __forceinline__ Pair pair_of(float x, float y) {
  const float x0 = to_tf32(x), y0 = to_tf32(y);
  return {x0, y0, x - x0, y - y0};
}
struct Parts {  // an operand A
  float high[4], low[4];
  __device__ __forceinline__ explicit Parts(const float (&c)[4]) {  // from a fragment C
    constexpr int from[4] = {0, 2, 1, 3};
#pragma unroll
    for (int i = 0; i < 4; ++i) high[i] = to_tf32(c[from[i]]), low[i] = c[from[i]] - high[i];
  }
};
__device__ __forceinline__ void multiply(float (&sum)[4], const Parts& a, const Pair& b) {
  mma_tf32(sum, a.low, b.high0, b.high1);
  mma_tf32(sum, a.high, b.low0, b.low1);
  mma_tf32(sum, a.high, b.high0, b.high1);
}

// The larger of two; NaN if one is.
__device__ __forceinline__ float larger(float x, float y) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}

}  // namespace
