// What sm_90a has for the gated delta rule: copies of any size, and wgmma, products of four warps: A [64,16] in
// registers, B [16,N] in shared memory, as matrices of 8 x 8 (128 bytes each, eight rows of 16 bytes) that lie anywhere
// at two strides, not swizzled.
//
// Fragments are those of mma.sync (gdn_mma.cuh), warp w's of 64 rows 16 w to 16 w + 15; of C [64,N], c[4 n ... 4 n + 3]
// of columns 8 n to 8 n + 7.
#pragma once
#include "gdn_mma.cuh"
#include "hopper.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
namespace {

// Bytes that the barrier's phase waits for, too.
__device__ __forceinline__ void expect(Barrier& barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes) : "memory");
}
// A multiple of 16 bytes into shared memory; counts at the barrier.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, int bytes, Barrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
}

// An operand B. along_k, along_n: bytes from one matrix to the next in that direction. It is known to the hardware as
// "leading" and "stride", for rows along k (K-major) and for rows along n (MN-major, transposed) alike, as there is no
// swizzle.
__device__ __forceinline__ uint64_t operand(const void* at, int along_k, int along_n) {
  return uint64_t(shared_address(at) >> 4 & 0x3fff) | uint64_t(along_k >> 4) << 16 | uint64_t(along_n >> 4) << 32;
}
// The operand so many bytes further.
__device__ __forceinline__ uint64_t further(uint64_t operand, int bytes) { return operand + bytes / 16; }

// c [64,N] = a b, or += where `add`. kTransposed: rows of b's matrices run along n.
template <bool kTransposed, int kCount>
__device__ __forceinline__ void wgmma(float (&c)[kCount], const uint32_t (&a)[4], uint64_t b, bool add) {
#define OPSHIM_8(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
                    "+f"(c[i + 6]), "+f"(c[i + 7])
#define OPSHIM_WGMMA(n, names, a0, a1, a2, a3, b0, on, trans, ...) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" on ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.f16.f16 {" names "}, " \
               "{%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" b0 ", p, 1, 1, %" trans ";\n}" \
               : __VA_ARGS__ \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)), "n"(int(kTransposed)))
#define OPSHIM_NAMES_0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define OPSHIM_NAMES_1 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
  if constexpr (kCount == 16) {
    OPSHIM_WGMMA("32", OPSHIM_NAMES_0, "16", "17", "18", "19", "20", "21", "22", OPSHIM_8(0), OPSHIM_8(8));
  } else {
    static_assert(kCount == 32, "32 or 64 columns");
    OPSHIM_WGMMA("64", OPSHIM_NAMES_0 OPSHIM_NAMES_1, "32", "33", "34", "35", "36", "37", "38", OPSHIM_8(0),
                 OPSHIM_8(8), OPSHIM_8(16), OPSHIM_8(24));
  }
#undef OPSHIM_NAMES_1
#undef OPSHIM_NAMES_0
#undef OPSHIM_WGMMA
#undef OPSHIM_8
}

}  // namespace
#endif
