// GroupNorm and InstanceNorm, forward and backward, of contiguous inputs and of those with channels last.
//
// Statistics are taken in one sweep, of what is left after subtracting a pivot, one number a group that lies among
// its elements. The mean is pivot + rest, kept as two numbers, so that an offset of 1e4 standard deviations costs no
// more digits than storing x did.
#pragma once

#include "isa.h"
#include "group_table.h"
#include "rows.h"
#include "totals.h"

namespace normwise::NW_ISA {

// Of elements times `power`: mean = pivot + rest. The power of two is 1 unless squares could overflow.
template <class A>
struct Settled {
  A pivot, rest, rstd, power;
};

// A pivot: a mean of four elements, exact if they are the same.
template <class Element>
NW_INLINE auto pivot_of(int64_t n, Element element) {
  using A = decltype(element(0));
  return ((element(0) + element(n / 4)) + (element(n / 2) + element(n / 4 * 3))) * (A)0.25;
}

template <class A>
struct Spread {
  double rest, variance;
};

template <class A, class Element>
NW_APART Spread<A> spread_of(int64_t n, A pivot, A power, Element element) {
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double v = (double)(element(i) * power) - (double)pivot;
    sum += v;
    squares += v * v;
  }
  const double rest = sum / (double)n;
  return {rest, squares / (double)n - rest * rest};
}

// Mean and root of n elements, from sums of element - pivot and of its square. Two kinds of groups are looked at
// again, element by element: large ones (see rows.h), and those whose pivot is more than 4 standard deviations from
// the mean, where subtracting rest^2 would cost more than a factor of 17 in rounding.
template <class A, class Element>
NW_INLINE Settled<A> settle(
    const Groups& a, int64_t group, int64_t n, A pivot, double sum, double squares, Element element) {
  A power = 1;
  double rest = sum / (double)n, variance = squares / (double)n - rest * rest;
  if (__builtin_expect(!((A)squares < Range<A>::SQUARES && magnitude(pivot) < Range<A>::MEAN), 0)) {
    A peak = 0;
    for (int64_t i = 0; i < n && peak == peak; ++i) {
      const A size = magnitude(element(i));
      if (!(size <= peak)) peak = size;  // NaN stays
    }
    if (!(peak < __builtin_huge_val())) {
      pivot = (A)__builtin_nan("");  // infinity or NaN: nothing of the group is known
    } else {
      const int exponent = peak > 0 ? __builtin_ilogb(peak) : 0;
      if (exponent > Range<A>::LARGE) power = (A)__builtin_ldexp(1.0, Range<A>::LARGE - exponent);
      pivot = element(0) * power;
    }
    const Spread<A> found = spread_of(n, pivot, power, element);
    rest = found.rest, variance = found.variance;
  }
  if (rest * rest > 16 * variance) {
    pivot = (A)((double)pivot + rest);
    const Spread<A> found = spread_of(n, pivot, power, element);
    rest = found.rest, variance = found.variance;
  }
  if (variance < 0) variance = 0;
  const A rstd = (A)1 / root((A)variance + (A)a.eps);
  if (a.stats) {
    A* stats = (A*)a.stats + group;
    const int64_t stride = a.samples * a.groups;
    stats[0] = pivot / power, stats[stride] = (A)rest / power, stats[2 * stride] = rstd * power;
    if (a.variance) stats[3 * stride] = (A)variance / power / power;
  }
  return {pivot, (A)rest, rstd, power};
}

// -- contiguous: a unit is a row, one group of one sample --------------------------------------------

// What writes pairs (see lot.h) relies on NaN without a payload, which a gain or shift in float32 might have.
template <class A>
NW_INLINE A clean(A a) {
  return a == a ? a : (A)__builtin_nan("");
}

// body(channel, begin, end) for each piece of the elements begin to end of a row that lies in one channel.
template <class Body>
NW_INLINE void by_channel(int64_t length, int64_t begin, int64_t end, Body body) {
  for (int64_t channel = begin / length; begin < end; ++channel) {
    const int64_t stop = least(end, (channel + 1) * length);
    body(channel, begin, stop);
    begin = stop;
  }
}

