// Gated RMSNorm: N(x * act(z)) and N(x) * act(z), act silu or sigmoid, over groups of contiguous elements.
//
// act(z), which costs more than all the rest, is computed once for each element and pass, into scratch memory that
// stays in the cache. Every element goes through the same vector code, wherever in its row it
// stands, so a row has the same bits in any batch.
#pragma once

#include "exp.h"
#include "gated_table.h"
#include "isa.h"
#include "rows_back.h"

namespace normwise::NW_ISA {

// The first `count` numbers at p, and zeros.
template <class T>
NW_INLINE V<Acc<T>> load_some(const T* p, int64_t count) {
  T some[LANES<Acc<T>>] = {};
  memcpy(some, p, count * sizeof(T));
  return load(some);
}

// value = act(z), slope = act'(z); the scratch rows hold a whole number of vectors.
template <class T, bool SIGMOID_GATE, bool SLOPE>
NW_APART void activate(const T* z, Acc<T>* value, Acc<T>* slope, int64_t n) {
  using A = Acc<T>;
  for (int64_t i = 0; i < n; i += LANES<A>) {
    const V<A> v = i + LANES<A> <= n ? load(z + i) : load_some(z + i, n - i);
    const V<A> e = exponential(-v), divisor = e + (A)1;
    if constexpr (SLOPE) {
      const V<A> s = (A)1 / divisor, act = SIGMOID_GATE ? s : v * s;
      // 1 - s, which loses all digits where s is near 1; where e is infinite s is 0, and so is the slope
      const V<A> rest = (e > Exp<A>::LARGEST ? splat(Exp<A>::LARGEST) : e) * s;
      store(value + i, act);
      store(slope + i, SIGMOID_GATE ? s * rest : fma(act, rest, s));
    } else {
      store(value + i, (SIGMOID_GATE ? splat((A)1) : v) / divisor);
    }
  }
}

template <class T, bool SLOPE>
NW_INLINE void activate_any(const T* z, Acc<T>* value, Acc<T>* slope, int64_t n, int64_t code) {
  if (code & SIGMOID) return activate<T, true, SLOPE>(z, value, slope, n);
  return activate<T, false, SLOPE>(z, value, slope, n);
}

template <class A>
NW_INLINE int64_t scratch_size(int64_t n) {
  return (n + LANES<A> - 1) / LANES<A> * LANES<A>;
}

// -- forward ------------------------------------------------------------------------------------------

enum Rounding { ONCE, BEFORE_GAIN, AFTER_GAIN_TOO };

constexpr int64_t TILE = 512;  // act(z) of so many elements is made at once, and used while it is in the L1 cache

// work(from, count) for act(z) of elements [from, from + count), which is then in `act`.
template <class T, class Work>
NW_INLINE void in_tiles(const T* z, Acc<T>* act, int64_t n, int64_t code, Work work) {
  for (int64_t from = 0; from < n; from += TILE) {
    const int64_t count = least(TILE, n - from);
    activate_any<T, false>(z + from, act, nullptr, count, code);
    work(from, count);
  }
}

// The output for h = x * act(z) (FIRST) or x. ROUNDING is to T; `act` has room for a tile.
template <class T, class Out, bool FIRST, int ROUNDING, class H>
NW_INLINE void apply_gated(
    const H* h, const T* z, Acc<T>* act, Out* y, const Acc<T>* gain, int64_t n, Acc<T> rstd, int64_t code) {
  const auto work = [&](int64_t from, int64_t count) NW_ALWAYS {
    along<Acc<T>, false>(count, [&](auto at) NW_ALWAYS {
      auto v = read(h + from, at) * rstd;
      if constexpr (ROUNDING != ONCE) v = rounded(v, T{});
      v = v * read(gain + from, at);
      if constexpr (ROUNDING == AFTER_GAIN_TOO) v = rounded(v, T{});
      if constexpr (!FIRST) v = v * read(act, at);
      write(y + from, at, v);
    });
  };
  if constexpr (FIRST)
    work(0, n);
  else
    in_tiles(z, act, n, code, work);
}

// Groups that are too large for their squares: multiplied by an exact power of two first. Returns the rstd of the
// group as it came.
template <class T, class Out, bool FIRST, int ROUNDING, class H>
NW_APART Acc<T> gate_large_group(
    const H* h, const T* z, Acc<T>* act, Out* y, const Acc<T>* gain, int64_t n, Acc<T> statistic, Acc<T> eps,
    int64_t code) {
  using A = Acc<T>;
  A* row = new A[n];
  for (int64_t i = 0; i < n; ++i) row[i] = load1(h + i);
  A mean = 0;
  const A power = scale_large(row, n, RMS, mean, statistic);
  const A rstd = (A)1 / root(statistic + eps);
  apply_gated<T, Out, FIRST, ROUNDING>(row, z, act, y, gain, n, rstd, code);
  delete[] row;
  return rstd * power;
}

template <class T, class Out, bool FIRST, int ROUNDING>
void gated_rows(const GatedForward& a, int64_t begin, int64_t end) {
  using A = Acc<T>;
  const int64_t n = a.size;
  A* scratch = new A[TILE + (FIRST ? n : 0)];
  A *act = scratch, *product = scratch + TILE;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t group = 0; group < a.groups; ++group) {
      const T *x = (const T*)a.x + row * a.x_stride + group * n, *z = (const T*)a.z + row * a.z_stride + group * n;
      Out* y = (Out*)a.y + (row * a.groups + group) * n;
      const A* gain = (const A*)a.gain + group * n;
      const auto norm = [&](auto* h, auto found) NW_ALWAYS {
        if (__builtin_expect(found.large, 0))
          return gate_large_group<T, Out, FIRST, ROUNDING>(h, z, act, y, gain, n, found.statistic, (A)a.eps, a.code);
        const A rstd = (A)1 / root(found.statistic + (A)a.eps);
        apply_gated<T, Out, FIRST, ROUNDING>(h, z, act, y, gain, n, rstd, a.code);
        return rstd;
      };
      A rstd;
      if constexpr (FIRST) {
        in_tiles(z, act, n, a.code, [&](int64_t from, int64_t count) NW_ALWAYS {
          along<A, false>(count, [&](auto at) NW_ALWAYS { write(product + from, at, read(x + from, at) * read(act, at)); });
        });
        rstd = norm(product, measure<A, false>(product, n, RMS));
      } else {
        rstd = norm(x, measure<T, __is_same(T, Bf16)>(x, n, RMS));
      }
      if (a.rstd) ((A*)a.rstd)[row * a.groups + group] = rstd;
    }
  }
  delete[] scratch;
}

