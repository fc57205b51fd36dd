// Between global memory, shared memory and registers: asynchronous copies, and matrices of 8 x 8 for mma.sync.
#pragma once
#include "opshim.cuh"

namespace {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory; 16 zeros, and nothing read, where it is not real
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool real) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for this thread's copies but for those of the last `kPending` groups.
template <int kPending> __device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four matrices of 8 x 8: lane l names row l % 8 of matrix l / 8. Lane l gets of each elements (r, c) and (r, c + 1), r
// = l / 4 and c = 2 (l % 4).
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

}  // namespace
