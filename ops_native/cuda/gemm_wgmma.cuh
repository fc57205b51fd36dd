// The matrix products' wgmma, on operands in shared memory whose rows of 64 values are 128 bytes, swizzled.
//
// wgmma's C [64,N], for thread t of the warp group, l = t % 32, r = l / 4 and c = 2 (l % 4): sum[4 j ... 4 j + 3] are
// rows 16 (t / 32) + r (twice) and + 8 (twice), columns 8 j + c and 8 j + c + 1: m16n8k16's layout, warp below warp.
#pragma once
#include "hopper.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
namespace {

// Four matrices of 8 x 8, transposed: lane l names row l % 8 of matrix l / 8 as it will lie in shared memory.
__device__ __forceinline__ void store_transposed(uint32_t row, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(from[0]),
               "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

// sum [64,N] += a [64,16] b [N,16]^T, for N / 2 sums per thread
#define OPSHIM_8(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3]), "+f"(sum[i + 4]), \
                    "+f"(sum[i + 5]), "+f"(sum[i + 6]), "+f"(sum[i + 7])
#define OPSHIM_32(i) OPSHIM_8(i), OPSHIM_8(i + 8), OPSHIM_8(i + 16), OPSHIM_8(i + 24)
#define OPSHIM_NAMES_0 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
  "%30,%31"
#define OPSHIM_NAMES_HALF ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define OPSHIM_NAMES_1 \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58," \
  "%59,%60,%61,%62,%63"
#define OPSHIM_WGMMA(n, type, names, a_name, b_name, ...) \
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type \
               " {" names "}, %" a_name ", %" b_name ", p, 1, 1, 0, 0;\n}" \
               : __VA_ARGS__ \
               : "l"(a), "l"(b))
#define OPSHIM_WGMMA_OF(kType, type) \
  template <> struct Wgmma<kType> { \
    __device__ static __forceinline__ void run(float (&sum)[32], uint64_t a, uint64_t b) { \
      OPSHIM_WGMMA("64", type, OPSHIM_NAMES_0, "32", "33", OPSHIM_32(0)); \
    } \
    __device__ static __forceinline__ void run(float (&sum)[48], uint64_t a, uint64_t b) { \
      OPSHIM_WGMMA("96", type, OPSHIM_NAMES_0 OPSHIM_NAMES_HALF, "48", "49", OPSHIM_32(0), OPSHIM_8(32), \
                   OPSHIM_8(40)); \
    } \
    __device__ static __forceinline__ void run(float (&sum)[64], uint64_t a, uint64_t b) { \
      OPSHIM_WGMMA("128", type, OPSHIM_NAMES_0 OPSHIM_NAMES_1, "64", "65", OPSHIM_32(0), OPSHIM_32(32)); \
    } \
  }
template <class T> struct Wgmma;
OPSHIM_WGMMA_OF(f16, "f16");
OPSHIM_WGMMA_OF(bf16, "bf16");
#undef OPSHIM_WGMMA_OF
#undef OPSHIM_WGMMA
#undef OPSHIM_NAMES_1
#undef OPSHIM_NAMES_HALF
#undef OPSHIM_NAMES_0
#undef OPSHIM_32
#undef OPSHIM_8

}  // namespace
#endif
