// Weights in boxes: rows of an expert by 64 of k, which the copy engine of sm_90 brings into shared memory as wgmma wants
// them: rows of 128 bytes, whose pieces of 16 lie at piece ^ (row % 8). Beyond the last row and the last k are zeros.
// For pairs, a box has gate and up in turns of eight rows: a tensor of five dimensions, k, 8 rows, 2, N / 8, experts.
#pragma once
#include <cuda.h>

#include "gemm.cuh"

namespace {

constexpr int kBoxK = 64;

// The tensor's description for boxes of `rows` rows; false where it has none, or the driver is too old.
template <bool kPairs> bool describe_boxes(const Gemm& g, int rows, CUtensorMap& boxes) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult how = cudaDriverEntryPointSymbolNotFound;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &how);
    return how == cudaDriverEntryPointSuccess ? decltype(&cuTensorMapEncodeTiled)(found) : nullptr;
  }();
  const char *w = (const char*)g.w, *up = (const char*)g.up;
  if (!encode || (kPairs && (g.n % 8 || g.w_stride != g.up_stride || w == up))) return false;
  const cuuint64_t row = g.row_stride * 2, experts = g.expert_count, n = g.n, k = g.k;
  const cuuint64_t expert = experts > 1 ? g.w_stride * 2 : n * row, apart = kPairs ? (up > w ? up - w : w - up) : 0;
  const cuuint32_t height = rows, every[5] = {1, 1, 1, 1, 1};
  const auto describe = [&](int dimensions, const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box) {
    return encode(&boxes, CU_TENSOR_MAP_DATA_TYPE_UINT16, dimensions, (void*)(kPairs && up < w ? up : w), sizes, strides,
                  box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  };
  if (kPairs) {
    const cuuint64_t sizes[] = {k, 8, 2, n / 8, experts}, strides[] = {row, apart, 8 * row, expert};
    const cuuint32_t box[] = {kBoxK, 8, 2, height / 16, 1};
    return describe(5, sizes, strides, box);
  }
  const cuuint64_t sizes[] = {k, n, experts}, strides[] = {row, expert};
  const cuuint32_t box[] = {kBoxK, height, 1};
  return describe(3, sizes, strides, box);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Barriers just initialised are seen by the copy engine.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Bytes that the barrier's phase waits for, too.
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// A box from row `row` of the matrix units' tile on; counts at the barrier.
template <bool kPairs>
__device__ __forceinline__ void copy_box(const CUtensorMap& boxes, uint32_t to, uint64_t* barrier, int k, int row,
                                         int expert) {
  if constexpr (kPairs) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %4, %5, %6}], [%2];" ::"r"(to),
        "l"(&boxes), "r"(shared_address(barrier)), "r"(k), "r"(0), "r"(row / 16), "r"(expert)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(&boxes), "r"(shared_address(barrier)), "r"(k), "r"(row), "r"(expert)
        : "memory");
  }
}
#endif

}  // namespace
