// What every CPU kernel shares: instruction set, vectors, dtypes, threads.
//
// Each .cpp of this folder is compiled once per instruction set (base, avx2, avx512; -DOPSHIM_ISA=...). Exported
// functions are declared `extern "C" int OPSHIM(name)(...)` and get the instruction set as suffix; the loader picks
// the best one that the machine has. All else lives in namespace OPSHIM_ISA: were an inline function to keep one name,
// the linker would merge its copies and might run AVX-512 code on a machine that has none. For the same reason kernels
// use no containers or algorithms of the standard library.
//
// ABI: pointers, int64_t, double; sizes and strides count elements; the last argument is the thread count; the result
// is 0, or a code of enum Status. Nothing is allocated that outlives the call, except scratch kept per thread.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define OPSHIM_JOIN2(a, b, c) a##b##_##c
#define OPSHIM_JOIN(a, b, c) OPSHIM_JOIN2(a, b, c)
#define OPSHIM(name) __attribute__((visibility("default"))) OPSHIM_JOIN(opshim_, name, OPSHIM_ISA)

namespace OPSHIM_ISA {

enum Status : int { kOk = 0, kBadDtype = 1, kNoMemory = 2, kBadArgument = 3 };
enum Dtype : int64_t { kF32 = 0, kF16 = 1, kBF16 = 2 };  // as in ops_native/libraries.py

struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };

#if defined(__AVX512F__)
constexpr int W = 16;  // float32 lanes
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
typedef float vf __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(W * 2), aligned(2), may_alias));

inline vf splat(float x) { return x - vf{}; }  // x + 0 would be an addition: it turns -0 into 0
template <class To, class From>
inline To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "bit cast between sizes");
  To to;
  std::memcpy(&to, &x, sizeof to);
  return to;
}

// ---- scalars to and from float32; rounding to nearest even, NaN stays NaN -------------------------------------------
inline float to_f32(float x) { return x; }
inline float to_f32(bf16 x) { return bits<float>(uint32_t(x.bits) << 16); }
inline float to_f32(f16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, body = x.bits & 0x7fffu;
  if (body >= 0x7c00u) return bits<float>(sign | 0x7f800000u | ((body & 0x3ffu) << 13));
  // scaling by 2^112 moves half's exponent bias to float's, subnormals included
  return bits<float>(sign | bits<uint32_t>(bits<float>(body << 13) * 0x1p112f));
}
template <class T> T from_f32(float);
template <> inline float from_f32<float>(float x) { return x; }
template <> inline bf16 from_f32<bf16>(float x) {
  const uint32_t u = bits<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {uint16_t((u >> 16) | 0x40u)};
  return {uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
template <> inline f16 from_f32<f16>(float x) {
  const uint32_t u = bits<uint32_t>(x), sign = (u >> 16) & 0x8000u, body = u & 0x7fffffffu;
  if (body > 0x7f800000u) return {uint16_t(sign | 0x7e00u)};
  if (body >= 0x477ff000u) return {uint16_t(sign | 0x7c00u)};  // from 65520 on rounds to infinity
  if (body < 0x38800000u)  // subnormal half: adding 0.5 leaves the rounded value in the low mantissa bits
    return {uint16_t(sign | (bits<uint32_t>(bits<float>(body) + 0.5f) - 0x3f000000u))};
  return {uint16_t(sign | ((body - 0x38000000u + 0xfffu + ((body >> 13) & 1u)) >> 13))};
}

// ---- vectors: load and store of W elements, and of the first n < W (the rest reads as 0, is not touched) -----------
// (by the vector types, which may be unaligned: memcpy of a vector is split in two for AVX2, and its reload stalls)
inline vf load(const float* p) { return *(const vf*)p; }
inline void store(float* p, vf v) { *(vf*)p = v; }
inline vf load(const bf16* p) { return bits<vf>(__builtin_convertvector(*(const vh*)p, vu) << 16); }
inline void store(bf16* p, vf v) {
  const vu u = bits<vu>(v);
  const vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, quiet = (u >> 16) | 0x40u;
  const vu nan = bits<vu>(vi((u & 0x7fffffffu) > 0x7f800000u));
  *(vh*)p = __builtin_convertvector((rounded & ~nan) | (quiet & nan), vh);
}
inline vf load(const f16* p) {
#if defined(__AVX512F__)
  return bits<vf>(_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)));
#elif defined(__F16C__)
  return bits<vf>(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)));
#else
  vf v;
  for (int i = 0; i < W; ++i) v[i] = to_f32(p[i]);
  return v;
