// Norms of rows: RMSNorm, LayerNorm and ScaleNorm over contiguous elements, forward and backward.
#pragma once

#include "isa.h"
#include "lot.h"
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
  return (code & KIND) != LAYER && n % BLOCK<Acc<T>> == 0 && n * (int64_t)sizeof(T) <= FEW_CHUNKS * 16 * 32;
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
      if (a.mean) ((A*)a.mean)[row] = found[r].mean;
      if (a.rstd) ((A*)a.rstd)[row] = rstd;
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
      if (__builtin_expect(found[r].large, 0)) {
        const Factors<A> factors =
            norm_large_row(lines[r].x, lines[r].y, a, found[r].mean, found[r].statistic);
        if (a.mean) ((A*)a.mean)[begin + r] = factors.mean;
        if (a.rstd) ((A*)a.rstd)[begin + r] = factors.rstd;
      }
  }
  return begin;
}

template <class T, class Out, int QUOTIENT_KIND, bool ROUND, bool BIAS>
void forward_rows(const RowsForward& a, int64_t begin, int64_t end) {
  using A = Acc<T>;
  const auto row_at = [&](int64_t row) NW_ALWAYS { return (const T*)a.x + row * a.x_stride; };
  const auto out_at = [&](int64_t row) NW_ALWAYS { return (Out*)a.y + row * a.size; };
  const int64_t bytes = a.size * sizeof(T);
  const bool lead = bytes <= SHORT;
  // Torch's recurrence reads a row in several places at once, which no prefetcher sees through: it asks for the next
  // row itself, or, of bfloat16, has short rows brought near beforehand. All rows come from memory two rows before.
  const bool near = QUOTIENT_KIND == TORCH && __is_same(T, Bf16) && lead;
  const int64_t distance = 1 + lead + (QUOTIENT_KIND == TORCH);
  // What is written is asked for, too, unless the sum of squares of a row leaves memory no time for it.
  const bool asks = !a.stream && (QUOTIENT_KIND != PRODUCT || bytes > 4096), looks = bytes > SHORT / 2;
  const auto measured = [&](int64_t row) NW_ALWAYS {
    return measure<T, __is_same(T, Bf16)>(
        row_at(row), a.size, a.code, {near ? nullptr : row_at(least(row + 1, a.rows - 1)), lead});
  };
  // The next short row is measured before this one is multiplied: the last additions, the root and the division take
  // as long as such a row, and the processor fills that time with the products. Two long rows would not fit its
  // first-level cache beside gain and bias.
  begin = forward_groups<T, Out, QUOTIENT_KIND, ROUND, BIAS>(a, begin, end);
  if (begin == end) return;
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
    if (a.mean) ((A*)a.mean)[row] = factors.mean;
    if (a.rstd) ((A*)a.rstd)[row] = factors.rstd;
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

// -- backward -----------------------------------------------------------------------------------------

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

// A row of the backward pass, and what its two sums give.
template <class X, class D>
struct Back {
  const D* dy;
  const X *x, *dsum;
  X* dx;
  Acc<X> mean, rstd, share, along_hat, level;
  const D* dy_ahead;  // what to ask memory for,
  const X *x_ahead, *dsum_ahead, *dx_ahead;
};

// When the memory of rows to come is asked for: as evenly as was found to pay.
enum Ask {
  NEVER,   // of rows so short that the processor foresees them
  LATE,    // all of it while dx is written
  SPREAD,  // dy before
  EARLY    // dy and x before
};

// dx = rstd * (g - xhat * mean(g * xhat) - mean(g)), g = dy * gain; the last mean only of centred norms. First its two
// means and the gradients of gain and bias, of some rows together: gains and their sums are then read and written once
// for all of them.
template <class X, class D, bool CENTER, int WEIGHTS, int ROWS, Ask ASK>
NW_INLINE void sum_back(Back<X, D>* rows, const Acc<X>* gain, Acc<X>* dgain, Acc<X>* dbias, int64_t n) {
  using A = Acc<X>;
  Sum<A> dots[ROWS], sums[ROWS];
  along<A, PAIRED<X, D>>(n, [&](auto at) NW_ALWAYS {
    const auto scale = read(gain, at);
    auto to_gain = scale, to_bias = scale;
    if constexpr (WEIGHTS > 0) to_gain = read(dgain, at);
    if constexpr (WEIGHTS > 1) to_bias = read(dbias, at);
    _Pragma("GCC unroll 2") for (int r = 0; r < ROWS; ++r) {
      if constexpr (ASK > LATE) fetch(rows[r].dy_ahead, at);
      if constexpr (ASK == EARLY) fetch(rows[r].x_ahead, at);
      const auto d = read(rows[r].dy, at), g = d * scale;
      auto hat = read(rows[r].x, at);
      if constexpr (CENTER) hat = hat - rows[r].mean;
      hat = hat * rows[r].rstd;
      dots[r].of(at) = fma(g, hat, dots[r].of(at));
      if constexpr (CENTER) sums[r].of(at) = sums[r].of(at) + g;
      if constexpr (WEIGHTS > 0) to_gain = fma(d, hat, to_gain);
      if constexpr (WEIGHTS > 1) to_bias = to_bias + d;
    }
    if constexpr (WEIGHTS > 0) write(dgain, at, to_gain);
    if constexpr (WEIGHTS > 1) write(dbias, at, to_bias);
  });
  for (int r = 0; r < ROWS; ++r) {
    rows[r].along_hat = -dots[r].total() * rows[r].share * rows[r].rstd;
    rows[r].level = CENTER ? sums[r].total() / (A)n : (A)0;
  }
}

// Then dx itself. The factor rstd goes into the mean of g * xhat once a row. From the other mean it is kept apart, so
// that equal g cancel exactly however large rstd is. In float32 it is multiplied into both terms, so that g, the
// largest, is rounded seldom; what becomes half precision has digits to spare, and saves a product.
template <class X, class D, bool CENTER, int ROWS, Ask ASK>
NW_INLINE void apply_back(const Back<X, D>* rows, const Acc<X>* gain, int64_t n, bool past) {
  along<Acc<X>, PAIRED<X, D>>(n, [&](auto at) NW_ALWAYS {
    const auto scale = read(gain, at);
    _Pragma("GCC unroll 2") for (int r = 0; r < ROWS; ++r) {
      const Back<X, D>& row = rows[r];
      if constexpr (ASK == LATE) fetch(row.dy_ahead, at);
      if constexpr (ASK == LATE || ASK == SPREAD) fetch(row.x_ahead, at);
      if (ASK != NEVER && !past) fetch(row.dx_ahead, at);
      auto g = read(row.dy, at) * scale, hat = read(row.x, at);
      if constexpr (CENTER) g = g - row.level, hat = hat - row.mean;
      if constexpr (sizeof(X) == 2)
        g = fma(hat, row.along_hat, g) * row.rstd;
      else
        g = fma(g, row.rstd, hat * row.rstd * row.along_hat);
      if (row.dsum) {
        if constexpr (ASK != NEVER) fetch(row.dsum_ahead, at);
        g = g + read(row.dsum, at);
      }
      write(row.dx, at, g, past);
    }
  });
}

// Where x - mean overflows the root is at least 2^MAX / sqrt(n), and n is below 2^40.
template <class A>
constexpr A FARTHEST = sizeof(A) == 4 ? (A)0x1p-107f : (A)0x1p-1003;

// The same for a centred row with such a root, by halves of x and mean; element by element, for it is rare.
template <class X, class D>
NW_APART void backward_far_row(
    const Back<X, D>& row, const Acc<X>* gain, Acc<X>* dgain, Acc<X>* dbias, int64_t n, int weights) {
  using A = Acc<X>;
  const auto hat = [&](int64_t i) NW_ALWAYS { return (load1(row.x + i) / 2 - row.mean / 2) * (2 * row.rstd); };
  A dots = 0, sums = 0;
  for (int64_t i = 0; i < n; ++i) {
    const A g = load1(row.dy + i) * gain[position(i, n, PAIRED<X, D>)];
    dots += g * hat(i), sums += g;
  }
  const A along_hat = dots * row.share, level = sums / (A)n;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t at = position(i, n, PAIRED<X, D>);
    const A d = load1(row.dy + i), g = (d * gain[at] - hat(i) * along_hat - level) * row.rstd;
    store1(row.dx + i, row.dsum ? g + load1(row.dsum + i) : g);
    if (weights > 0) dgain[at] += d * hat(i);
    if (weights > 1) dbias[at] += d;
  }
}

