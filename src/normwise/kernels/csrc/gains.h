// Gains as the kernels of rows and batches want them, and the last additions of their gradients.
#pragma once

#include "lot.h"
#include "rows_table.h"

namespace normwise::NW_ISA {

// What writes pairs relies on NaN without a payload in its lower half.
template <class A>
NW_INLINE Lot<A> plain_nan(Lot<A> a) {
  NW_EACH {
    const auto number = a.v[k] == a.v[k];
    a.v[k] = (V<A>)((number & (decltype(number))a.v[k]) | (~number & (decltype(number))splat((A)__builtin_nan(""))));
  }
  return a;
}
template <class V>
NW_INLINE V plain_nan(V v) {
  return v;  // what is left of a row is not read in pairs
}

template <class T>
void widen_weight(const Widen& a) {
  using A = Acc<T>;
  const T* from = (const T*)a.from;
  A* to = (A*)a.to;
  const auto shifted = [&](auto value) NW_ALWAYS {
    if (a.offset == 0) return value;  // -0 stays -0
    value = value + (A)a.offset;
    return a.round ? rounded(value, T{}) : value;
  };
  if (!from || a.repeat) {
    const A value = from ? shifted(load1(from)) : (A)1;
    for (int64_t i = 0; i < a.size; ++i) to[i] = value == value ? value : (A)__builtin_nan("");
    return;
  }
  const auto copy = [&](auto at) NW_ALWAYS { write(to, at, plain_nan(shifted(read(from, at)))); };
  if constexpr (__is_same(T, Bf16))
    a.paired ? along<A, true>(a.size, copy) : along<A, false>(a.size, copy);
  else if (!a.paired)
    along<A, false>(a.size, copy);
  else  // float32 beside rows of bfloat16
    for (int64_t lot = 0; lot < a.size; lot += BLOCK<A>)
      for (int64_t i = lot; i < least(lot + BLOCK<A>, a.size); ++i) {
        const A value = shifted(load1(from + i));
        to[lot + position(i - lot, least(BLOCK<A>, a.size - lot), true)] = value == value ? value : (A)__builtin_nan("");
      }
}

template <class T>
void merge_parts(const Merge& a, int64_t begin, int64_t end) {
  using A = Acc<T>;
  const A* parts = (const A*)a.parts;
  T* out = (T*)a.out;
  for (int64_t from = begin * BLOCK<A>; from < least(end * BLOCK<A>, a.size); from += BLOCK<A>) {
    const int64_t n = least(BLOCK<A>, a.size - from);
    A sums[BLOCK<A>] = {};
    for (int64_t block = 0; block < a.blocks; ++block)
      for (int64_t i = 0; i < n; ++i) sums[i] += parts[block * a.stride + from + i];
    for (int64_t i = 0; i < n; ++i) store1(out + from + i, sums[position(from + i, a.size, a.paired) - from]);
  }
}

}  // namespace normwise::NW_ISA
