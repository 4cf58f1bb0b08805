// One loop body for blocks of 128 bytes, for single vectors and for single elements.
//
// A body is a generic lambda over a place: `read` gives it a Lot (32 floats in PARTS registers), a vector or a
// number, and the arithmetic is spelled the same. `along` walks a row: blocks first, then what is left.
//
// Bfloat16 is read in pairs where all tensors of a loop are bfloat16: of each 32-bit word the lower element goes to
// one register and the upper to the next, by a shift and a mask, where natural order needs two shuffles more on each
// way. Vectors of float32 that go with such rows (gain, bias, sums) are laid out in the same order: `position`.
#pragma once

#include "vec.h"

namespace normwise::NW_ISA {

template <class A>
struct Lot {
  V<A> v[PARTS];
};

#define NW_EACH _Pragma("GCC unroll 8") for (int k = 0; k < PARTS; ++k)

#define NW_OPERATOR(OP)                              \
  template <class A>                                 \
  NW_INLINE Lot<A> operator OP(Lot<A> a, Lot<A> b) { \
    NW_EACH a.v[k] = a.v[k] OP b.v[k];               \
    return a;                                        \
  }                                                  \
  template <class A>                                 \
  NW_INLINE Lot<A> operator OP(Lot<A> a, A b) {      \
    NW_EACH a.v[k] = a.v[k] OP b;                    \
    return a;                                        \
  }
NW_OPERATOR(+)
NW_OPERATOR(-)
NW_OPERATOR(*)
NW_OPERATOR(/)
#undef NW_OPERATOR

template <class A>
NW_INLINE Lot<A> fma(Lot<A> a, Lot<A> b, Lot<A> c) {
  NW_EACH c.v[k] = fma(a.v[k], b.v[k], c.v[k]);
  return c;
}
template <class A>
NW_INLINE Lot<A> fma(Lot<A> a, A b, Lot<A> c) {
  NW_EACH c.v[k] = fma(a.v[k], splat(b), c.v[k]);
  return c;
}
template <class A>
NW_INLINE Lot<A> fma(Lot<A> a, A b, A c) {
  NW_EACH a.v[k] = fma(a.v[k], splat(b), splat(c));
  return a;
}
NW_INLINE F32 fma(F32 a, float b, F32 c) { return fma(a, splat(b), c); }
NW_INLINE F32 fma(F32 a, float b, float c) { return fma(a, splat(b), splat(c)); }
NW_INLINE V<double> fma(V<double> a, double b, V<double> c) { return fma(a, splat(b), c); }
NW_INLINE V<double> fma(V<double> a, double b, double c) { return fma(a, splat(b), splat(c)); }

template <class A, class T>
NW_INLINE Lot<A> rounded(Lot<A> a, T t) {
  NW_EACH a.v[k] = rounded(a.v[k], t);
  return a;
}

// A number known when compiled, as an argument.
template <int N>
struct Times {
  static constexpr int VALUE = N;
};

// -- places ----------------------------------------------------------------------------------------

template <bool PAIRED>
struct Block {
  int64_t i;
};
struct Part {
  int64_t i;
};
struct One {
  int64_t i;
};

template <bool PAIRED, class T>
NW_INLINE Lot<Acc<T>> read(const T* p, Block<PAIRED> at) {
  using A = Acc<T>;
  Lot<A> lot;
  if constexpr (PAIRED && __is_same(T, Bf16)) {
    NW_EACH if (k % 2 == 0) {
      U32 pairs;
      memcpy(&pairs, p + at.i + k * LANES<A>, sizeof pairs);
#if NW_BYTES == 64
      asm("" : "+v"(pairs));  // GCC would load it twice, and loads of 64 bytes are scarce
#endif
      lot.v[k] = (F32)(pairs << 16);
      lot.v[k + 1] = (F32)(pairs & 0xffff0000u);
    }
  } else {
    NW_EACH lot.v[k] = load(p + at.i + k * LANES<A>);
  }
  return lot;
}
template <class T>
NW_INLINE V<Acc<T>> read(const T* p, Part at) {
  return load(p + at.i);
}
template <class T>
NW_INLINE Acc<T> read(const T* p, One at) {
  return load1(p + at.i);
}

// Asks for the memory of a place before it is needed, into the second-level cache: rows to come would push what is in
// use out of the first, unless they are short (`near`).
template <bool PAIRED, class T>
NW_INLINE void fetch(const T* p, Block<PAIRED> at, bool near = false) {
  _Pragma("GCC unroll 2") for (uint64_t byte = 0; byte < BLOCK<Acc<T>> * sizeof(T); byte += 64) {
    const char* line = (const char*)(p + at.i) + byte;
    near ? __builtin_prefetch(line, 0, 3) : __builtin_prefetch(line, 0, 2);
  }
}
template <class T>
NW_INLINE void fetch(const T*, Part, bool = false) {}
template <class T>
NW_INLINE void fetch(const T*, One, bool = false) {}

// Asks for the first line of each page that begins in a row to come. What is asked for into the second-level cache is
// dropped where the processor does not know the page (seen on an EPYC 9004); into the first-level cache it is looked up.
constexpr int64_t PAGE = 4096;
template <class T>
NW_INLINE void look_up(const T* row, int64_t n) {
  for (int64_t byte = -(uintptr_t)row % PAGE; byte < n * (int64_t)sizeof(T); byte += PAGE)
    __builtin_prefetch((const char*)row + byte, 0, 3);
}

// The same of memory that is read or written on and on: of the pages that begin in the n elements from here on, each
// a page early.
template <class T>
NW_INLINE void look_up_next(const T* p, int64_t n) {
  look_up(p + PAGE / sizeof(T), n);
}

// `past`: past the cache, see store_past; p is then a multiple of 64 bytes.
template <bool PAIRED, class T>
NW_INLINE void write(T* p, Block<PAIRED> at, Lot<Acc<T>> lot, bool past = false) {
  using A = Acc<T>;
  constexpr int EACH = PAIRED && __is_same(T, Bf16) ? 2 : 1;
  NW_EACH if (k % EACH == 0) {
    const auto v = [&]() NW_ALWAYS {
      if constexpr (EACH == 2)
        // no NaN here carries a payload in its lower half: all inputs are bfloat16, see widen_weight
        return narrow_pairs(lot.v[k], lot.v[k + 1]);
      else if constexpr (sizeof(T) == sizeof(A))
        return lot.v[k];
      else
        return narrow(lot.v[k], T{});
    }();
    T* to = p + at.i + k * LANES<A>;
    if (past)
      store_past(to, v);
    else
      memcpy(to, &v, sizeof v);
  }
}
template <class T>
NW_INLINE void write(T* p, Part at, V<Acc<T>> v, bool = false) {
  store(p + at.i, v);
}
template <class T>
NW_INLINE void write(T* p, One at, Acc<T> a, bool = false) {
  store1(p + at.i, a);
}

// Writes pairs of bfloat16 where numbers below 2^-126 become 0, and returns whether any 0 was written; elsewhere as
// `write`, and never.
template <bool PAIRED, class T>
NW_INLINE uint32_t write_flushing(T* p, Block<PAIRED> at, Lot<Acc<T>> lot) {
  uint32_t zeros = 0;
  if constexpr (FLUSHING && PAIRED && __is_same(T, Bf16)) {
    NW_EACH if (k % 2 == 0) {
      const U32 pairs = narrow_pairs_flushing(lot.v[k], lot.v[k + 1]);
      zeros |= zeros_in_pairs(pairs);
      memcpy(p + at.i + k * LANES<float>, &pairs, sizeof pairs);
    }
  } else {
    write(p, at, lot);
  }
  return zeros;
}
template <class T, class Place, class Value>
NW_INLINE uint32_t write_flushing(T* p, Place at, Value v) {
  write(p, at, v);
  return 0;
}

// body(place) over a row of n elements.
template <class A, bool PAIRED, class Body>
NW_INLINE void along(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + BLOCK<A> <= n; i += BLOCK<A>) body(Block<PAIRED>{i});
  for (; i + LANES<A> <= n; i += LANES<A>) body(Part{i});
  for (; i < n; ++i) body(One{i});
}

// Where element i of a row of n stands in a vector that goes with rows read in pairs.
NW_INLINE int64_t position(int64_t i, int64_t n, bool paired) {
  constexpr int64_t LANE = LANES<float>;
  if (!paired || i / BLOCK<float> >= n / BLOCK<float>) return i;
  const int64_t within = i % (2 * LANE);
  return i - within + (within % 2) * LANE + within / 2;
}

// A sum kept in as many registers as the loop body needs, and their total.
template <class A>
struct Sum {
  Lot<A> lot{};
  V<A> part{};
  A one = 0;
  template <bool PAIRED>
  Lot<A>& of(Block<PAIRED>) {
    return lot;
  }
  V<A>& of(Part) { return part; }
  A& of(One) { return one; }
  A total() const {
    V<A> v = part;
    NW_EACH v += lot.v[k];
    A sum = one;
    for (int i = 0; i < LANES<A>; ++i) sum += v[i];
    return sum;
  }
};

}  // namespace normwise::NW_ISA
