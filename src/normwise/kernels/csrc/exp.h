// exp of a vector: every number in, infinity, zero and NaN included; float32 within 1 ulp, float64 within 1 ulp.
//
// exp(x) = 2^n * exp(r), n = x / ln 2 rounded to an integer, r = x - n * ln 2 (Cody and Waite: ln 2 in two parts, the
// first with so few bits that its product with n is exact), exp(r) = 1 + (r + r^2 q(r)). q is the polynomial through
// (exp(r) - 1 - r) / r^2 at the Chebyshev nodes of |r| <= ln(2) / 2, solved in 200 bits and then rounded: of degree 5
// for float32 (relative error of exp(r) 2^-30.4) and of degree 10 for float64 (2^-61.4).
#pragma once

#include "vec.h"

namespace normwise::NW_ISA {

template <class A>
struct Exp;
template <>
struct Exp<float> {
  static constexpr float Q[] = {0x1.000000p-1f,  0x1.555556p-3f,  0x1.5554eap-5f,
                                0x1.1110e0p-7f, 0x1.6d4316p-10f, 0x1.a124e4p-13f};
  static constexpr float LOG2_E = 0x1.715476p+0f, LN_2 = 0x1.62e4p-1f, LN_2_REST = 0x1.7f7d1cp-20f;
  static constexpr float ROUND = 0x1.8p23f;              // added and taken away: rounds to an integer
  static constexpr float LEAST = -104.0f, MOST = 89.0f;  // beyond them the result is 0 or infinity
  static constexpr float LARGEST = 0x1.fffffep127f;
  static constexpr int MANTISSA = 23, OFFSET = 127;
};
template <>
struct Exp<double> {
  static constexpr double Q[] = {
      0x1.0000000000000p-1,  0x1.5555555555557p-3,  0x1.5555555555556p-5,  0x1.11111111100dfp-7,
      0x1.6c16c16c162d6p-10, 0x1.a01a01abe62ddp-13, 0x1.a01a01a6d7808p-16, 0x1.71de02375656cp-19,
      0x1.27e4db67b4303p-22, 0x1.af4ddd84882fep-26, 0x1.1f72fc730b4ffp-29};
  static constexpr double LOG2_E = 0x1.71547652b82fep+0, LN_2 = 0x1.62e42fefa38p-1, LN_2_REST = 0x1.ef35793c7673p-45;
  static constexpr double ROUND = 0x1.8p52;
  static constexpr double LEAST = -746.0, MOST = 710.0;
  static constexpr double LARGEST = 0x1.fffffffffffffp1023;
  static constexpr int MANTISSA = 52, OFFSET = 1023;
};

template <class A>
NW_INLINE V<A> exponential_of(V<A> x) {
  using E = Exp<A>;
  x = x > E::MOST ? splat(E::MOST) : x;  // comparisons with NaN are false: it stays
  x = x < E::LEAST ? splat(E::LEAST) : x;
  const V<A> shifted = fma(x, splat(E::LOG2_E), splat(E::ROUND)), n = shifted - E::ROUND;
  const V<A> r = fma(n, splat(-E::LN_2_REST), fma(n, splat(-E::LN_2), x));
  constexpr int DEGREE = sizeof(E::Q) / sizeof(A) - 1;
  V<A> q = splat(E::Q[DEGREE]);
  _Pragma("GCC unroll 16") for (int i = DEGREE - 1; i >= 0; --i) q = fma(q, r, splat(E::Q[i]));
  const V<A> power = fma(r * r, q, r) + (A)1;
#if NW_BYTES == 64
  if constexpr (sizeof(A) == 4)
    return (V<A>)_mm512_scalef_ps((__m512)power, (__m512)n);
  else
    return (V<A>)_mm512_scalef_pd((__m512d)power, (__m512d)n);
#else
  // In two steps, neither of which leaves the range of exponents; the first is exact, so there is one rounding.
  using Bits = typename Native<A>::Bits;
  const Bits whole = (Bits)shifted - (Bits)splat(E::ROUND), half = whole >> 1;
  const V<A> first = (V<A>)((half + E::OFFSET) << E::MANTISSA);
  return power * first * (V<A>)((whole - half + E::OFFSET) << E::MANTISSA);
#endif
}

NW_INLINE F32 exponential(F32 x) { return exponential_of<float>(x); }
NW_INLINE V<double> exponential(V<double> x) { return exponential_of<double>(x); }

}  // namespace normwise::NW_ISA
