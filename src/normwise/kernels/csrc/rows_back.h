// Gradients of norms of rows: dx, and those of gain and bias in blocks of rows.
#pragma once

#include "rows.h"

namespace normwise::NW_ISA {

// A row of the backward pass, and what its two sums give.
template <class X, class D>
struct Back {
  const D* dy;
  const X *x, *dsum;
  X* dx;
  Acc<X> mean, rstd, share, along_hat = 0, level = 0;
  const D* dy_ahead = nullptr;  // what to ask memory for
  const X *x_ahead = nullptr, *dsum_ahead = nullptr, *dx_ahead = nullptr;
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
  const bool together = bytes > PAGE, brief = bytes <= SHORT, tiny = bytes <= SHORT / 4;
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
                   (a.code & KIND) == L2 ? share : share / (A)n};
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

template <class X, class D>
void rows_backward(const RowsBackward& a, int64_t begin, int64_t end) {
  by_weights(a.weights, [&](auto weights) NW_ALWAYS {
    constexpr int WEIGHTS = decltype(weights)::VALUE;
    centers(a.code) ? backward_blocks<X, D, true, WEIGHTS>(a, begin, end)
                    : backward_blocks<X, D, false, WEIGHTS>(a, begin, end);
  });
}

}  // namespace normwise::NW_ISA
