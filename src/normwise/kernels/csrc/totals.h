// Totals of vectors and of columns, for norms whose gains belong to channels.
#pragma once

#include "lot.h"
#include "totals_table.h"

namespace normwise::NW_ISA {

// The total of a sum, halves added to halves: a few instructions where lane after lane would be a long chain.
template <class A>
NW_INLINE A total_of(Sum<A> sum) {
  _Pragma("GCC unroll 8") for (int half = PARTS / 2; half > 0; half /= 2)
    for (int k = 0; k < half; ++k) sum.lot.v[k] += sum.lot.v[k + half];
  V<A> v = sum.lot.v[0] + sum.part;
  _Pragma("GCC unroll 8") for (int half = LANES<A> / 2; half > 0; half /= 2) {
    typename Native<A>::Bits turned;
    _Pragma("GCC unroll 16") for (int i = 0; i < LANES<A>; ++i) turned[i] = (i + half) % LANES<A>;
    v += __builtin_shuffle(v, turned);
  }
  return v[0] + sum.one;
}

// out[c] = the sum over rows of parts[row, c], in float64 and in the order of the rows.
template <class T>
void total_columns(const Columns& a, int64_t begin, int64_t end) {
  using A = Acc<T>;
  for (int64_t from = begin * COLUMNS; from < least(end * COLUMNS, a.size); from += COLUMNS) {
    const int64_t n = least(COLUMNS, a.size - from);
    double sums[COLUMNS] = {};
    for (int64_t row = 0; row < a.rows; ++row) {
      const A* part = (const A*)a.parts + row * a.stride + from;
      for (int64_t i = 0; i < n; ++i) sums[i] += part[i];
    }
    for (int64_t i = 0; i < n; ++i) store1((T*)a.out + from + i, (A)sums[i]);
  }
}

}  // namespace normwise::NW_ISA
