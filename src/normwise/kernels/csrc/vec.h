// Vectors of the widest kind an instruction set has, and the four element types.
//
// Every isa_*.cpp includes this inside a namespace of its own, with NW_BYTES set to the width of its registers.
// Only GCC's and Clang's vector extensions are used, and no inline function of the standard library: the linker
// keeps one copy of such a function for all files, and might keep the one compiled for AVX-512.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "types.h"

namespace normwise::NW_ISA {

#define NW_ALWAYS __attribute__((always_inline))  // lambdas too, or GCC calls them once a vector
#define NW_INLINE static inline NW_ALWAYS
#define NW_APART static __attribute__((noinline))  // called once a row: inlined, it would be compiled a hundred times

template <class A>
struct Native;
template <>
struct Native<float> {
  typedef float Type __attribute__((vector_size(NW_BYTES)));
  typedef int32_t Bits __attribute__((vector_size(NW_BYTES)));
};
template <>
struct Native<double> {
  typedef double Type __attribute__((vector_size(NW_BYTES)));
  typedef int64_t Bits __attribute__((vector_size(NW_BYTES)));
};

template <class A>
using V = typename Native<A>::Type;
template <class A>
constexpr int64_t LANES = NW_BYTES / sizeof(A);
// 128 bytes: four of the 32-byte vectors in which torch adds up a row, see sums.h
template <class A>
constexpr int64_t BLOCK = 128 / sizeof(A);
constexpr int PARTS = 128 / NW_BYTES;

typedef uint32_t U32 __attribute__((vector_size(NW_BYTES)));
typedef int32_t I32 __attribute__((vector_size(NW_BYTES)));
typedef uint16_t U16 __attribute__((vector_size(NW_BYTES / 2)));
using F32 = V<float>;

template <class A>
NW_INLINE V<A> splat(A a) {
  return a - V<A>{};  // a - 0 is a, to the bit, also for -0
}

// a * b + c, rounded once where the instruction set can
NW_INLINE F32 fma(F32 a, F32 b, F32 c) {
#if NW_BYTES == 64
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif NW_BYTES == 32
  return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (F32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

NW_INLINE V<double> fma(V<double> a, V<double> b, V<double> c) {
#if NW_BYTES == 64
  return (V<double>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif NW_BYTES == 32
  return (V<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__aarch64__)
  return (V<double>)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
  return a * b + c;
#endif
}

NW_INLINE float fma(float a, float b, float c) {
#if NW_BYTES > 16 || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

NW_INLINE double fma(double a, double b, double c) {
#if NW_BYTES > 16 || defined(__aarch64__)
  return __builtin_fma(a, b, c);
#else
  return a * b + c;
#endif
}

NW_INLINE float root(float a) { return __builtin_sqrtf(a); }
NW_INLINE double root(double a) { return __builtin_sqrt(a); }
NW_INLINE float magnitude(float a) { return __builtin_fabsf(a); }
NW_INLINE double magnitude(double a) { return __builtin_fabs(a); }
NW_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
NW_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// What cannot be squared and summed safely is scaled by a power of two first: from 2^LARGE up, as eager does.
template <class A>
struct Range;
template <>
struct Range<float> {
  static constexpr int LARGE = 40;
  static constexpr float SQUARES = 0x1p80f, MEAN = 0x1p40f;
};
template <>
struct Range<double> {
  static constexpr int LARGE = 320;
  static constexpr double SQUARES = 0x1p640, MEAN = 0x1p320;
};

// -- half precision -------------------------------------------------------------------------------

NW_INLINE F32 widen(U16 bits, Bf16) { return (F32)(__builtin_convertvector(bits, U32) << 16); }

// Pairs of bfloat16 as words, `a` in their lower halves and `b` in their upper ones: each rounded to the nearest, ties
// to even, for both at once. A NaN stays one if its lower half is 0, or if it came from arithmetic on numbers.
NW_INLINE U32 narrow_pairs(F32 a, F32 b) {
  typedef uint16_t Halves __attribute__((vector_size(NW_BYTES)));
  const Halves upper = (Halves)(((U32)a >> 16) | ((U32)b & 0xffff0000u));
  const Halves lower = (Halves)(((U32)a & 0xffff) | ((U32)b << 16));
  const Halves odd = upper & 1;
#if NW_BYTES == 64
  const __mmask32 up = _mm512_cmpgt_epu16_mask((__m512i)(lower | odd), _mm512_set1_epi16((short)0x8000));
  return (U32)_mm512_mask_add_epi16((__m512i)upper, up, (__m512i)upper, _mm512_set1_epi16(1));
#else
  return (U32)(upper - (Halves)((lower | odd) > 0x8000));  // what is true is -1
#endif
}

#if defined(__AVX512BF16__)
// The same in one instruction and a permutation, but that numbers below 2^-126 become 0.
constexpr bool FLUSHING = true;
NW_INLINE U32 narrow_pairs_flushing(F32 a, F32 b) {
  typedef uint16_t Places __attribute__((vector_size(64)));
  const Places alternate = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                            8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (U32)_mm512_permutexvar_epi16((__m512i)alternate, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
}
// Whether any of these is +0 or -0: each has a bit of its own.
NW_INLINE uint32_t zeros_in_pairs(U32 pairs) {
  return _mm512_testn_epi16_mask((__m512i)pairs, _mm512_set1_epi16(0x7fff));
}
#else
constexpr bool FLUSHING = false;
NW_INLINE U32 narrow_pairs_flushing(F32 a, F32 b) { return narrow_pairs(a, b); }
NW_INLINE uint32_t zeros_in_pairs(U32) { return 0; }
#endif

// The bits of `a`, rounded to the nearest bfloat16 (ties to even) in their upper half, or a NaN.
NW_INLINE U32 round_upper_half(F32 a) {
  const U32 bits = (U32)a, number = (U32)(a == a);
#if NW_BYTES == 64
  const __mmask16 odd = _mm512_test_epi32_mask((__m512i)bits, _mm512_set1_epi32(0x10000));
  const __m512i up = (__m512i)(bits + 0x7fff);
  const U32 rounded = (U32)_mm512_mask_add_epi32(up, odd, up, _mm512_set1_epi32(1));
#else
  const U32 rounded = bits + 0x7fff + ((bits >> 16) & 1);
#endif
  return (rounded & number) | (bits & ~number);
}

NW_INLINE U16 narrow(F32 a, Bf16) {
  const U32 upper = round_upper_half(a) >> 16;
#if NW_BYTES == 64
  return (U16)_mm512_cvtepi32_epi16((__m512i)upper);
#elif NW_BYTES == 32
  const __m256i packed = _mm256_packus_epi32((__m256i)upper, (__m256i)upper);
  return (U16)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
  return __builtin_convertvector(upper, U16);
#endif
}

NW_INLINE F32 widen(U16 bits, F16) {
#if NW_BYTES == 64
  return (F32)_mm512_cvtph_ps((__m256i)bits);
#elif NW_BYTES == 32
  return (F32)_mm256_cvtph_ps((__m128i)bits);
#else
  const U32 u = __builtin_convertvector(bits, U32);
  const U32 body = (u & 0x7fff) << 13;
  // the exponent's offset is 15 there and 127 here; a product also normalizes subnormal numbers
  const F32 scaled = (F32)body * 0x1p112f;
  const I32 special = (u & 0x7c00) == 0x7c00;  // infinity or NaN
  const U32 value = (U32)scaled | ((U32)special & 0x7f800000);
  return (F32)(value | ((u & 0x8000) << 16));
#endif
}

NW_INLINE U16 narrow(F32 a, F16) {
#if NW_BYTES == 64
  return (U16)_mm512_cvtps_ph((__m512)a, _MM_FROUND_TO_NEAREST_INT);
#elif NW_BYTES == 32
  return (U16)_mm256_cvtps_ph((__m256)a, _MM_FROUND_TO_NEAREST_INT);
#else
  const U32 bits = (U32)a, sign = (bits >> 16) & 0x8000, body = bits & 0x7fffffff;
  // normal results: move the exponent's offset, round to the nearest, ties to even; too large becomes infinity
  const U32 normal = (body - (112u << 23) + 0xfff + ((body >> 13) & 1)) >> 13;
  // subnormal results: adding 0.5 leaves them, rounded by the addition, in the low bits
  const U32 tiny = (U32)((F32)body + 0.5f) - 0x3f000000u;
  const I32 small = (I32)body < 0x38800000, large = (I32)body >= 0x47800000, nan = (I32)body > 0x7f800000;
  U32 out = (U32)((small & (I32)tiny) | (~small & (I32)normal));
  out = (U32)((~large & (I32)out) | (large & 0x7c00));
  out = (U32)((~nan & (I32)out) | (nan & 0x7e00));
  return __builtin_convertvector(out | sign, U16);
#endif
}

// -- load and store, from any address ----------------------------------------------------------------

NW_INLINE F32 load(const float* p) {
  F32 v;
  memcpy(&v, p, sizeof v);
  return v;
}
NW_INLINE V<double> load(const double* p) {
  V<double> v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class H>
NW_INLINE F32 load(const H* p) {
  U16 bits;
  memcpy(&bits, p, sizeof bits);
  return widen(bits, H{});
}

NW_INLINE void store(float* p, F32 v) { memcpy(p, &v, sizeof v); }
NW_INLINE void store(double* p, V<double> v) { memcpy(p, &v, sizeof v); }
template <class H>
NW_INLINE void store(H* p, F32 v) {
  const U16 bits = narrow(v, H{});
  memcpy(p, &bits, sizeof bits);
}

// One element by way of a vector, so that it is rounded by the same code.
NW_INLINE float load1(const float* p) { return *p; }
NW_INLINE double load1(const double* p) { return *p; }
NW_INLINE float load1(const Bf16* p) {
  const uint32_t bits = (uint32_t)p->bits << 16;
  float a;
  memcpy(&a, &bits, sizeof a);
  return a;
}
NW_INLINE float load1(const F16* p) {
  U16 bits{};
  bits[0] = p->bits;
  return widen(bits, F16{})[0];
}
NW_INLINE void store1(float* p, float a) { *p = a; }
NW_INLINE void store1(double* p, double a) { *p = a; }
template <class H>
NW_INLINE void store1(H* p, float a) {
  F32 v{};
  v[0] = a;
  p->bits = narrow(v, H{})[0];
}

// The value that a number has after a trip through type T.
NW_INLINE F32 rounded(F32 v, float) { return v; }
NW_INLINE V<double> rounded(V<double> v, double) { return v; }
NW_INLINE F32 rounded(F32 v, Bf16) { return (F32)(round_upper_half(v) & 0xffff0000u); }
NW_INLINE F32 rounded(F32 v, F16 h) { return widen(narrow(v, h), h); }
NW_INLINE float rounded(float a, float) { return a; }
NW_INLINE double rounded(double a, double) { return a; }
template <class H>
NW_INLINE float rounded(float a, H) {
  H h;
  store1(&h, a);
  return load1(&h);
}

// Writes a vector past the cache, to a multiple of its size: memory that nobody reads soon is then written without
// being read first. Only whole lines of 64 bytes in a row are worth it.
template <class Vector>
NW_INLINE void store_past(void* p, Vector v) {
#if defined(__x86_64__)
#if NW_BYTES == 64
  if constexpr (sizeof v == 64) return _mm512_stream_si512((__m512i*)p, (__m512i)v);
#endif
#if NW_BYTES >= 32
  if constexpr (sizeof v == 32) return _mm256_stream_si256((__m256i*)p, (__m256i)v);
#endif
  if constexpr (sizeof v == 16) return _mm_stream_si128((__m128i*)p, (__m128i)v);
#endif
  memcpy(p, &v, sizeof v);
}

NW_INLINE bool begins_a_line(const void* p) { return (uintptr_t)p % 64 == 0; }

// Before other threads may read what was streamed.
NW_INLINE void stream_end() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace normwise::NW_ISA
