// matmul_fp16: a linear layer in float16, summed in float32 and rounded once.
//
// Up to 8 rows it is reading b, N K elements, at the rate of memory: gemm_few.cuh, or where that does not fit,
// gemm_stream.cuh. From there on cuBLASLt is at the limit of memory or of the tensor cores already; what it cannot take
// (alignment), or where it is missing, goes to gemm_hopper.cuh, gemm_tile.cuh or gemm_plain.cuh.
#include "cublaslt.cuh"
#include "gemm_few.cuh"
#include "gemm_hopper.cuh"
#include "gemm_plain.cuh"
#include "gemm_stream.cuh"
#include "gemm_tile.cuh"

namespace {

int few_rows(const Gemm& g, void* stream) {
  const FewRows p = {(const f16*)g.x, (const f16*)g.w, (const f16*)g.bias, (f16*)g.out, g.x_stride, g.row_stride,
                     g.positions, g.n, g.k};
  bool done;
  const int status = launch_few_rows(p, done, stream);
  if (done) return status;
  if (ceil_div(g.n, 32) < 2 * sm_count()) return launch_stream<f16, f16, 1, 1, false, Source::kRows>(g, 1, stream);
  return launch_stream<f16, f16, 2, 1, false, Source::kRows>(g, 1, stream);
}

}  // namespace

extern "C" int OPSHIM(matmul_fp16)(
    const void* a, const void* b, const void* bias, void* y, void* workspace, int64_t rows, int64_t features,
    int64_t inner, int64_t a_stride, int64_t b_stride, int64_t workspace_size, int64_t device, void* stream) {
  OnDevice on(device);
  if (rows == 0 || features == 0) return kOk;
  if (max(rows, max(features, inner)) > INT32_MAX / 2) return kBadArgument;
  Gemm g = {};
  g.x = a;
  g.w = b;
  g.out = y;
  g.bias = bias;
  g.x_stride = a_stride;
  g.out_stride = features;
  g.row_stride = b_stride;
  g.positions = int32_t(rows);
  g.slot_count = int32_t(rows);
  g.n = int32_t(features);
  g.k = int32_t(inner);
  g.expert_count = 1;
  g.source = Source::kRows;

  const bool wide = inner > 0 && aligned(16, sizeof(f16), a, a_stride, inner) && aligned(16, sizeof(f16), b, b_stride);
  if (!wide) return launch_plain<f16, f16, f16, false>(g, ceil_div<int64_t>(rows, kPlainTokens), stream);
  if (rows <= 8) return few_rows(g, stream);
  if (a_stride >= inner && b_stride >= inner && aligned(16, sizeof(f16), y, features) && aligned(16, 1, bias) &&
      CublasLt::get().multiply(a, b, bias, y, rows, features, inner, a_stride, b_stride, workspace,
                               size_t(workspace_size), cudaStream_t(stream)))
    return kOk;
  if (CUtensorMap boxes; hopper_takes<false>(g, boxes))
    return launch_hopper<f16, f16, false>(g, boxes, 128, ceil_div<int64_t>(rows, 128), stream);
  return launch_tile<f16, f16, false>(g, ceil_div<int64_t>(rows, kTileTokens), stream);
}