template <class T>
void forward_groups(const Groups& a, int stages, int64_t row, int64_t begin, int64_t end, void* scratch) {
  using A = Acc<T>;
  constexpr bool PAIRS = __is_same(T, Bf16);
  const int64_t width = a.channels / a.groups, n = width * a.length, first = row % a.groups * width;
  const T* x = (const T*)a.x + row * n;
  T* y = (T*)a.out + row * n;
  Settled<A>& found = *(Settled<A>*)scratch;
  double* sums = (double*)scratch + 4;
  const auto element = [&](int64_t i) NW_ALWAYS { return load1(x + i); };
  if (stages & PREPARE) found.pivot = pivot_of(n, element);
  if (stages & MEASURE)
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const T* from = x + chunk * CHUNK;
      Sum<A> sum, squares;
      const A pivot = found.pivot;
      const int64_t count = least(CHUNK, n - chunk * CHUNK), half = count / (2 * BLOCK<A>) * BLOCK<A>;
      const auto add = [&](const T* from, auto at, Sum<A>& sum, Sum<A>& squares) NW_ALWAYS {
        const auto v = read(from, at) - pivot;
        sum.of(at) = sum.of(at) + v;
        squares.of(at) = fma(v, v, squares.of(at));
      };
      Sum<A> others, other_squares;  // of the second half: twice as many additions under way
      along<A, PAIRS>(half, [&](auto at) NW_ALWAYS {
        add(from, at, sum, squares);
        add(from + half, at, others, other_squares);
      });
      along<A, PAIRS>(count - 2 * half, [&](auto at) NW_ALWAYS { add(from + 2 * half, at, sum, squares); });
      NW_EACH sum.lot.v[k] += others.lot.v[k], squares.lot.v[k] += other_squares.lot.v[k];
      sums[2 * chunk] = total_of(sum), sums[2 * chunk + 1] = total_of(squares);
    }
  if (stages & SETTLE) {
    double sum = 0, squares = 0;
    for (int64_t chunk = 0; chunk * CHUNK < n; ++chunk) sum += sums[2 * chunk], squares += sums[2 * chunk + 1];
    found = settle(a, row, n, found.pivot, sum, squares, element);
  }
  if (stages & FINISH)
    for (int64_t chunk = end; chunk-- > begin;)  // back to front: what was read last is still in the cache
      by_channel(a.length, chunk * CHUNK, least((chunk + 1) * CHUNK, n), [&](int64_t channel, int64_t from, int64_t to) NW_ALWAYS {
      const A scale = clean(found.rstd * ((const A*)a.gain)[first + channel]);
      const A shift = clean((a.bias ? ((const A*)a.bias)[first + channel] : (A)0) - found.rest * scale);
      const A power = found.power, minus = -found.pivot;
      const T* in = x + from;
      T* out = y + from;
      along<A, PAIRS>(to - from, [&](auto at) NW_ALWAYS { write(out, at, fma(fma(read(in, at), power, minus), scale, shift)); });
    });
}

// dx = rstd * (g - xhat * mean(g * xhat) - mean(g)) with g = dy * gain, as
// dx = by_hat * (x - pivot) * rstd + by_dy * dy + constant, by_dy = gain * scale.
template <class A>
struct Slopes {
  A scale, by_hat, constant;
};

template <class A>
NW_INLINE Slopes<A> slopes_of(A rest, A rstd, double along_hat, double level, int64_t n) {
  const A m2 = (A)(along_hat / (double)n), m1 = (A)(level / (double)n);
  const A scale = n == 1 ? (A)0 : rstd;  // a single element is its own mean; roundings times rstd would remain
  return {scale, -m2 * scale, (rest * rstd * m2 - m1) * scale};
}

