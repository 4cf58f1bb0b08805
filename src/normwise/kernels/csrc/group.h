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
    // x - pivot could overflow in the backward pass of a large group: its mean is kept whole
    const bool large = power != 1;
    stats[0] = large ? (A)0 : pivot;
    stats[stride] = large ? pivot / power + (A)rest / power : (A)rest;
    stats[2 * stride] = rstd * power;
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
    by_channel(a.length, begin * CHUNK, least(end * CHUNK, n), [&](int64_t channel, int64_t from, int64_t to)
                                                                   NW_ALWAYS {
      const A scale = clean(found.rstd * ((const A*)a.gain)[first + channel]);
      const A shift = clean((a.bias ? ((const A*)a.bias)[first + channel] : (A)0) - found.rest * scale);
      const A power = found.power, minus = -found.pivot;
      const T* in = x + from;
      T* out = y + from;
      const bool past = a.stream && begins_a_line(out);
      along<A, PAIRS>(to - from, [&](auto at) NW_ALWAYS {
        write(out, at, fma(fma(read(in, at), power, minus), scale, shift), past);
      });
    });
  if (a.stream) stream_end();
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
  const auto each = [&](auto body) NW_ALWAYS {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t channel = chunk / pieces, piece = chunk % pieces * CHUNK;
      body(chunk, channel, channel * a.length + piece, least(CHUNK, a.length - piece));
    }
  };
  if (stages & MEASURE)
    each([&](int64_t chunk, int64_t, int64_t from, int64_t count) NW_ALWAYS {
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
    each([&](int64_t, int64_t channel, int64_t from, int64_t count) NW_ALWAYS {
      const A by_dy = clean(gain[channel] * slopes.scale), by_hat = clean(slopes.by_hat);
      const A constant = clean(slopes.constant);
      const T *in = x + from, *up = dy + from;
      T* out = dx + from;
      const bool past = a.stream && begins_a_line(out);
      along<A, PAIRS>(count, [&](auto at) NW_ALWAYS {
        const auto hat = (read(in, at) - pivot) * rstd;
        write(out, at, fma(hat, by_hat, fma(read(up, at), by_dy, constant)), past);
      });
    });
  if (a.stream) stream_end();
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

// Whether pivots are so near 0, in standard deviations, that they may be multiplied out: sums and outputs then lose
// less than two bits, and vectors of pivots need not be read beside the input.
template <class A>
NW_INLINE bool is_near(A pivot, A rstd) {
  return magnitude(pivot) * rstd <= (A)2 && rstd > (A)0x1p-50;  // and the square of rstd must not vanish
}

template <class A>
NW_INLINE bool are_near(const Groups& a, const Last<A>& l) {
  bool near = true;
  for (int64_t group = 0; group < a.groups; ++group)
    near = near && l.groups[group].power == 1 && is_near(l.groups[group].pivot, l.groups[group].rstd);
  return near;
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
  const auto element_of = [&](int64_t group) NW_ALWAYS {
    return [=](int64_t i) NW_ALWAYS { return load1(x + i % a.length * channels + group * width + i / a.length); };
  };
  if (stages & PREPARE)
    for (int64_t group = 0; group < a.groups; ++group) {
      l.groups[group].pivot = pivot_of(n, element_of(group));
      for (int64_t c = group * width; c < (group + 1) * width; ++c) l.pivot[c] = l.groups[group].pivot;
    }
  if (stages & MEASURE)
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      A *sum = l.chunks + 2 * channels * chunk, *squares = sum + channels;
      for (int64_t i = 0; i < 2 * channels; ++i) sum[i] = 0;
      const int64_t last = least((chunk + 1) * step, a.length);
      for (int64_t position = chunk * step; position < last; ++position) {
        const T* from = x + position * channels;
        along<A, false>(channels, [&](auto at) NW_ALWAYS {
          const auto v = read(from, at) - read(l.pivot, at);
          write(sum, at, read(sum, at) + v);
          write(squares, at, fma(v, v, read(squares, at)));
        });
      }
    }
  if (stages & SETTLE) {
    total_chunks(a, l, chunks_of(a, true, false));
    for (int64_t group = 0; group < a.groups; ++group) {
      double sum = 0, squares = 0;
      for (int64_t c = group * width; c < (group + 1) * width; ++c) sum += l.sums[c], squares += l.sums[channels + c];
      l.groups[group] =
          settle(a, sample * a.groups + group, n, l.groups[group].pivot, sum, squares, element_of(group));
    }
    const bool near = are_near(a, l);
    for (int64_t c = 0; c < channels; ++c) {
      const Settled<A> found = l.groups[c / width];
      const A scale = found.rstd * ((const A*)a.gain)[c];
      const double rest = near ? (double)found.rest + (double)found.pivot : (double)found.rest;
      l.pivot[c] = -found.pivot, l.power[c] = found.power, l.scale[c] = scale;
      l.shift[c] = (A)((a.bias ? (double)((const A*)a.bias)[c] : 0.0) - rest * (double)scale);
    }
  }
  if (stages & FINISH) {
    const bool near = are_near(a, l);
    const int64_t last = least(end * step, a.length);
    for (int64_t position = begin * step; position < last; ++position) {
      const T* from = x + position * channels;
      T* to = y + position * channels;
      const bool past = a.stream && begins_a_line(to);
      if (near)
        along<A, false>(channels, [&](auto at) NW_ALWAYS {
          write(to, at, fma(read(from, at), read(l.scale, at), read(l.shift, at)), past);
        });
      else
        along<A, false>(channels, [&](auto at) NW_ALWAYS {
          const auto v = fma(read(from, at), read(l.power, at), read(l.pivot, at));
          write(to, at, fma(v, read(l.scale, at), read(l.shift, at)), past);
        });
    }
  }
  if (a.stream) stream_end();
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
  bool near = true;
  for (int64_t group = 0; group < a.groups; ++group) near = near && is_near(stats[group], stats[2 * stride + group]);
  if (stages & PREPARE)
    for (int64_t c = 0; c < channels; ++c) l.pivot[c] = stats[c / width], rstd[c] = stats[2 * stride + c / width];
  if (stages & MEASURE)
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      A *sum = l.chunks + 2 * channels * chunk, *dots = sum + channels;
      for (int64_t i = 0; i < 2 * channels; ++i) sum[i] = 0;
      const int64_t last = least((chunk + 1) * step, a.length);
      for (int64_t position = chunk * step; position < last; ++position) {
        const T *in = x + position * channels, *up = dy + position * channels;
        const auto add = [&](auto d, auto hat, auto at) NW_ALWAYS {
          write(sum, at, read(sum, at) + d);
          write(dots, at, fma(d, hat, read(dots, at)));
        };
        if (near)
          along<A, false>(channels, [&](auto at) NW_ALWAYS { add(read(up, at), read(in, at), at); });
        else
          along<A, false>(channels, [&](auto at) NW_ALWAYS {
            add(read(up, at), (read(in, at) - read(l.pivot, at)) * read(rstd, at), at);
          });
      }
    }
  if (stages & SETTLE) {
    total_chunks(a, l, chunks_of(a, true, true));
    for (int64_t group = 0; group < a.groups; ++group) {
      const A pivot = stats[group], rest = stats[stride + group], r = stats[2 * stride + group];
      double level = 0, along_hat = 0;
      for (int64_t c = group * width; c < (group + 1) * width; ++c) {
        const double sum = l.sums[c], raw = l.sums[channels + c];
        const double dots = near ? (raw - ((double)pivot + (double)rest) * sum) * (double)r
                                 : raw - (double)(rest * r) * sum;
        level += sum * (double)gain[c], along_hat += dots * (double)gain[c];
        if (a.dgain) ((A*)a.dgain)[sample * channels + c] = (A)dots;
        if (a.dbias) ((A*)a.dbias)[sample * channels + c] = (A)sum;
      }
      const Slopes<A> slopes = slopes_of(rest, r, along_hat, level, n);
      for (int64_t c = group * width; c < (group + 1) * width; ++c) {
        by_dy[c] = gain[c] * slopes.scale;
        by_hat[c] = near ? slopes.by_hat * r : slopes.by_hat;
        l.constant[c] = near ? slopes.constant - pivot * by_hat[c] : slopes.constant;
      }
    }
  }
  if (stages & FINISH) {
    const int64_t last = least(end * step, a.length);
    for (int64_t position = begin * step; position < last; ++position) {
      const T *in = x + position * channels, *up = dy + position * channels;
      T* to = dx + position * channels;
      const bool past = a.stream && begins_a_line(to);
      const auto add = [&](auto hat, auto at) NW_ALWAYS {
        write(to, at, fma(hat, read(by_hat, at), fma(read(up, at), read(by_dy, at), read(l.constant, at))), past);
      };
      if (near)
        along<A, false>(channels, [&](auto at) NW_ALWAYS { add(read(in, at), at); });
      else
        along<A, false>(channels, [&](auto at) NW_ALWAYS {
          add((read(in, at) - read(l.pivot, at)) * read(rstd, at), at);
        });
    }
  }
  if (a.stream) stream_end();
}

}  // namespace normwise::NW_ISA
