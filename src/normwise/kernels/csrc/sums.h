// Sums of a row in the order of torch's CPU kernels, so that a norm has the bits of its eager definition.
//
// torch adds in vectors of 32 bytes, four at a time (128 bytes: PARTS registers here, whatever their width), and
// in levels: after 2^power blocks the lowest level is added to the next, which keeps the error of long rows small.
// Since the order is written down here, not left to the width of the machine, AVX2 and AVX-512 give the same bits.
#pragma once

#include "lot.h"

namespace normwise::NW_ISA {

NW_INLINE int64_t ceil_log2(int64_t n) { return n <= 2 ? 1 : 64 - __builtin_clzll((uint64_t)(n - 1)); }

// -- vectors of 32 bytes, as torch's are -----------------------------------------------------------------

template <class A>
struct Wide;
template <>
struct Wide<float> {
  typedef float Type __attribute__((vector_size(32)));
  typedef int32_t Places __attribute__((vector_size(32)));
};
template <>
struct Wide<double> {
  typedef double Type __attribute__((vector_size(32)));
  typedef int64_t Places __attribute__((vector_size(32)));
};
template <class A>
using W = typename Wide<A>::Type;
template <class A>
constexpr int64_t WIDTH = 32 / sizeof(A);

// Turns as many vectors as each has lanes: lane r of vector i was lane i of vector r.
template <class A>
NW_INLINE void turn(W<A>* v) {
  using P = typename Wide<A>::Places;
  const auto step = [v](int apart, P first, P second) NW_ALWAYS {
    _Pragma("GCC unroll 8") for (int i = 0; i < WIDTH<A>; ++i) {
      if (i & apart) continue;
      const W<A> a = v[i], b = v[i + apart];
      v[i] = __builtin_shuffle(a, b, first), v[i + apart] = __builtin_shuffle(a, b, second);
    }
  };
  if constexpr (WIDTH<A> == 8) {
    step(1, P{0, 8, 2, 10, 4, 12, 6, 14}, P{1, 9, 3, 11, 5, 13, 7, 15});
    step(2, P{0, 1, 8, 9, 4, 5, 12, 13}, P{2, 3, 10, 11, 6, 7, 14, 15});
    step(4, P{0, 1, 2, 3, 8, 9, 10, 11}, P{4, 5, 6, 7, 12, 13, 14, 15});
  } else {
    step(1, P{0, 4, 2, 6}, P{1, 5, 3, 7});
    step(2, P{0, 1, 4, 5}, P{2, 3, 6, 7});
  }
}

// -- sums in levels -------------------------------------------------------------------------------------

// What is left of a row of whole blocks: torch's four vectors added up. Its lanes are then added one after the other,
// at places that lane_place tells.
template <class A, bool PAIRED>
NW_INLINE W<A> four_vectors(const A* stored) {
  typedef A Half __attribute__((vector_size(16)));  // as many lanes as lie side by side in rows read in pairs
  Half halves[2];
  _Pragma("GCC unroll 2") for (int half = 0; half < 2; ++half) {
    _Pragma("GCC unroll 4") for (int64_t row = 0; row < 4; ++row) {
      const int64_t from = PAIRED ? position(row * WIDTH<A> + half, BLOCK<A>, true) : (2 * row + half) * WIDTH<A> / 2;
      Half next;
      memcpy(&next, stored + from, sizeof next);
      halves[half] = row == 0 ? next : halves[half] + next;
    }
  }
  W<A> lanes;
  memcpy(&lanes, halves, sizeof lanes);
  return lanes;
}
template <class A, bool PAIRED>
constexpr int64_t lane_place(int64_t lane) {
  return PAIRED ? lane % 2 * WIDTH<A> / 2 + lane / 2 : lane;
}

// The sums of two rows.
template <class A>
struct Two {
  Lot<A> row[2];
};
template <class A>
NW_INLINE Two<A> operator+(Two<A> a, Two<A> b) {
  return {a.row[0] + b.row[0], a.row[1] + b.row[1]};
}

// The sum over the first `blocks` blocks of a row, where add(sum, place) is the sum with the terms at that place.
template <class A, bool PAIRED, class S, class Add>
NW_INLINE S sum_of_blocks(int64_t blocks, Add add) {
  constexpr int LEVELS = 4;
  const int64_t power = most(4, ceil_log2(blocks) / LEVELS), step = (int64_t)1 << power, mask = step - 1;
  const int64_t whole = blocks & ~mask;
  S rest{}, first{}, second{}, third{};  // variables, not an array, which would be cleared in memory
  int64_t block = 0;
  while (block < whole) {
    S low{};
    for (const int64_t end = block + step; block < end; ++block) low = add(low, Block<PAIRED>{block * BLOCK<A>});
    first = first + low;
    if (block & (mask << power)) continue;
    second = second + first, first = S{};
    if (block & (mask << 2 * power)) continue;
    third = third + second, second = S{};
  }
  for (; block < blocks; ++block) rest = add(rest, Block<PAIRED>{block * BLOCK<A>});
  if (whole > 0) rest = ((rest + first) + second) + third;  // without whole steps these are +0, and no sum is -0
  return rest;
}

// The sum over a row of n, where add(sum, place) is the sum with the term at that place.
template <class A, bool PAIRED, class Add>
NW_INLINE A cascade(int64_t n, Add add) {
  if (n < WIDTH<A>) {  // torch adds such rows one by one, in four sums
    A part[4] = {0, 0, 0, 0};
    int64_t i = 0;
    if (n >= 4)
      for (; i < 4; ++i) part[i] = add((A)0, One{i});
    for (; i < n; ++i) part[0] = add(part[0], One{i});
    return ((part[0] + part[1]) + part[2]) + part[3];
  }
  const int64_t blocks = n / BLOCK<A>;
  const Lot<A> rest = sum_of_blocks<A, PAIRED, Lot<A>>(blocks, add);
  A stored[BLOCK<A>], sum = 0;
  memcpy(stored, rest.v, sizeof stored);
  if (n % BLOCK<A> == 0) {
    const W<A> lanes = four_vectors<A, PAIRED>(stored);
    _Pragma("GCC unroll 8") for (int64_t lane = 0; lane < WIDTH<A>; ++lane) sum += lanes[lane_place<A, PAIRED>(lane)];
    return sum;
  }
  A part[BLOCK<A>];
  _Pragma("GCC unroll 32") for (int64_t i = 0; i < BLOCK<A>; ++i) part[i] = stored[position(i, BLOCK<A>, PAIRED)];
  int64_t i = blocks * BLOCK<A>;
  for (; i + WIDTH<A> <= n; i += WIDTH<A>)
    for (int64_t lane = 0; lane < WIDTH<A>; ++lane) part[lane] = add(part[lane], One{i + lane});
  for (int64_t row = 1; row < 4; ++row)
    for (int64_t lane = 0; lane < WIDTH<A>; ++lane) part[lane] += part[row * WIDTH<A> + lane];
  for (; i < n; ++i) sum = add(sum, One{i});
  for (int64_t lane = 0; lane < WIDTH<A>; ++lane) sum += part[lane];
  return sum;
}

// The sum of term(place) over a row of n.
template <class A, bool PAIRED, class Term>
NW_INLINE A cascade_sum(int64_t n, Term term) {
  return cascade<A, PAIRED>(n, [&](auto sum, auto at) NW_ALWAYS { return sum + term(at); });
}

// A sum of squares with the one at a place. The square of a half-precision number is exact in float32, so that
// multiplying and adding in one instruction gives the same bits there.
template <class S, class T, class Place>
NW_INLINE S add_square(S sum, const T* x, Place at) {
  const auto v = read(x, at);
  if constexpr (sizeof(T) == 2)
    return fma(v, v, sum);
  else
    return sum + v * v;
}

template <class T, bool PAIRED>
NW_INLINE Acc<T> sum_of_squares(const T* x, int64_t n) {
  return cascade<Acc<T>, PAIRED>(n, [&](auto sum, auto at) NW_ALWAYS { return add_square(sum, x, at); });
}

// The same of as many rows as there are lanes, each in a lane of its own, whose last additions are thus made together.
// Of rows of whole blocks.
template <class T, bool PAIRED>
NW_INLINE W<Acc<T>> sums_of_squares(const T* x, int64_t stride, int64_t n) {
  using A = Acc<T>;
  W<A> rows[WIDTH<A>];
  for (int64_t row = 0; row < WIDTH<A>; row += 2) {  // two at once: one alone waits for its own additions
    const T *const one = x + row * stride, *const other = one + stride;
    const Two<A> rest = sum_of_blocks<A, PAIRED, Two<A>>(n / BLOCK<A>, [&](Two<A> sum, auto at) NW_ALWAYS {
      return Two<A>{add_square(sum.row[0], one, at), add_square(sum.row[1], other, at)};
    });
    _Pragma("GCC unroll 2") for (int each = 0; each < 2; ++each) {
      A stored[BLOCK<A>];
      memcpy(stored, rest.row[each].v, sizeof stored);
      rows[row + each] = four_vectors<A, PAIRED>(stored);
    }
  }
  turn<A>(rows);
  W<A> sum{};
  _Pragma("GCC unroll 8") for (int64_t lane = 0; lane < WIDTH<A>; ++lane)
    sum = sum + rows[lane_place<A, PAIRED>(lane)];
  return sum;
}

}  // namespace normwise::NW_ISA