template <class T>
void backward_groups(const Groups& a, int stages, int64_t row, int64_t begin, int64_t end, void* scratch) {
  using A = Acc<T>;
  constexpr bool PAIRS = __is_same(T, Bf16);
  const int64_t width = a.channels / a.groups, n = width * a.length, first = row % a.groups * width;
  const int64_t pieces = (a.length + CHUNK - 1) / CHUNK, stride = a.samples * a.groups;
  const T *x = (const T*)a.x + row * n, *dy = (const T*)a.dy + row * n;
  T* dx = (T*)a.out + row * n;
  const A* gain = (const A*)a.gain + first;
  const A* stats = (const A*)a.stats + row;
  const A pivot = stats[0], rest = stats[stride], rstd = stats[2 * stride];
  Slopes<A>& slopes = *(Slopes<A>*)scratch;
  double* sums = (double*)scratch + 4;
  const auto each = [&](bool back, auto body) NW_ALWAYS {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t chunk = back ? begin + end - 1 - i : i;
      const int64_t channel = chunk / pieces, piece = chunk % pieces * CHUNK;
      body(chunk, channel, channel * a.length + piece, least(CHUNK, a.length - piece));
    }
  };
  if (stages & MEASURE)
    each(false, [&](int64_t chunk, int64_t, int64_t from, int64_t count) NW_ALWAYS {
      Sum<A> sum, dots;
      const T *in = x + from, *up = dy + from;
      along<A, PAIRS>(count, [&](auto at) NW_ALWAYS {
        const auto d = read(up, at);
        sum.of(at) = sum.of(at) + d;
        dots.of(at) = fma(d, (read(in, at) - pivot) * rstd, dots.of(at));
      });
      sums[2 * chunk] = total_of(sum), sums[2 * chunk + 1] = total_of(dots);
    });
  if (stages & SETTLE) {
    double level = 0, along_hat = 0;
    for (int64_t channel = 0; channel < width; ++channel) {
      double sum = 0, dots = 0;
      for (int64_t chunk = channel * pieces; chunk < (channel + 1) * pieces; ++chunk)
        sum += sums[2 * chunk], dots += sums[2 * chunk + 1];
      dots -= (double)(rest * rstd) * sum;
      level += sum * (double)gain[channel], along_hat += dots * (double)gain[channel];
      const int64_t at = row / a.groups * a.channels + first + channel;
      if (a.dgain) ((A*)a.dgain)[at] = (A)dots;
      if (a.dbias) ((A*)a.dbias)[at] = (A)sum;
    }
    slopes = slopes_of(rest, rstd, along_hat, level, n);
  }
  if (stages & FINISH)
    each(true, [&](int64_t, int64_t channel, int64_t from, int64_t count) NW_ALWAYS {
      const A by_dy = clean(gain[channel] * slopes.scale), by_hat = clean(slopes.by_hat), constant = clean(slopes.constant);
      const T *in = x + from, *up = dy + from;
      T* out = dx + from;
      along<A, PAIRS>(count, [&](auto at) NW_ALWAYS {
        const auto hat = (read(in, at) - pivot) * rstd;
        write(out, at, fma(hat, by_hat, fma(read(up, at), by_dy, constant)));
      });
    });
}

// -- channels last: a unit is a sample ----------------------------------------------------------------

// Scratch memory of a sample: one Settled a group, seven vectors of numbers a channel, then the sums of chunks.
template <class A>
struct Last {
  Settled<A>* groups;
  A *pivot, *power, *scale, *shift, *constant;
  double* sums;   // [2, channels]
  A* chunks;      // [chunks, 2, channels]
  Last(const Groups& a, void* scratch) {
    groups = (Settled<A>*)scratch;
    double* at = (double*)scratch + 4 * a.groups;
    sums = at, at += 2 * a.channels;
    A** vectors[] = {&pivot, &power, &scale, &shift, &constant};
    for (A** each : vectors) *each = (A*)at, at += a.channels;
    chunks = (A*)at;
  }
};

template <int N>
struct Count {
  static constexpr int COUNT = N;
};