template <class T, class Out>
void gated_forward(const GatedForward& a, int64_t begin, int64_t end) {
  constexpr bool HALF = sizeof(T) == 2;  // elsewhere there is nothing to round
  const bool round = HALF && (a.code & ROUND_BEFORE_WEIGHT);
  if (a.code & GATE_FIRST)
    return round ? gated_rows<T, Out, true, HALF ? BEFORE_GAIN : ONCE>(a, begin, end)
                 : gated_rows<T, Out, true, ONCE>(a, begin, end);
  if (round && (a.code & ROUND_PRODUCT)) return gated_rows<T, Out, false, HALF ? AFTER_GAIN_TOO : ONCE>(a, begin, end);
  return round ? gated_rows<T, Out, false, HALF ? BEFORE_GAIN : ONCE>(a, begin, end)
               : gated_rows<T, Out, false, ONCE>(a, begin, end);
}

// -- backward -----------------------------------------------------------------------------------------

// N(x * act(z)): with h = x * act(z), g = dy * gain and dh = rstd * (g - hhat * mean(g * hhat)),
// dx = dh * act(z) and dz = dh * x * act'(z).
template <class X, class D, bool WEIGHTS>
NW_INLINE void backward_gated_first(
    const D* dy, const X* x, const Acc<X>* act, const Acc<X>* slope, X* dx, X* dz, const Acc<X>* gain, Acc<X>* dgain,
    int64_t n, Acc<X> rstd) {
  using A = Acc<X>;
  Sum<A> dots;
  along<A, false>(n, [&](auto at) NW_ALWAYS {
    const auto d = read(dy, at);
    const auto hat = read(x, at) * read(act, at) * rstd;
    dots.of(at) = fma(d * read(gain, at), hat, dots.of(at));
    if constexpr (WEIGHTS) write(dgain, at, fma(d, hat, read(dgain, at)));
  });
  const A along_hat = -dots.total() / (A)n * rstd;
  along<A, false>(n, [&](auto at) NW_ALWAYS {
    const auto v = read(x, at), gate = read(act, at);
    const auto dh = fma(read(dy, at) * read(gain, at), rstd, v * gate * rstd * along_hat);
    write(dx, at, dh * gate);
    write(dz, at, dh * v * read(slope, at));
  });
}