#endif
}
inline void store(f16* p, vf v) {
#if defined(__AVX512F__)
  // masked, by nothing, since GCC 12 warns of its own unmasked form
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm256_storeu_si256((__m256i*)p, _mm512_maskz_cvtps_ph(0xffff, bits<__m512>(v), nearest));
#elif defined(__F16C__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(bits<__m256>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  for (int i = 0; i < W; ++i) p[i] = from_f32<f16>(v[i]);
#endif
}
template <class T>
inline vf load(const T* p, int n) {
  T buffer[W];
  std::memset(buffer, 0, sizeof buffer);
  std::memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}
template <class T>
inline void store(T* p, vf v, int n) {
  T buffer[W];
  store(buffer, v);
  std::memcpy(p, buffer, n * sizeof(T));
}

// Halves are added until one lane is left, in registers: v[i] += v[i + step] in a loop would go through memory.
inline float sum(vf v) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m512 w = bits<__m512>(v);  // masked extractions, as GCC 12 warns about plain ones
  const __m256 h = _mm256_add_ps(_mm512_maskz_extractf32x8_ps(0xff, w, 0), _mm512_maskz_extractf32x8_ps(0xff, w, 1));
#else
  const __m256 h = bits<__m256>(v);
#endif
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}
inline vf select(vi mask, vf a, vf b) { return bits<vf>((bits<vi>(a) & mask) | (bits<vi>(b) & ~mask)); }
inline vf vmax(vf a, vf b) { return select(vi(a > b), a, b); }  // of a NaN pair: b
inline float max_of(vf v) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m512 w = bits<__m512>(v);
  const __m256 h = _mm256_max_ps(_mm512_maskz_extractf32x8_ps(0xff, w, 0), _mm512_maskz_extractf32x8_ps(0xff, w, 1));
#else
  const __m256 h = bits<__m256>(v);
#endif
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
#else
  float m = v[0];
  for (int i = 1; i < W; ++i) m = v[i] > m ? v[i] : m;
  return m;
#endif
}

// e^x = 2^whole times the result, which is within [0.7, 1.5]: Cephes' expf, range reduced by ln 2. NaN for NaN.
inline vf exp_parts(vf x, vi& whole) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  const vf shifted = x * 1.44269504088896341f + magic;
  const vf n = shifted - magic;
  whole = bits<vi>(shifted) - bits<vi>(magic);
  vf r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * (r * r) + r + 1.0f;
}
// e^x within 1 ulp for x in [-104, 88.72]: from 0 up; NaN for NaN.
inline vf exp_in_range(vf x) {
  vi whole;
  const vf p = exp_parts(x, whole);
  // 2^whole in two factors, so that results below the smallest normal number round instead of vanishing
  const vi half = whole >> 1;
  const vf a = bits<vf>((half + 127) << 23), b = bits<vf>((whole - half + 127) << 23);
  return p * a * b;
}
// For any x: 0 from -104 down, inf from 88.73 up.
inline vf vexp(vf x) {
  const vi low = vi(x < -104.0f), high = vi(x > 88.7228394f);
  const vf y = select(low, vf{}, exp_in_range(select(low | high, vf{}, x)));
  return select(high, splat(HUGE_VALF), y);
}
// For x <= 0, where nothing can overflow.
inline vf exp_of_negative(vf x) { return exp_in_range(vmax(splat(-104.0f), x)); }

// ---- dtypes, threads, scratch ---------------------------------------------------------------------------------------
// Calls f with a value of the element type that the code names.
template <class F>
inline int with_dtype(int64_t code, F&& f) {
  switch (code) {
    case kF32: return f(float{});
    case kF16: return f(f16{});
    case kBF16: return f(bf16{});
    default: return kBadDtype;
  }
}

// f(i) for i in [0, n), tasks handed out one by one. The OpenMP runtime is the one that torch loaded (the library is
// linked without one), so both share one pool of threads.
template <class F>
inline void parallel_for(int64_t n, int64_t threads, F&& f) {
  if (threads <= 1 || n <= 1) {
    for (int64_t i = 0; i < n; ++i) f(i);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads < n ? int(threads) : int(n))
  for (int64_t i = 0; i < n; ++i) f(i);
}

// A 64-byte aligned buffer of the calling thread, kept for its next call with the same Tag; null when out of memory.
template <class Tag, class T>
inline T* scratch(int64_t count) {
  struct Buffer {
    void* data = nullptr;
    size_t size = 0;
    ~Buffer() { std::free(data); }
  };
  static thread_local Buffer buffer;
  const size_t bytes = (size_t(count) * sizeof(T) + 64) / 64 * 64;  // of nothing, too, there is a buffer
  if (bytes > buffer.size) {
    std::free(buffer.data);
    buffer.data = std::aligned_alloc(64, bytes);
    buffer.size = buffer.data ? bytes : 0;
  }
  return static_cast<T*>(buffer.data);
}

}  // namespace OPSHIM_ISA
