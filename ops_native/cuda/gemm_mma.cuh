// The matrix products' PTX: matrix fragments, mma.sync, and kernels that start early.
//
// Fragments of m16n8k16, for lane l with r = l / 4 and c = 2 (l % 4), a register holding two neighbours in k:
//   A [16,16]   a0 (r, c)  a1 (r + 8, c)  a2 (r, c + 8)  a3 (r + 8, c + 8)
//   B [16,8]    b0 (c, r)  b1 (c + 8, r)
//   C [16,8]    c0 c1 (r, c) (r, c + 1)  c2 c3 (r + 8, c) (r + 8, c + 1)                          float32
#pragma once
#include "copies.cuh"

namespace {

template <class T>
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1);
template <>
__device__ __forceinline__ void mma<f16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<bf16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                          uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <class T> __device__ __forceinline__ uint32_t pack(float low, float high);
template <> __device__ __forceinline__ uint32_t pack<f16>(float low, float high) {
  uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
template <> __device__ __forceinline__ uint32_t pack<bf16>(float low, float high) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// Programmatic dependent launch: a kernel started by launch_early() may begin while the one before it in the stream
// still runs, once all of that one's blocks have called let_next_start(). Nothing that an earlier kernel wrote may be
// read, and nothing at all written, before wait_for_previous().
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// As launch(); early: for kernels that call wait_for_previous().
template <class... Parameters, class... Arguments>
int launch_early(bool early, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, void* stream,
                 Arguments... arguments) {
  if (!early || capability() < 90) return launch(kernel, grid, block, shared, stream, arguments...);
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return kOk;
  if (shared > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
    if (error != cudaSuccess) return status_of(error);
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = cudaStream_t(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return status_of(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}

}  // namespace
