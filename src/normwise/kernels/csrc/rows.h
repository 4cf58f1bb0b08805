// Norms of rows: RMSNorm, LayerNorm and ScaleNorm over contiguous elements; their gradients are in rows_back.h.
#pragma once

#include "isa.h"
#include "lot.h"
#include "moments.h"
#include "rows_table.h"
#include "sums.h"

namespace normwise::NW_ISA {

template <class A>
struct Measured {
  A mean;
  A statistic;
  bool large;  // squares or mean so large that the largest element must be looked at
};

template <class A>
NW_INLINE Measured<A> measured(A mean, A squares, int64_t n, int64_t code) {
  const bool safe = squares < Range<A>::SQUARES && magnitude(mean) < Range<A>::MEAN;
  return {mean, (code & KIND) == L2 ? squares : squares / (A)n, !safe};
}

template <class T, bool PAIRED>
NW_APART Measured<Acc<T>> measure(const T* x, int64_t n, int64_t code, Ahead<T> ahead = {}) {
  using A = Acc<T>;
  const int64_t kind = code & KIND;
  A mean = 0, squares;
  if (kind == TORCH_LAYER) {
    const Moments<A> found = torch_moments(x, n, ahead);
    mean = found.mean, squares = found.square;
  } else if (kind == LAYER) {
    mean = cascade_sum<A, PAIRED>(n, [&](auto at) NW_ALWAYS { return read(x, at); }) / (A)n;
    squares = cascade_sum<A, PAIRED>(n, [&](auto at) NW_ALWAYS {
      const auto c = read(x, at) - mean;
      return c * c;
    });
  } else {
    squares = sum_of_squares<T, PAIRED>(x, n);
  }
  return measured(mean, squares, n, code);
}

// The same of as many rows as torch's vectors have lanes, all at once; see can_measure_rows.
template <class T, bool PAIRED>
NW_APART void measure_rows(
    const T* x, int64_t stride, int64_t n, int64_t code, Measured<Acc<T>>* out) {
  using A = Acc<T>;
  Moments<W<A>> found{};
  if ((code & KIND) == TORCH_LAYER)
    found = moments_of_rows(x, stride, n);
  else
    found.square = sums_of_squares<T, PAIRED>(x, stride, n);
  for (int64_t row = 0; row < WIDTH<A>; ++row) out[row] = measured(found.mean[row], found.square[row], n, code);
}

template <class T>
NW_INLINE bool can_measure_rows(int64_t n, int64_t code) {
  return (code & KIND) != LAYER && n % BLOCK<Acc<T>> == 0;
}

template <class A>
NW_INLINE A root_of(A statistic, A eps, int64_t code) {
  switch (code & ROOT) {
    case EPS_OUTSIDE:
      return root(statistic) + eps;
    case EPS_CLAMP: {
      const A r = root(statistic);
      return r > eps ? r : r == r ? eps : r;
    }
    default:
      return root(statistic + eps);
  }
}

// d root / d statistic, times 2 root: 1 where the root is that of statistic + eps.
template <class A>
NW_INLINE A root_share(A rstd, A eps, int64_t code) {
  const A divisor = (A)1 / rstd;
  switch (code & ROOT) {
    case EPS_OUTSIDE:
      return divisor > eps ? divisor / (divisor - eps) : (A)0;
    case EPS_CLAMP:
      return divisor > eps ? (A)1 : (A)0;
    default:
      return 1;
  }
}

// run(weights), with their number known when compiled.
template <class Run>
NW_INLINE void by_weights(int weights, Run run) {
  if (weights == 0) return run(Times<0>{});
  if (weights == 1) return run(Times<1>{});
  run(Times<2>{});
}

// How xhat is made: as torch's layer_norm, by a product with 1 / root, or (x - mean) by a product or a quotient.
enum Quotient { TORCH, PRODUCT, ANY };

// Whether rows of these two types are read in pairs; gain, bias and sums are then laid out in that order.
template <class X, class Y>
constexpr bool PAIRED = __is_same(X, Bf16) && __is_same(Y, Bf16);

// round(quotient) * gain + bias; ROUND rounds to T. TORCH: multiplied out as torch's layer_norm does, which folds the
// mean into an addend in half precision only. `by` is what x - mean is multiplied with, or divided by.
template <class T, int QUOTIENT_KIND, bool ROUND, bool BIAS, class Values>
NW_INLINE Values normalized(Values v, Acc<T> mean, Acc<T> by, bool divide, Values gain, Values bias) {
  if constexpr (QUOTIENT_KIND == TORCH && sizeof(T) == 2)
    v = fma(v, by, -by * mean);
  else if constexpr (QUOTIENT_KIND == PRODUCT)
    v = v * by;
  else if (QUOTIENT_KIND == ANY && divide)
    v = (v - mean) / by;
  else
    v = (v - mean) * by;
  if constexpr (ROUND) v = rounded(v, T{});
  if constexpr (BIAS && QUOTIENT_KIND == TORCH) return fma(v, gain, bias);
  v = v * gain;
  if constexpr (BIAS) v = v + bias;
  return v;
}

template <class T, class Out, int QUOTIENT_KIND, bool ROUND, bool BIAS>
NW_INLINE void apply(
    const T* x, Out* y, const Acc<T>* gain, const Acc<T>* bias, int64_t n, Acc<T> mean, Acc<T> by, bool divide,
    const T* x_ahead, const Out* y_ahead, bool near, bool past) {
  along<Acc<T>, PAIRED<T, Out>>(n, [&](auto at) NW_ALWAYS {
    fetch(x_ahead, at, near);
    if (y_ahead) fetch(y_ahead, at);
    const auto scale = read(gain, at), shift = BIAS ? read(bias, at) : scale;
    write(y, at, normalized<T, QUOTIENT_KIND, ROUND, BIAS>(read(x, at), mean, by, divide, scale, shift), past);
  });
}

// A row of a group.
template <class T, class Out>
struct Line {
  const T* x;
  Out* y;
  Acc<T> mean, by;
  const T* x_ahead;  // what to ask memory for
  const Out* y_ahead;
};

// The same of some rows of a group at once, for which gain and bias are read once. Returns whether they must be written
// again: what was written as 0 may be a number below 2^-126.
template <class T, class Out, int QUOTIENT_KIND, bool ROUND, bool BIAS, int ROWS>
NW_INLINE bool apply_together(const Line<T, Out>* rows, const Acc<T>* gain, const Acc<T>* bias, int64_t n) {
  uint32_t zeros = 0;
  along<Acc<T>, PAIRED<T, Out>>(n, [&](auto at) NW_ALWAYS {
    const auto scale = read(gain, at), shift = BIAS ? read(bias, at) : scale;
    _Pragma("GCC unroll 2") for (int r = 0; r < ROWS; ++r) {
      fetch(rows[r].x_ahead, at);
      fetch(rows[r].y_ahead, at);
      const auto v = read(rows[r].x, at);
      zeros |= write_flushing(
          rows[r].y, at,
          normalized<T, QUOTIENT_KIND, ROUND, BIAS>(v, rows[r].mean, rows[r].by, false, scale, shift));
    }
  });
  return zeros != 0;
}

template <class A>
NW_INLINE A peak_of(const A* x, int64_t n) {
  A peak = 0;
  for (int64_t i = 0; i < n; ++i) {
    const A size = magnitude(x[i]);
    if (!(size <= peak)) peak = size;  // NaN stays
    if (peak != peak) return peak;
  }
  return peak;
}

template <class A>
struct Factors {
  A mean, rstd;  // of the row as it came
};

template <class A>
NW_INLINE void keep(const RowsForward& a, int64_t row, Factors<A> factors) {
  if (a.mean) ((A*)a.mean)[row] = factors.mean;
  if (a.rstd) ((A*)a.rstd)[row] = factors.rstd;
}

// Brings a row with elements of 2^41 and more (2^321 in float64) into range and measures it again. Returns the exact
// power of two that it was multiplied by.
template <class A>
NW_INLINE A scale_large(A* row, int64_t n, int64_t code, A& mean, A& statistic) {
  const A peak = peak_of(row, n);
  if (!(peak < __builtin_huge_val())) {  // infinity or NaN: nothing of the row is known
    statistic = __builtin_nan("");
    return 1;
  }
  const int exponent = __builtin_ilogb(peak);
  if (exponent <= Range<A>::LARGE) return 1;
  const A power = (A)__builtin_ldexp(1.0, Range<A>::LARGE - exponent);
  for (int64_t i = 0; i < n; ++i) row[i] *= power;
  const Measured<A> found = measure<A, false>(row, n, code);
  mean = found.mean, statistic = found.statistic;
  return power;
}

// Such rows are rare, so one copy of this code, element by element, serves every case.
template <class T, class Out>
NW_APART Factors<Acc<T>> norm_large_row(const T* x, Out* y, const RowsForward& a, Acc<T> mean, Acc<T> statistic) {
  using A = Acc<T>;
  A* row = new A[a.size];
  for (int64_t i = 0; i < a.size; ++i) row[i] = load1(x + i);
  const A power = scale_large(row, a.size, a.code, mean, statistic);
  const A divisor = root_of(statistic, (A)a.eps, a.code), rstd = (A)1 / divisor;
  const A *gain = (const A*)a.gain, *bias = (const A*)a.bias;
  for (int64_t i = 0; i < a.size; ++i) {
    A v = row[i] - mean;
    v = a.code & DIVIDE ? v / divisor : v * rstd;
    if (a.code & ROUND_BEFORE_WEIGHT) v = rounded(v, T{});
    const int64_t at = position(i, a.size, PAIRED<T, Out>);
    store1(y + i, bias ? v * gain[at] + bias[at] : v * gain[at]);
  }
  delete[] row;
  return {mean / power, rstd * power};
}

constexpr int64_t SHORT = 2048;  // bytes
static_assert(SHORT <= FEW_CHUNKS * 16 * 32, "moments_of_rows takes so many chunks of 16 vectors of 32 bytes");

// Up to how many bytes a row is normalized in a group. Longer rows take so long to write that there is nothing to gain;
// it is more where they are rounded in one instruction, and less where a sum of squares waits for memory alone.
template <class T, class Out, int QUOTIENT_KIND>
constexpr int64_t GROUPED = FLUSHING && PAIRED<T, Out>                   ? SHORT
                            : QUOTIENT_KIND == PRODUCT && sizeof(T) > 2 ? SHORT / 8
                                                                        : SHORT / 2;

// Short rows in groups: the last additions of all their sums are made at once, and gain and bias are read once for two
// rows where there are registers for it. The memory of the next group is asked for while this one is written. Returns
// the first row that is left.
template <class T, class Out, int QUOTIENT_KIND, bool ROUND, bool BIAS>
NW_APART int64_t forward_groups(const RowsForward& a, int64_t begin, int64_t end) {
  using A = Acc<T>;
  constexpr int64_t GROUP = WIDTH<A>, TOGETHER = NW_BYTES > 32 ? 2 : 1;
  constexpr bool QUICK = FLUSHING && PAIRED<T, Out>;
  const int64_t bytes = a.size * sizeof(T);
  if (NW_BYTES == 16 || QUOTIENT_KIND == ANY || a.stream || bytes > GROUPED<T, Out, QUOTIENT_KIND> ||
      !can_measure_rows<T>(a.size, a.code))
    return begin;
  const A *const gain = (const A*)a.gain, *const bias = (const A*)a.bias;
  const auto row_at = [&](int64_t row) NW_ALWAYS { return (const T*)a.x + row * a.x_stride; };
  const auto out_at = [&](int64_t row) NW_ALWAYS { return (Out*)a.y + row * a.size; };
  for (; begin + GROUP <= end; begin += GROUP) {
    Measured<A> found[GROUP];
    Line<T, Out> lines[GROUP];
    measure_rows<T, __is_same(T, Bf16)>(row_at(begin), a.x_stride, a.size, a.code, found);
    for (int64_t r = 0; r < GROUP; ++r) {
      const int64_t row = begin + r, next = least(row + GROUP, a.rows - 1);
      if (bytes > SHORT / 8) {
        const int64_t later = least(row + 2 * GROUP, a.rows - 1);
        look_up(row_at(later), a.size), look_up(out_at(later), a.size);
      }
      const A rstd = (A)1 / root_of(found[r].statistic, (A)a.eps, a.code);
      keep(a, row, Factors<A>{found[r].mean, rstd});
      lines[r] = {row_at(row), out_at(row), found[r].mean, rstd, row_at(next), out_at(next)};
    }
    bool exactly = false;
    for (int64_t r = 0; r < GROUP; r += TOGETHER) {
      Line<T, Out> some[TOGETHER];  // copies, so that they stay in registers
      for (int64_t each = 0; each < TOGETHER; ++each) some[each] = lines[r + each];
      if (!exactly)
        exactly = apply_together<T, Out, QUOTIENT_KIND, ROUND, BIAS, TOGETHER>(some, gain, bias, a.size);
      if (QUICK && exactly)  // so the rest of the group: rows that hold zeros are often neighbours
        for (const Line<T, Out>& row : some)
          apply<T, Out, QUOTIENT_KIND, ROUND, BIAS>(
              row.x, row.y, gain, bias, a.size, row.mean, row.by, false, row.x_ahead, nullptr, false, false);
    }
    for (int64_t r = 0; r < GROUP; ++r)
      if (__builtin_expect(found[r].large, 0))
        keep(a, begin + r, norm_large_row(lines[r].x, lines[r].y, a, found[r].mean, found[r].statistic));
  }
  return begin;
}

template <class T, class Out, int QUOTIENT_KIND, bool ROUND, bool BIAS>
void forward_rows(const RowsForward& a, int64_t begin, int64_t end) {
  using A = Acc<T>;
  begin = forward_groups<T, Out, QUOTIENT_KIND, ROUND, BIAS>(a, begin, end);
  if (begin == end) return;
  const auto row_at = [&](int64_t row) NW_ALWAYS { return (const T*)a.x + row * a.x_stride; };
  const auto out_at = [&](int64_t row) NW_ALWAYS { return (Out*)a.y + row * a.size; };
  const int64_t bytes = a.size * sizeof(T);
  const bool lead = bytes <= SHORT;
  // Torch's recurrence reads a row in several places at once, which no prefetcher sees through: it asks for the next
  // row itself, or, of bfloat16, has short rows brought near beforehand. All rows come from memory two rows before.
  const bool near = QUOTIENT_KIND == TORCH && __is_same(T, Bf16) && lead;
  const int64_t distance = 1 + lead + (QUOTIENT_KIND == TORCH);
  // What is written is asked for, too, unless the sum of squares of a row leaves memory no time for it.
  const bool asks = !a.stream && (QUOTIENT_KIND != PRODUCT || bytes > PAGE), looks = bytes > SHORT / 2;
  const auto measured = [&](int64_t row) NW_ALWAYS {
    return measure<T, __is_same(T, Bf16)>(
        row_at(row), a.size, a.code, {near ? nullptr : row_at(least(row + 1, a.rows - 1)), lead});
  };
  // The next short row is measured before this one is multiplied: the last additions, the root and the division take
  // as long as such a row, and the processor fills that time with the products. Two long rows would not fit its
  // first-level cache beside gain and bias.
  Measured<A> next = measured(begin);
  for (int64_t row = begin; row < end; ++row) {
    const Measured<A> found = lead || row == begin ? next : measured(row);
    const A divisor = root_of(found.statistic, (A)a.eps, a.code), rstd = (A)1 / divisor;
    const bool divide = QUOTIENT_KIND == ANY && (a.code & DIVIDE);
    if (lead && row + 1 < end) next = measured(row + 1);
    const T* x = row_at(row);
    Out* y = out_at(row);
    if (looks) look_up(row_at(least(row + distance + 1, a.rows - 1)), a.size);
    if (looks && !a.stream) look_up(out_at(least(row + 2, a.rows - 1)), a.size);
    Factors<A> factors{found.mean, rstd};
    if (__builtin_expect(found.large, 0))
      factors = norm_large_row(x, y, a, found.mean, found.statistic);
    else
      apply<T, Out, QUOTIENT_KIND, ROUND, BIAS>(
          x, y, (const A*)a.gain, (const A*)a.bias, a.size, found.mean, divide ? divisor : rstd, divide,
          row_at(least(row + distance, a.rows - 1)), asks ? out_at(least(row + 1, a.rows - 1)) : nullptr, near, a.stream);
    keep(a, row, factors);
  }
  if (a.stream) stream_end();
}

template <class T, class Out, int QUOTIENT_KIND>
NW_INLINE void forward_any(const RowsForward& a, int64_t begin, int64_t end) {
  constexpr bool HALF = sizeof(T) == 2;  // elsewhere there is nothing to round
  if (HALF && (a.code & ROUND_BEFORE_WEIGHT))
    return a.bias ? forward_rows<T, Out, QUOTIENT_KIND, HALF, true>(a, begin, end)
                  : forward_rows<T, Out, QUOTIENT_KIND, HALF, false>(a, begin, end);
  return a.bias ? forward_rows<T, Out, QUOTIENT_KIND, false, true>(a, begin, end)
                : forward_rows<T, Out, QUOTIENT_KIND, false, false>(a, begin, end);
}

template <class T, class Out>
void rows_forward(const RowsForward& a, int64_t begin, int64_t end) {
  if ((a.code & KIND) == TORCH_LAYER) return forward_any<T, Out, TORCH>(a, begin, end);
  if (centers(a.code) || (a.code & DIVIDE)) return forward_any<T, Out, ANY>(a, begin, end);
  return forward_any<T, Out, PRODUCT>(a, begin, end);
}

template <class X, class R, class S>
void add_rows(const AddRows& a, int64_t begin, int64_t end) {
  using A = Acc<S>;
  const auto x_at = [&](int64_t row) NW_ALWAYS { return (const X*)a.x + row * a.x_stride; };
  const auto residual_at = [&](int64_t row) NW_ALWAYS { return (const R*)a.residual + row * a.residual_stride; };
  const auto sum_at = [&](int64_t row) NW_ALWAYS { return (S*)a.sum + row * a.size; };
  for (int64_t row = begin; row < end; ++row) {
    const int64_t next = least(row + a.ahead, a.rows - 1), later = least(row + 2 * a.ahead, a.rows - 1);
    look_up(x_at(later), a.size), look_up(residual_at(later), a.size), look_up(sum_at(later), a.size);
    const X *const x = x_at(row), *const x_ahead = x_at(next);
    const R *const residual = residual_at(row), *const residual_ahead = residual_at(next);
    S *const sum = sum_at(row), *const sum_ahead = sum_at(next);
    along<A, __is_same(X, Bf16) && __is_same(R, Bf16) && __is_same(S, Bf16)>(a.size, [&](auto at) NW_ALWAYS {
      fetch(x_ahead, at), fetch(residual_ahead, at), fetch(sum_ahead, at);
      write(sum, at, read(x, at) + read(residual, at));
    });
  }
}

}  // namespace normwise::NW_ISA
