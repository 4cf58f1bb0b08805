// LayerNorm and RMSNorm over the channels of [N, C, L] without a permuted copy, forward and backward.
//
// A tile of positions is read once, channel after channel, into a buffer of the type of sums that stays in the
// second-level cache; vectors run along positions, so that each position adds up its own channels.
#pragma once

#include "isa.h"
#include "channel_table.h"
#include "rows.h"
#include "totals.h"

namespace normwise::NW_ISA {

// sums[p] = the sum of term(c, place) over channels, in the order of torch's sum over such an axis: runs of 16 or
// more, added up in levels, as in sums.h. `levels` holds three more rows of `tile` numbers.
template <class A, class Term>
NW_INLINE void sum_channels(int64_t channels, int64_t positions, int64_t tile, A* sums, A* levels, Term term) {
  const int64_t power = most(4, ceil_log2(channels) / 4), step = (int64_t)1 << power, mask = step - 1;
  const auto carry = [&](A* to, A* from) NW_ALWAYS {
    for (int64_t p = 0; p < positions; ++p) to[p] += from[p], from[p] = 0;
  };
  for (int64_t p = 0; p < positions; ++p) sums[p] = levels[p] = levels[tile + p] = levels[2 * tile + p] = 0;
  int64_t c = 0;
  while (c < channels) {
    const int64_t end = least(c + step, channels);
    const bool whole = c + step <= channels;
    for (; c + 4 <= end; c += 4)
      along<A, false>(positions, [&](auto at) NW_ALWAYS {
        write(sums, at, (((read(sums, at) + term(c, at)) + term(c + 1, at)) + term(c + 2, at)) + term(c + 3, at));
      });
    for (; c < end; ++c)
      along<A, false>(positions, [&](auto at) NW_ALWAYS { write(sums, at, read(sums, at) + term(c, at)); });
    if (!whole) break;
    carry(levels, sums);
    if (c & (mask << power)) continue;
    carry(levels + tile, levels);
    if (c & (mask << (2 * power))) continue;
    carry(levels + 2 * tile, levels + tile);
  }
  for (int level = 0; level < 3; ++level) carry(sums, levels + level * tile);
}

// One position of the buffer that is too large for its squares: scaled by a power of two in place, as rows are.
template <class A>
NW_APART A scale_position(const Channels& a, A* column, A& mean, A& statistic) {
  A* row = new A[a.channels];
  A power = 1;
  for (int64_t c = 0; c < a.channels; ++c) row[c] = column[c * a.tile];
  const A peak = peak_of(row, a.channels);
  if (!(peak < __builtin_huge_val())) {
    statistic = __builtin_nan("");
  } else if (const int exponent = __builtin_ilogb(peak); exponent > Range<A>::LARGE) {
    power = (A)__builtin_ldexp(1.0, Range<A>::LARGE - exponent);
    for (int64_t c = 0; c < a.channels; ++c) column[c * a.tile] = row[c] *= power;
    const Measured<A> found = measure<A, false>(row, a.channels, a.code);
    mean = found.mean, statistic = found.statistic;
  }
  delete[] row;
  return power;
}

template <class T, class Out, bool CENTER, bool ROUND>
void forward_channels(const Channels& a, int64_t begin, int64_t end) {
  using A = Acc<T>;
  const int64_t tiles = (a.length + a.tile - 1) / a.tile, channels = a.channels, tile = a.tile;
  const A *gain = (const A*)a.gain, *bias = (const A*)a.bias;
  A* const buffer = new A[(channels + 6) * tile];
  A *mean = buffer + channels * tile, *square = mean + tile, *by = square + tile, *levels = by + tile;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t outer = unit / tiles, from = unit % tiles * tile, positions = least(tile, a.length - from);
    const T* x = (const T*)a.x + outer * channels * a.length + from;
    Out* y = (Out*)a.out + outer * channels * a.length + from;
    sum_channels(channels, positions, tile, CENTER ? mean : square, levels, [&](int64_t c, auto at) NW_ALWAYS {
      const auto v = read(x + c * a.length, at);
      write(buffer + c * tile, at, v);
      if constexpr (CENTER)
        return v;
      else
        return v * v;
    });
    for (int64_t p = 0; p < positions; ++p) mean[p] = CENTER ? mean[p] / (A)channels : (A)0;
    if constexpr (CENTER)
      sum_channels(channels, positions, tile, square, levels, [&](int64_t c, auto at) NW_ALWAYS {
        const auto v = read(buffer + c * tile, at) - read(mean, at);
        return v * v;
      });
    A* const kept = a.rstd ? (A*)a.rstd + outer * a.length + from : nullptr;
    A* const kept_mean = CENTER && a.mean ? (A*)a.mean + outer * a.length + from : nullptr;
    for (int64_t p = 0; p < positions; ++p) {
      A statistic = (a.code & KIND) == L2 ? square[p] : square[p] / (A)channels, power = 1;
      if (__builtin_expect(!(square[p] < Range<A>::SQUARES && magnitude(mean[p]) < Range<A>::MEAN), 0))
        power = scale_position(a, buffer + p, mean[p], statistic);
      const A divisor = root_of(statistic, (A)a.eps, a.code);
      if (kept) kept[p] = (A)1 / divisor * power;
      by[p] = a.code & DIVIDE ? divisor : (A)1 / divisor;
      if (kept_mean) kept_mean[p] = mean[p] / power;
    }
    for (int64_t c = 0; c < channels; ++c) {
      const A own = gain[c], shift = bias ? bias[c] : (A)0;
      const A* in = buffer + c * tile;
      Out* out = y + c * a.length;
      const bool divide = a.code & DIVIDE;
      along<A, false>(positions, [&](auto at) NW_ALWAYS {
        auto v = read(in, at);
        if constexpr (CENTER) v = v - read(mean, at);
        v = divide ? v / read(by, at) : v * read(by, at);
        if constexpr (ROUND) v = rounded(v, T{});
        write(out, at, v * own + shift);
      });
    }
  }
  delete[] buffer;
}

