// Boxes: rows of an expert's weights, or of x, by 64 of k, which the copy engine of sm_90 brings into shared memory as
// wgmma wants them: rows of 128 bytes, whose pieces of 16 lie at piece ^ (row % 8). Beyond the last row and the last k
// are zeros. Weights for pairs have gate and up in turns of eight rows: a tensor of five dimensions, k, 8 rows, 2,
// N / 8, experts.
#pragma once
#include <cuda.h>

#include "gemm.cuh"
#include "hopper.cuh"

namespace {

constexpr int kBoxK = 64;

// A tensor's description; false where it has none, or the driver is too old.
inline bool describe(int dimensions, const void* tensor, const cuuint64_t* sizes, const cuuint64_t* strides,
                     const cuuint32_t* box, CUtensorMap& boxes) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult how = cudaDriverEntryPointSymbolNotFound;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &how);
    return how == cudaDriverEntryPointSuccess ? decltype(&cuTensorMapEncodeTiled)(found) : nullptr;
  }();
  const cuuint32_t every[] = {1, 1, 1, 1, 1};
  return encode && encode(&boxes, CU_TENSOR_MAP_DATA_TYPE_UINT16, dimensions, const_cast<void*>(tensor), sizes, strides,
                          box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                          CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Of weights, in boxes of `rows` rows.
template <bool kPairs> bool describe_boxes(const Gemm& g, int rows, CUtensorMap& boxes) {
  const char *w = (const char*)g.w, *up = (const char*)g.up;
  const cuuint64_t row = g.row_stride * 2, experts = g.expert_count, n = g.n, k = g.k;
  const cuuint64_t expert = experts > 1 ? g.w_stride * 2 : n * row;
  const cuuint32_t height = rows;
  if (kPairs) {
    if (g.n % 8 || g.w_stride != g.up_stride || w == up) return false;
    const cuuint64_t apart = up > w ? up - w : w - up;
    const cuuint64_t sizes[] = {k, 8, 2, n / 8, experts}, strides[] = {row, apart, 8 * row, expert};
    const cuuint32_t box[] = {kBoxK, 8, 2, height / 16, 1};
    return describe(5, up < w ? up : w, sizes, strides, box, boxes);
  }
  const cuuint64_t sizes[] = {k, n, experts}, strides[] = {row, expert};
  const cuuint32_t box[] = {kBoxK, height, 1};
  return describe(3, w, sizes, strides, box, boxes);
}

// Of x, in boxes of `rows` rows, where a tile's rows are neighbours.
inline bool describe_row_boxes(const Gemm& g, int rows, CUtensorMap& boxes) {
  if (g.by_slot_in || g.source == Source::kBlocks || g.x_stride < g.k) return false;
  const cuuint64_t sizes[] = {cuuint64_t(g.k), cuuint64_t(g.slot_count)}, strides[] = {cuuint64_t(g.x_stride) * 2};
  const cuuint32_t box[] = {kBoxK, cuuint32_t(rows)};
  return describe(2, g.x, sizes, strides, box, boxes);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Fetches a description before it is needed.
__device__ __forceinline__ void prepare(const CUtensorMap& boxes) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&boxes) : "memory");
}
// A box from row `row` of the matrix units' tile on; counts at the barrier.
#define OPSHIM_BOX(dimensions, coordinates, ...) \
  asm volatile("cp.async.bulk.tensor." dimensions ".shared::cluster.global.tile.mbarrier::complete_tx::bytes" \
               " [%0], [%1, " coordinates "], [%2];" ::"r"(to), \
               "l"(&boxes), "r"(barrier.value), __VA_ARGS__ \
               : "memory")
template <bool kPairs>
__device__ __forceinline__ void copy_box(const CUtensorMap& boxes, uint32_t to, BarrierAddress barrier, int k, int row,
                                         int expert) {
  if constexpr (kPairs)
    OPSHIM_BOX("5d", "{%3, %4, %4, %5, %6}", "r"(k), "r"(0), "r"(row / 16), "r"(expert));
  else
    OPSHIM_BOX("3d", "{%3, %4, %5}", "r"(k), "r"(row), "r"(expert));
}
// The same of describe_row_boxes().
__device__ __forceinline__ void copy_row_box(const CUtensorMap& boxes, uint32_t to, BarrierAddress barrier, int k,
                                             int row) {
  OPSHIM_BOX("2d", "{%3, %4}", "r"(k), "r"(row));
}
#undef OPSHIM_BOX
#endif

}  // namespace