// body(position, how many) for positions begin to end, four at a time where there are as many.
template <class Body>
NW_INLINE void by_fours(int64_t begin, int64_t end, Body body) {
  for (; begin + 4 <= end; begin += 4) body(begin, Count<4>{});
  for (; begin < end; ++begin) body(begin, Count<1>{});
}

// The sums of each channel over all chunks, in their order.
template <class A>
NW_INLINE void total_chunks(const Groups& a, const Last<A>& l, int64_t chunks) {
  for (int64_t i = 0; i < 2 * a.channels; ++i) l.sums[i] = (double)l.chunks[i];
  for (int64_t chunk = 1; chunk < chunks; ++chunk)
    for (int64_t i = 0; i < 2 * a.channels; ++i) l.sums[i] += (double)l.chunks[2 * a.channels * chunk + i];
}

template <class T>
void forward_groups_last(const Groups& a, int stages, int64_t sample, int64_t begin, int64_t end, void* scratch) {
  using A = Acc<T>;
  const int64_t channels = a.channels, width = channels / a.groups, n = width * a.length, step = positions_of(a);
  const T* x = (const T*)a.x + sample * channels * a.length;
  T* y = (T*)a.out + sample * channels * a.length;
  const Last<A> l(a, scratch);
  if (stages & PREPARE)
    for (int64_t group = 0; group < a.groups; ++group) {
      const auto element = [&](int64_t i) NW_ALWAYS { return load1(x + i % a.length * channels + group * width + i / a.length); };
      l.groups[group].pivot = pivot_of(n, element);
      for (int64_t c = group * width; c < (group + 1) * width; ++c) l.pivot[c] = l.groups[group].pivot;
    }
  if (stages & MEASURE)
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      A *sum = l.chunks + 2 * channels * chunk, *squares = sum + channels;
      for (int64_t i = 0; i < 2 * channels; ++i) sum[i] = 0;
      by_fours(chunk * step, least((chunk + 1) * step, a.length), [&](int64_t position, auto some) NW_ALWAYS {
        const T* from = x + position * channels;
        along<A, false>(channels, [&](auto at) NW_ALWAYS {
          const auto pivot = read(l.pivot, at);
          auto s = read(sum, at), q = read(squares, at);
          _Pragma("GCC unroll 4") for (int k = 0; k < some.COUNT; ++k) {
            const auto v = read(from + k * channels, at) - pivot;
            s = s + v;
            q = fma(v, v, q);
          }
          write(sum, at, s);
          write(squares, at, q);
        });
      });
    }
  if (stages & SETTLE) {
    total_chunks(a, l, chunks_of(a, true, false));
    for (int64_t group = 0; group < a.groups; ++group) {
      const auto element = [&](int64_t i) NW_ALWAYS { return load1(x + i % a.length * channels + group * width + i / a.length); };
      double sum = 0, squares = 0;
      for (int64_t c = group * width; c < (group + 1) * width; ++c) sum += l.sums[c], squares += l.sums[channels + c];
      const Settled<A> found =
          settle(a, sample * a.groups + group, n, l.groups[group].pivot, sum, squares, element);
      for (int64_t c = group * width; c < (group + 1) * width; ++c) {
        l.pivot[c] = -found.pivot, l.power[c] = found.power;
        l.scale[c] = found.rstd * ((const A*)a.gain)[c];
        l.shift[c] = (a.bias ? ((const A*)a.bias)[c] : (A)0) - found.rest * l.scale[c];
      }
    }
  }
  if (stages & FINISH)
    for (int64_t chunk = end; chunk-- > begin;) by_fours(chunk * step, least((chunk + 1) * step, a.length), [&](int64_t position, auto some) NW_ALWAYS {
      const T* from = x + position * channels;
      T* to = y + position * channels;
      along<A, false>(channels, [&](auto at) NW_ALWAYS {
        const auto minus = read(l.pivot, at), power = read(l.power, at), scale = read(l.scale, at), shift = read(l.shift, at);
        _Pragma("GCC unroll 4") for (int k = 0; k < some.COUNT; ++k)
          write(to + k * channels, at, fma(fma(read(from + k * channels, at), power, minus), scale, shift));
      });
    });
}

