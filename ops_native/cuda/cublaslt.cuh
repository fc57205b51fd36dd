// cuBLASLt, found at run time: torch has loaded it already, and where it is missing nothing else is.
//
// OPSHIM_CUBLASLT=0 does without it, as if it were missing.
//
// Declared here is the little of its ABI that is used, which has been the same from CUDA 11 to 13.
#pragma once
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>

#include "opshim.cuh"

namespace {

struct LtAlgorithm {
  uint64_t data[8];
};
struct LtHeuristic {
  LtAlgorithm algorithm;
  size_t workspace_size;
  int state;
  float waves;
  int reserved[4];
};
using LtObject = void*;  // handle, matmul descriptor, layout, preference

enum : int { kLtF32 = 0, kLtF16 = 2, kLtCompute32F = 68, kLtTranspose = 1 };
enum : int { kLtTransA = 3, kLtEpilogue = 7, kLtBiasPointer = 8, kLtEpilogueBias = 4 };
enum : int { kLtMaxWorkspace = 1, kLtReductions = 3, kLtAlignment = 5 };  // kLtAlignment ... + 3: of A, B, C, D
constexpr uint32_t kLtReduceInFloat = 2;  // of the ways to split k, none that rounds or adds in float16

class CublasLt {
 public:
  static CublasLt& get() {
    static CublasLt* const instance = new CublasLt;  // never destroyed: CUDA may be gone by then
    return *instance;
  }

  // y [m,n] = a [m,k] b [n,k]^T + bias [n] in float16, summed in float32. False where it is not to be had.
  bool multiply(const void* a, const void* b, const void* bias, void* y, int64_t m, int64_t n, int64_t k,
                int64_t a_stride, int64_t b_stride, void* workspace, size_t workspace_size, cudaStream_t stream) {
    int device = 0;
    if (!library_ || cudaGetDevice(&device) != cudaSuccess) return false;
    const std::lock_guard<std::mutex> lock(mutex_);
    const Key key{device, m, n, k, a_stride, b_stride, bias != nullptr, alignment(a), alignment(b), alignment(y)};
    const auto found = plans_.find(key);
    Plan& plan = found != plans_.end() ? found->second : plans_[key];
    if (found == plans_.end()) plan.usable = make(plan, key, bias, workspace_size);
    if (!plan.usable) return false;
    if (bias && set_(plan.operation, kLtBiasPointer, &bias, sizeof bias) != 0) return false;
    const float one = 1, zero = 0;
    return matmul_(handles_[device], plan.operation, &one, b, plan.b, a, plan.a, &zero, y, plan.y, y, plan.y,
                   &plan.algorithm, workspace, workspace_size, stream) == 0;
  }

 private:
  using Key = std::tuple<int, int64_t, int64_t, int64_t, int64_t, int64_t, bool, int, int, int>;
  struct Plan {
    LtObject operation = nullptr, a = nullptr, b = nullptr, y = nullptr;
    LtAlgorithm algorithm;
    bool usable = false;
  };

  CublasLt() {
    const char* const wanted = getenv("OPSHIM_CUBLASLT");
    if (wanted && strcmp(wanted, "0") == 0) return;
    for (const int mode : {RTLD_NOLOAD | RTLD_LAZY, RTLD_LAZY})
      for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"})
        if (!library_) library_ = dlopen(name, mode);
    const bool all = library_ && load(create_, "cublasLtCreate") && load(operation_, "cublasLtMatmulDescCreate") &&
                     load(set_, "cublasLtMatmulDescSetAttribute") && load(layout_, "cublasLtMatrixLayoutCreate") &&
                     load(preference_, "cublasLtMatmulPreferenceCreate") &&
                     load(prefer_, "cublasLtMatmulPreferenceSetAttribute") &&
                     load(destroy_preference_, "cublasLtMatmulPreferenceDestroy") &&
                     load(heuristic_, "cublasLtMatmulAlgoGetHeuristic") && load(matmul_, "cublasLtMatmul");
    if (!all) library_ = nullptr;
  }
  template <class F> bool load(F& function, const char* name) {
    function = (F)dlsym(library_, name);
    return function != nullptr;
  }

  static int alignment(const void* pointer) {
    int bytes = 256;
    while (uintptr_t(pointer) % bytes) bytes /= 2;
    return bytes;
  }

  // In cuBLAS's columns y^T [n,m] = b a^T: its A is b, transposed, its B is a.
  bool make(Plan& plan, const Key& key, const void* bias, size_t workspace_size) {
    const auto [device, m, n, k, a_stride, b_stride, with_bias, align_a, align_b, align_y] = key;
    if (!handles_[device] && create_(&handles_[device]) != 0) return false;
    const int transpose = kLtTranspose, epilogue = kLtEpilogueBias;
    bool ok = operation_(&plan.operation, kLtCompute32F, kLtF32) == 0 &&
              set_(plan.operation, kLtTransA, &transpose, sizeof transpose) == 0 &&
              layout_(&plan.b, kLtF16, k, n, b_stride) == 0 && layout_(&plan.a, kLtF16, k, m, a_stride) == 0 &&
              layout_(&plan.y, kLtF16, n, m, n) == 0;
    if (ok && with_bias)
      ok = set_(plan.operation, kLtEpilogue, &epilogue, sizeof epilogue) == 0 &&
           set_(plan.operation, kLtBiasPointer, &bias, sizeof bias) == 0;
    LtObject preference = nullptr;
    if (!ok || preference_(&preference) != 0) return false;
    const uint64_t most = workspace_size;
    const uint32_t reductions = kLtReduceInFloat, alignments[] = {uint32_t(align_b), uint32_t(align_a),
                                                                  uint32_t(align_y), uint32_t(align_y)};
    ok = prefer_(preference, kLtMaxWorkspace, &most, sizeof most) == 0 &&
         prefer_(preference, kLtReductions, &reductions, sizeof reductions) == 0;
    for (int i = 0; ok && i < 4; ++i)
      ok = prefer_(preference, kLtAlignment + i, &alignments[i], sizeof alignments[i]) == 0;
    LtHeuristic best = {};
    int count = 0;
    ok = ok && heuristic_(handles_[device], plan.operation, plan.b, plan.a, plan.y, plan.y, preference, 1, &best,
                          &count) == 0 && count > 0;
    destroy_preference_(preference);
    plan.algorithm = best.algorithm;
    return ok;
  }

  void* library_ = nullptr;
  int (*create_)(LtObject*) = nullptr;
  int (*operation_)(LtObject*, int compute, int scale_type) = nullptr;
  int (*set_)(LtObject, int attribute, const void*, size_t) = nullptr;
  int (*layout_)(LtObject*, int type, uint64_t rows, uint64_t columns, int64_t stride) = nullptr;
  int (*preference_)(LtObject*) = nullptr;
  int (*prefer_)(LtObject, int attribute, const void*, size_t) = nullptr;
  int (*destroy_preference_)(LtObject) = nullptr;
  int (*heuristic_)(LtObject, LtObject, LtObject a, LtObject b, LtObject c, LtObject d, LtObject preference, int,
                    LtHeuristic*, int*) = nullptr;
  int (*matmul_)(LtObject, LtObject, const void* alpha, const void* a, LtObject, const void* b, LtObject,
                 const void* beta, const void* c, LtObject, void* d, LtObject, const LtAlgorithm*, void* workspace,
                 size_t, cudaStream_t) = nullptr;

  std::mutex mutex_;
  std::map<int, LtObject> handles_;
  std::map<Key, Plan> plans_;
};

}  // namespace