// Rows whose weight gradients are added up before they go to the block's: with m rows a block the rounding errors of
// both levels are smallest together at sqrt(m), and m is at most about 1024, see blocks_of.
constexpr int64_t LEVEL = 32;

template <class A>
NW_INLINE void raise_level(A* high, A* low, int64_t n) {
  for (int64_t i = 0; i < n; ++i) high[i] += low[i], low[i] = 0;
}

template <class X, class D, bool CENTER, int WEIGHTS>
void backward_blocks(const RowsBackward& a, int64_t begin, int64_t end) {
  using A = Acc<X>;
  const int64_t n = a.size;
  const A* gain = (const A*)a.gain;
  const auto dy_at = [&](int64_t row) NW_ALWAYS { return (const D*)a.dy + row * a.dy_stride; };
  const auto x_at = [&](int64_t row) NW_ALWAYS { return (const X*)a.x + row * a.x_stride; };
  const auto dsum_at = [&](int64_t row) NW_ALWAYS {
    return a.dsum ? (const X*)a.dsum + row * a.dsum_stride : nullptr;
  };
  // Two rows in one page of memory would be one stream to what reads memory ahead, and an odd one.
  const int64_t bytes = n * sizeof(X);
  const bool together = bytes > 4096, brief = bytes <= SHORT, tiny = bytes <= SHORT / 4;
  const auto is_far = [&](int64_t row) NW_ALWAYS {
    return CENTER && __builtin_expect(((const A*)a.rstd)[row] < FARTHEST<A>, 0);
  };
  A* scratch = nullptr;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * a.rows / a.blocks, last = (block + 1) * a.rows / a.blocks;
    A *const gains = WEIGHTS > 0 ? (A*)a.dgain + block * n : nullptr;
    A *const biases = WEIGHTS > 1 ? (A*)a.dbias + block * n : nullptr;
    if constexpr (WEIGHTS > 0) memset(gains, 0, n * sizeof(A));
    if constexpr (WEIGHTS > 1) memset(biases, 0, n * sizeof(A));
    const bool levels = WEIGHTS > 0 && last - first > LEVEL;
    if (levels && !scratch) scratch = new A[WEIGHTS * n]();
    A *const dgain = levels ? scratch : gains, *const dbias = levels ? scratch + n : biases;
    const auto backward = [&](int64_t from, auto times, auto asks) NW_ALWAYS {
      constexpr int ROWS = decltype(times)::VALUE;
      constexpr Ask ASK = (Ask)decltype(asks)::VALUE;
      constexpr int64_t AHEAD = ASK == LATE ? 4 : ROWS;
      Back<X, D> rows[ROWS];
      for (int r = 0; r < ROWS; ++r) {
        const int64_t row = from + r;
        const A rstd = ((const A*)a.rstd)[row], mean = CENTER ? ((const A*)a.mean)[row] : (A)0;
        const A share = root_share(rstd, (A)a.eps, a.code);
        X* const dx = (X*)a.dx;
        rows[r] = {dy_at(row), x_at(row), dsum_at(row), dx + row * n, mean, rstd,
                   (a.code & KIND) == L2 ? share : share / (A)n, 0, 0, nullptr, nullptr, nullptr, nullptr};
        if constexpr (ASK != NEVER) {
          const int64_t next = least(row + AHEAD, a.rows - 1), later = least(row + 2 * AHEAD, a.rows - 1);
          rows[r].dy_ahead = dy_at(next), rows[r].x_ahead = x_at(next);
          rows[r].dsum_ahead = dsum_at(next), rows[r].dx_ahead = dx + next * n;
          look_up(dy_at(later), n), look_up(x_at(later), n);
          if (a.dsum) look_up(dsum_at(later), n);
          if (!a.stream) look_up(dx + later * n, n);
        }
      }
      if (ROWS == 1 && is_far(from)) return backward_far_row(rows[0], gain, dgain, dbias, n, WEIGHTS);
      sum_back<X, D, CENTER, WEIGHTS, ROWS, ASK>(rows, gain, dgain, dbias, n);
      apply_back<X, D, CENTER, ROWS, ASK>(rows, gain, n, a.stream);
    };
    for (int64_t row = first; row < last;) {
      // two that are alike, for no row may depend on its neighbour, and that no level ends between
      if (together && row + 2 <= last && (row - first) % 2 == 0 && !is_far(row) && !is_far(row + 1))
        backward(row, Times<2>{}, Times<SPREAD>{}), row += 2;
      else if (brief)
        tiny ? backward(row, Times<1>{}, Times<NEVER>{}) : backward(row, Times<1>{}, Times<LATE>{}), row += 1;
      else
        backward(row, Times<1>{}, Times<EARLY>{}), row += 1;
      if (levels && ((row - first) % LEVEL == 0 || row == last)) {
        raise_level(gains, dgain, n);
        if constexpr (WEIGHTS > 1) raise_level(biases, dbias, n);
      }
    }
  }
  delete[] scratch;
  if (a.stream) stream_end();
}

template <class X, class D, bool CENTER>
NW_INLINE void backward_weights(const RowsBackward& a, int64_t begin, int64_t end) {
  if (a.weights == 0) return backward_blocks<X, D, CENTER, 0>(a, begin, end);
  if (a.weights == 1) return backward_blocks<X, D, CENTER, 1>(a, begin, end);
  return backward_blocks<X, D, CENTER, 2>(a, begin, end);
}

template <class X, class D>
void rows_backward(const RowsBackward& a, int64_t begin, int64_t end) {
  return centers(a.code) ? backward_weights<X, D, true>(a, begin, end) : backward_weights<X, D, false>(a, begin, end);
}

// -- gains and their gradients ------------------------------------------------------------------------

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
