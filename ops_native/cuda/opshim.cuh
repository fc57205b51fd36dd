// What every CUDA kernel shares: dtypes, conversions, reductions over a warp, the launch.
//
// ABI: `extern "C" int OPSHIM(name)(...)` over device pointers, int64_t, double; sizes and strides count elements; the
// last two arguments are the device's index and the stream. The result is 0, a code of enum Status, or kCudaError plus
// CUDA's own code. A launcher never synchronises, never allocates, and never reads device memory: scratch is handed in
// by the binding, so it is safe under graph capture. Offsets are int64_t. Everything else lives in an anonymous
// namespace, so that files cannot merge each other's kernels.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#define OPSHIM(name) __attribute__((visibility("default"))) opshim_##name

namespace {

enum Status : int { kOk = 0, kBadDtype = 1, kNoMemory = 2, kBadArgument = 3, kCudaError = 1000 };
enum Dtype : int64_t { kF32 = 0, kF16 = 1, kBF16 = 2 };  // as in ops_native/libraries.py

using f16 = __half;
using bf16 = __nv_bfloat16;

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ float to_f32(f16 x) { return __half2float(x); }
__device__ __forceinline__ float to_f32(bf16 x) { return __bfloat162float(x); }
template <class T> __device__ __forceinline__ T from_f32(float x);  // rounds to nearest even; NaN stays NaN
template <> __device__ __forceinline__ float from_f32<float>(float x) { return x; }
template <> __device__ __forceinline__ f16 from_f32<f16>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ bf16 from_f32<bf16>(float x) { return __float2bfloat16_rn(x); }

// 16, 8 or 4 bytes of T, loaded and stored at once where the address is a multiple of that
template <class T, int N> struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = kWarp / 2; offset; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}

template <class T> __host__ __device__ constexpr T ceil_div(T a, T b) { return (a + b - 1) / b; }

// Whether pointer and every stride (in elements of `size` bytes) are multiples of `bytes`: wide loads may be used.
template <class... Strides> bool aligned(int bytes, int size, const void* pointer, Strides... strides) {
  return ((reinterpret_cast<uintptr_t>(pointer) % bytes == 0) && ... && (strides * size % bytes == 0));
}

// f(T{}) with the type of the dtype; its status.
template <class F> int by_dtype(int64_t dtype, F f) {
  switch (dtype) {
    case kF32: return f(float{});
    case kF16: return f(f16{});
    case kBF16: return f(bf16{});
  }
  return kBadDtype;
}

// Makes the device current while it lives: the caller's may be another one.
class OnDevice {
 public:
  explicit OnDevice(int64_t device) {
    cudaGetDevice(&before_);
    if (before_ != device) cudaSetDevice(int(device));
    changed_ = before_ != device;
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

inline int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, which, device);
  return value;
}
inline int sm_count() { return attribute(cudaDevAttrMultiProcessorCount); }
inline int shared_memory_limit() { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }  // bytes per block
inline int capability() {  // 90 for 9.0
  return 10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
}

inline int status_of(cudaError_t error) { return error == cudaSuccess ? kOk : kCudaError + int(error); }

// Programmatic dependent launch: a kernel started by launch_early() may begin while the one before it in the stream
// still runs, once all of that one's blocks have called let_next_start() or ended. Nothing that an earlier kernel may
// have written is read, and nothing at all is written, before wait_for_previous(), which every thread calls first.
// But what kernels before the previous one have written may be read, if that one calls start_early().
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
// In this order: whoever starts early knows that all kernels before the previous one have ended.
__device__ __forceinline__ void start_early() {
  wait_for_previous();
  let_next_start();
}

// Lets the kernel have so much shared memory on the current device. It may need more than the 48 KB, static memory
// included, that every kernel has. The limit only rises, as another thread may be between this and its launch.
inline cudaError_t allow_shared(const void* kernel, size_t shared) {
  if (shared <= 32 * 1024) return cudaSuccess;
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, size_t> allowed;
  int device = 0;
  cudaGetDevice(&device);
  const std::lock_guard<std::mutex> lock(mutex);
  size_t& most = allowed[{kernel, device}];
  if (shared <= most) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
  if (error == cudaSuccess) most = shared;
  return error;
}

template <class... Parameters, class... Arguments>
int launch_with(bool early, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, void* stream,
                Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return kOk;
  const cudaError_t error = allow_shared((const void*)kernel, shared);
  if (error != cudaSuccess) return status_of(error);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = cudaStream_t(stream);
  config.attrs = &attribute;
  config.numAttrs = early && capability() >= 90 ? 1 : 0;
  return status_of(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}

// Starts kernel<<<grid, block, shared>>> on the stream; an empty grid is no error.
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, void* stream, Arguments... arguments) {
  return launch_with(false, kernel, grid, block, shared, stream, arguments...);
}
// The same, of a kernel that calls wait_for_previous().
template <class... Parameters, class... Arguments>
int launch_early(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, void* stream,
                 Arguments... arguments) {
  return launch_with(true, kernel, grid, block, shared, stream, arguments...);
}

}  // namespace