// N(x) * act(z): with d = dy * act(z) and g = d * gain, dx = rstd * (g - xhat * mean(g * xhat)) and
// dz = dy * gain * xhat * act'(z). g replaces act(z) in the scratch memory.
template <class X, class D, bool WEIGHTS>
NW_INLINE void backward_gated_last(
    const D* dy, const X* x, Acc<X>* act, const Acc<X>* slope, X* dx, X* dz, const Acc<X>* gain, Acc<X>* dgain,
    int64_t n, Acc<X> rstd) {
  using A = Acc<X>;
  Sum<A> dots;
  along<A, false>(n, [&](auto at) NW_ALWAYS {
    const auto upstream = read(dy, at), scale = read(gain, at);
    const auto hat = read(x, at) * rstd;
    write(dz, at, upstream * (hat * scale) * read(slope, at));
    const auto d = upstream * read(act, at), g = d * scale;
    dots.of(at) = fma(g, hat, dots.of(at));
    write(act, at, g);
    if constexpr (WEIGHTS) write(dgain, at, fma(d, hat, read(dgain, at)));
  });
  const A along_hat = -dots.total() / (A)n * rstd;
  along<A, false>(n, [&](auto at) NW_ALWAYS {
    write(dx, at, fma(read(act, at), rstd, read(x, at) * rstd * along_hat));
  });
}

template <class X, class D, bool FIRST, bool WEIGHTS>
void gated_blocks(const GatedBackward& a, int64_t begin, int64_t end) {
  using A = Acc<X>;
  const int64_t n = a.size, width = a.groups * n;
  A* scratch = new A[2 * scratch_size<A>(n) + (WEIGHTS ? width : 0)];
  A *act = scratch, *slope = act + scratch_size<A>(n), *dgains = slope + scratch_size<A>(n);
  for (int64_t block = begin; block < end; ++block) {
    A* sums = (A*)a.parts + block * width;
    if constexpr (WEIGHTS)
      for (int64_t i = 0; i < width; ++i) sums[i] = dgains[i] = 0;
    const int64_t last = (block + 1) * a.rows / a.blocks;
    for (int64_t row = block * a.rows / a.blocks; row < last; ++row) {
      for (int64_t group = 0; group < a.groups; ++group) {
        const int64_t from = group * n, to = row * width + from;
        const D* dy = (const D*)a.dy + row * a.dy_stride + from;
        const X* x = (const X*)a.x + row * a.x_stride + from;
        const A* gain = (const A*)a.gain + from;
        const A rstd = ((const A*)a.rstd)[row * a.groups + group];
        activate_any<X, true>((const X*)a.z + row * a.z_stride + from, act, slope, n, a.code);
        X *dx = (X*)a.dx + to, *dz = (X*)a.dz + to;
        A* dgain = WEIGHTS ? dgains + from : nullptr;
        if constexpr (FIRST)
          backward_gated_first<X, D, WEIGHTS>(dy, x, act, slope, dx, dz, gain, dgain, n, rstd);
        else
          backward_gated_last<X, D, WEIGHTS>(dy, x, act, slope, dx, dz, gain, dgain, n, rstd);
      }
      if (WEIGHTS && ((row + 1) % LEVEL == 0 || row + 1 == last)) raise_level(sums, dgains, width);
    }
  }
  delete[] scratch;
}

template <class X, class D>
void gated_backward(const GatedBackward& a, int64_t begin, int64_t end) {
  if (a.code & GATE_FIRST)
    return a.parts ? gated_blocks<X, D, true, true>(a, begin, end) : gated_blocks<X, D, true, false>(a, begin, end);
  return a.parts ? gated_blocks<X, D, false, true>(a, begin, end) : gated_blocks<X, D, false, false>(a, begin, end);
}

template <class A>
void exponentials(const A* from, A* to, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES<A>) {
    const int64_t count = least(n - i, LANES<A>);
    const V<A> e = exponential(load_some(from + i, count));
    memcpy(to + i, &e, count * sizeof(A));
  }
}

}  // namespace normwise::NW_ISA