template <class T>
void backward_groups_last(const Groups& a, int stages, int64_t sample, int64_t begin, int64_t end, void* scratch) {
  using A = Acc<T>;
  const int64_t channels = a.channels, width = channels / a.groups, n = width * a.length, step = positions_of(a);
  const int64_t stride = a.samples * a.groups;
  const T *x = (const T*)a.x + sample * channels * a.length, *dy = (const T*)a.dy + sample * channels * a.length;
  T* dx = (T*)a.out + sample * channels * a.length;
  const A *gain = (const A*)a.gain, *stats = (const A*)a.stats + sample * a.groups;
  const Last<A> l(a, scratch);
  A *const rstd = l.power, *const by_hat = l.scale, *const by_dy = l.shift;
  if (stages & PREPARE)
    for (int64_t c = 0; c < channels; ++c) l.pivot[c] = stats[c / width], rstd[c] = stats[2 * stride + c / width];
  if (stages & MEASURE)
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      A *sum = l.chunks + 2 * channels * chunk, *dots = sum + channels;
      for (int64_t i = 0; i < 2 * channels; ++i) sum[i] = 0;
      by_fours(chunk * step, least((chunk + 1) * step, a.length), [&](int64_t position, auto some) NW_ALWAYS {
        const T *in = x + position * channels, *up = dy + position * channels;
        along<A, false>(channels, [&](auto at) NW_ALWAYS {
          const auto pivot = read(l.pivot, at), factor = read(rstd, at);
          auto s = read(sum, at), q = read(dots, at);
          _Pragma("GCC unroll 4") for (int k = 0; k < some.COUNT; ++k) {
            const auto d = read(up + k * channels, at);
            s = s + d;
            q = fma(d, (read(in + k * channels, at) - pivot) * factor, q);
          }
          write(sum, at, s);
          write(dots, at, q);
        });
      });
    }
  if (stages & SETTLE) {
    total_chunks(a, l, chunks_of(a, true, true));
    for (int64_t group = 0; group < a.groups; ++group) {
      const A rest = stats[stride + group], r = stats[2 * stride + group];
      double level = 0, along_hat = 0;
      for (int64_t c = group * width; c < (group + 1) * width; ++c) {
        const double sum = l.sums[c], dots = l.sums[channels + c] - (double)(rest * r) * sum;
        level += sum * (double)gain[c], along_hat += dots * (double)gain[c];
        if (a.dgain) ((A*)a.dgain)[sample * channels + c] = (A)dots;
        if (a.dbias) ((A*)a.dbias)[sample * channels + c] = (A)sum;
      }
      const Slopes<A> slopes = slopes_of(rest, r, along_hat, level, n);
      for (int64_t c = group * width; c < (group + 1) * width; ++c)
        by_hat[c] = slopes.by_hat, l.constant[c] = slopes.constant, by_dy[c] = gain[c] * slopes.scale;
    }
  }
  if (stages & FINISH)
    for (int64_t chunk = end; chunk-- > begin;) by_fours(chunk * step, least((chunk + 1) * step, a.length), [&](int64_t position, auto some) NW_ALWAYS {
      const T *in = x + position * channels, *up = dy + position * channels;
      T* to = dx + position * channels;
      along<A, false>(channels, [&](auto at) NW_ALWAYS {
        const auto pivot = read(l.pivot, at), factor = read(rstd, at), slope = read(by_hat, at);
        const auto own = read(by_dy, at), constant = read(l.constant, at);
        _Pragma("GCC unroll 4") for (int k = 0; k < some.COUNT; ++k) {
          const auto hat = (read(in + k * channels, at) - pivot) * factor;
          write(to + k * channels, at, fma(hat, slope, fma(read(up + k * channels, at), own, constant)));
        }
      });
    });
}

}  // namespace normwise::NW_ISA