template <class T, class Out>
void channels_forward(const Channels& a, int64_t begin, int64_t end) {
  constexpr bool HALF = sizeof(T) == 2;  // elsewhere there is nothing to round
  if (HALF && (a.code & ROUND_BEFORE_WEIGHT))
    return centers(a.code) ? forward_channels<T, Out, true, HALF>(a, begin, end)
                           : forward_channels<T, Out, false, HALF>(a, begin, end);
  return centers(a.code) ? forward_channels<T, Out, true, false>(a, begin, end)
                         : forward_channels<T, Out, false, false>(a, begin, end);
}

template <class X, class D, bool CENTER, int WEIGHTS>
void backward_channels(const Channels& a, int64_t begin, int64_t end) {
  using A = Acc<X>;
  constexpr int64_t RUN = 64;
  const int64_t tiles = (a.length + a.tile - 1) / a.tile, channels = a.channels, tile = a.tile;
  const A* gain = (const A*)a.gain;
  A* const buffer = new A[(2 * channels + 6) * tile];
  A *const hats = buffer, *const grads = buffer + channels * tile;
  A *mean = grads + channels * tile, *rstd = mean + tile, *level = rstd + tile, *dots = level + tile;
  A *run = dots + tile, *dot_run = run + tile;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t outer = unit / tiles, from = unit % tiles * tile, positions = least(tile, a.length - from);
    const X* x = (const X*)a.x + outer * channels * a.length + from;
    const D* dy = (const D*)a.dy + outer * channels * a.length + from;
    X* dx = (X*)a.out + outer * channels * a.length + from;
    A* const dgain = (A*)a.parts + unit * WEIGHTS * channels;
    for (int64_t p = 0; p < positions; ++p) {
      rstd[p] = ((const A*)a.rstd)[outer * a.length + from + p];
      if constexpr (CENTER) mean[p] = ((const A*)a.mean)[outer * a.length + from + p];
      level[p] = dots[p] = run[p] = dot_run[p] = 0;
    }
    for (int64_t c = 0; c < channels; ++c) {
      const A own = gain[c];
      Sum<A> sum, product;
      along<A, false>(positions, [&](auto at) NW_ALWAYS {
        const auto d = read(dy + c * a.length, at);
        auto hat = read(x + c * a.length, at);
        if constexpr (CENTER) hat = hat - read(mean, at);
        hat = hat * read(rstd, at);
        write(hats + c * tile, at, hat);
        write(grads + c * tile, at, d);
        const auto g = d * own;
        if constexpr (CENTER) write(run, at, read(run, at) + g);
        write(dot_run, at, fma(g, hat, read(dot_run, at)));
        if constexpr (WEIGHTS > 0) product.of(at) = fma(d, hat, product.of(at));
        if constexpr (WEIGHTS > 1) sum.of(at) = sum.of(at) + d;
      });
      if constexpr (WEIGHTS > 0) dgain[c] = total_of(product);
      if constexpr (WEIGHTS > 1) dgain[channels + c] = total_of(sum);
      if (c % RUN == RUN - 1 || c == channels - 1)
        for (int64_t p = 0; p < positions; ++p) {
          level[p] += run[p], dots[p] += dot_run[p];
          run[p] = dot_run[p] = 0;
        }
    }
    for (int64_t p = 0; p < positions; ++p) {
      A share = root_share(rstd[p], (A)a.eps, a.code);
      if ((a.code & KIND) != L2) share /= (A)channels;
      dots[p] = -dots[p] * share;
      level[p] = level[p] / (A)channels;
    }
    for (int64_t c = 0; c < channels; ++c) {
      const A own = gain[c];
      along<A, false>(positions, [&](auto at) NW_ALWAYS {
        auto g = fma(read(hats + c * tile, at), read(dots, at), read(grads + c * tile, at) * own);
        if constexpr (CENTER) g = g - read(level, at);
        write(dx + c * a.length, at, g * read(rstd, at));
      });
    }
  }
  delete[] buffer;
}

template <class X, class D>
void channels_backward(const Channels& a, int64_t begin, int64_t end) {
  by_weights(a.weights, [&](auto weights) NW_ALWAYS {
    constexpr int WEIGHTS = decltype(weights)::VALUE;
    centers(a.code) ? backward_channels<X, D, true, WEIGHTS>(a, begin, end)
                    : backward_channels<X, D, false, WEIGHTS>(a, begin, end);
  });
}

}  // namespace normwise::NW_ISA
