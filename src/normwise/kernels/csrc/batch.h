// Norms over a batch: BatchNorm of planes and of columns, with and without a mask, forward and backward.
//
// Statistics are those of small chunks that stay in the cache for two sweeps (mean, then centred squares), merged as
// in Chan, Golub and LeVeque 1983, doi.org/10.2307/2683386: memory is read once for them, whatever the mean.
#pragma once

#include "batch_table.h"
#include "isa.h"
#include "lot.h"

namespace normwise::NW_ISA {

constexpr int64_t CHUNK = 4096;   // elements of a plane: 16 KiB of float32, half of the smallest first-level cache
constexpr int64_t STRIP = 512;      // columns that are measured together
// Rows that are gone through column by column. They stay near each other in memory, which is read ahead of use only
// then; measuring merges after each lot, which must not cost much beside it.
constexpr int64_t ROWS_MEASURED = 32, ROWS_MOST = 64;

template <class T>
constexpr bool IN_PAIRS = __is_same(T, Bf16);  // x, y, dy and dx are of one type

// -- masks: bytes of 0 and 1 ---------------------------------------------------------------------------

template <class A>
struct Bytes;
template <>
struct Bytes<float> {
  typedef uint8_t Each __attribute__((vector_size(NW_BYTES / 4)));
  typedef uint16_t Pairs __attribute__((vector_size(NW_BYTES / 2)));
};
template <>
struct Bytes<double> {
  typedef uint8_t Each __attribute__((vector_size(NW_BYTES / 8)));
};

template <class A>
NW_INLINE V<A> only(V<A> v, typename Native<A>::Bits real) {
  using Bits = typename Native<A>::Bits;
  return (V<A>)((Bits)v & -real);  // not a product: padding may hold NaN
}
template <class A>
NW_INLINE V<A> only(V<A> v, const uint8_t* real) {
  typename Bytes<A>::Each bytes;
  memcpy(&bytes, real, sizeof bytes);
  return only<A>(v, __builtin_convertvector(bytes, typename Native<A>::Bits));
}

// The value where it is real, else 0.
template <class A, bool PAIRED>
NW_INLINE Lot<A> keep(Lot<A> lot, const uint8_t* real, Block<PAIRED> at) {
  if constexpr (PAIRED) {
    NW_EACH if (k % 2 == 0) {
      typename Bytes<A>::Pairs pairs;
      memcpy(&pairs, real + at.i + k * LANES<A>, sizeof pairs);
      lot.v[k] = only<A>(lot.v[k], __builtin_convertvector(pairs & 0xff, I32));
      lot.v[k + 1] = only<A>(lot.v[k + 1], __builtin_convertvector(pairs >> 8, I32));
    }
  } else {
    NW_EACH lot.v[k] = only<A>(lot.v[k], real + at.i + k * LANES<A>);
  }
  return lot;
}
NW_INLINE F32 keep(F32 v, const uint8_t* real, Part at) { return only<float>(v, real + at.i); }
NW_INLINE V<double> keep(V<double> v, const uint8_t* real, Part at) { return only<double>(v, real + at.i); }
NW_INLINE float keep(float a, const uint8_t* real, One at) { return real[at.i] ? a : 0.0f; }
NW_INLINE double keep(double a, const uint8_t* real, One at) { return real[at.i] ? a : 0.0; }

template <bool MASKED, class Value, class At>
NW_INLINE Value where_real(Value value, const uint8_t* real, At at) {
  if constexpr (MASKED) return keep(value, real, at);
  return value;
}

NW_APART int64_t count_real(const uint8_t* real, int64_t n) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += real[i];
  return count;
}

// -- planes ----------------------------------------------------------------------------------------------

// The units of a block, and the channels of a group.
struct Task {
  int64_t block, group, first, last, channel, end;
  Task(const Batch& b, int64_t task)
      : block(task / b.groups),
        group(task % b.groups),
        first(block * b.units() / b.blocks),
        last((block + 1) * b.units() / b.blocks),
        channel(group * b.width),
        end(least(b.channels, channel + b.width)) {}
};

NW_INLINE double fma(float a, float b, double c) { return (double)a * b + c; }

// A sum as in lot.h, whose single elements and last steps are added up in double: planes may be that small.
template <class A>
struct Total {
  Lot<A> lot{};
  V<A> part{};
  double one = 0;
  template <bool PAIRED>
  Lot<A>& of(Block<PAIRED>) {
    return lot;
  }
  V<A>& of(Part) { return part; }
  double& of(One) { return one; }
  double value() const {
    V<A> v = part;
    NW_EACH v += lot.v[k];
    typedef A Few __attribute__((vector_size(16)));
    constexpr int FEW = NW_BYTES / 16, LAST = 16 / sizeof(A);
    Few few[FEW];
    memcpy(few, &v, sizeof v);
    for (int half = FEW / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) few[i] += few[i + half];
    double sum = one;
    for (int i = 0; i < LAST; ++i) sum += few[0][i];
    return sum;
  }
};

struct ChunkMoments {
  double mean, squares;
};

// Mean and centred squares of `count` real elements among n; the rounding of the mean is taken back.
template <class T, bool MASKED>
NW_INLINE ChunkMoments measure_chunk(const T* x, const uint8_t* real, int64_t n, Acc<T> count) {
  using A = Acc<T>;
  Total<A> sum, rest, squares;
  along<A, IN_PAIRS<T>>(
      n, [&](auto at) NW_ALWAYS { sum.of(at) = sum.of(at) + where_real<MASKED>(read(x, at), real, at); });
  const A mean = (A)(sum.value() / count);
  along<A, IN_PAIRS<T>>(n, [&](auto at) NW_ALWAYS {
    const auto c = where_real<MASKED>(read(x, at) - mean, real, at);
    rest.of(at) = rest.of(at) + c;
    squares.of(at) = fma(c, c, squares.of(at));
  });
  const double left = rest.value();
  return {mean + left / count, squares.value() - left * left / count};
}

// Adds the moments of `count` elements to those of `before`.
NW_INLINE void merge_into(double& mean, double& squares, ChunkMoments part, double share, double spread) {
  const double delta = part.mean - mean;
  mean += delta * share;
  squares += part.squares + delta * delta * spread;
}

template <class T, bool MASKED>
void measure_planes(const BatchMeasure& a, int64_t begin, int64_t end) {
  const Batch& b = a.batch;
  for (int64_t t = begin; t < end; ++t) {
    const Task task(b, t);
    double *means = a.means + task.block * b.channels, *squares = a.squares + task.block * b.channels;
    for (int64_t c = task.channel; c < task.end; ++c) means[c] = squares[c] = 0;
    double before = 0;
    for (int64_t unit = task.first; unit < task.last; ++unit) {
      const int64_t n = unit / b.spans, first = unit % b.spans * b.span, last = least(b.inner, first + b.span);
      for (int64_t from = first; from < last; from += CHUNK) {
        const int64_t size = least(CHUNK, last - from);
        const uint8_t* real = MASKED ? b.real + n * b.inner + from : nullptr;
        const double count = MASKED ? count_real(real, size) : size;
        if (count == 0) continue;
        const double share = count / (before + count), spread = before * share;
        const T* x = (const T*)a.x + n * b.channels * b.inner + from;
        for (int64_t c = task.channel; c < task.end; ++c) {
          look_up_next(x + c * b.inner, size);
          merge_into(
              means[c], squares[c], measure_chunk<T, MASKED>(x + c * b.inner, real, size, (Acc<T>)count), share, spread);
        }
        before += count;
      }
    }
  }
}

template <class T, bool MASKED>
void forward_planes(const BatchForward& a, int64_t begin, int64_t end) {
  using A = Acc<T>;
  const Batch& b = a.batch;
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t plane = piece / b.spans, c = plane % b.channels, from = piece % b.spans * b.span;
    const int64_t n = least(b.span, b.inner - from);
    const T* x = (const T*)a.x + plane * b.inner + from;
    T* y = (T*)a.y + plane * b.inner + from;
    const bool past = a.stream && begins_a_line(y);
    const uint8_t* real = MASKED ? b.real + plane / b.channels * b.inner + from : nullptr;
    const A mean = ((const A*)a.mean)[c], gain = ((const A*)a.gain)[c], addend = ((const A*)a.addend)[c];
    look_up_next(x, n);
    if (!past) look_up_next(y, n);
    along<A, IN_PAIRS<T>>(n, [&](auto at) NW_ALWAYS {
      write(y, at, where_real<MASKED>(fma(read(x, at) - mean, gain, addend), real, at), past);
    });
  }
  if (a.stream) stream_end();
}

template <class T, bool MASKED>
void sum_planes(const BatchSums& a, int64_t begin, int64_t end) {
  using A = Acc<T>;
  const Batch& b = a.batch;
  for (int64_t t = begin; t < end; ++t) {
    const Task task(b, t);
    double *sums = a.sums + task.block * b.channels, *dots = a.dots + task.block * b.channels;
    for (int64_t c = task.channel; c < task.end; ++c) sums[c] = dots[c] = 0;
    for (int64_t unit = task.first; unit < task.last; ++unit) {
      const int64_t n = unit / b.spans, first = unit % b.spans * b.span, last = least(b.inner, first + b.span);
      for (int64_t c = task.channel; c < task.end; ++c) {
        const A mean = ((const A*)a.mean)[c];
        for (int64_t from = first; from < last; from += CHUNK) {
          const int64_t start = (n * b.channels + c) * b.inner + from;
          const T *x = (const T*)a.x + start, *dy = (const T*)a.dy + start;
          const uint8_t* real = MASKED ? b.real + n * b.inner + from : nullptr;
          Total<A> sum, dot;
          look_up_next(x, least(CHUNK, last - from)), look_up_next(dy, least(CHUNK, last - from));
          along<A, IN_PAIRS<T>>(least(CHUNK, last - from), [&](auto at) NW_ALWAYS {
            const auto d = where_real<MASKED>(read(dy, at), real, at);
            sum.of(at) = sum.of(at) + d;
            dot.of(at) = fma(d, where_real<MASKED>(read(x, at) - mean, real, at), dot.of(at));
          });
          sums[c] += sum.value();
          dots[c] += dot.value();
        }
      }
    }
  }
}

template <class T, bool MASKED, bool GIVEN>
void backward_planes(const BatchBackward& a, int64_t begin, int64_t end) {
  using A = Acc<T>;
  const Batch& b = a.batch;
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t plane = piece / b.spans, c = plane % b.channels, from = piece % b.spans * b.span;
    const int64_t n = least(b.span, b.inner - from), start = plane * b.inner + from;
    const T *x = (const T*)a.x + start, *dy = (const T*)a.dy + start;
    T* dx = (T*)a.dx + start;
    const bool past = a.stream && begins_a_line(dx);
    const uint8_t* real = MASKED ? b.real + plane / b.channels * b.inner + from : nullptr;
    const A gain = ((const A*)a.gain)[c];
    look_up_next(dy, n);
    if (!GIVEN) look_up_next(x, n);
    if (!past) look_up_next(dx, n);
    if constexpr (GIVEN) {
      along<A, IN_PAIRS<T>>(
          n, [&](auto at) NW_ALWAYS { write(dx, at, where_real<MASKED>(read(dy, at) * gain, real, at), past); });
    } else {
      const A mean = ((const A*)a.mean)[c], level = ((const A*)a.level)[c];
      const A slope = ((const A*)a.along)[c], addend = ((const A*)a.addend)[c];
      along<A, IN_PAIRS<T>>(n, [&](auto at) NW_ALWAYS {
        const auto towards_x = fma(read(x, at) - mean, slope, addend);
        write(dx, at, where_real<MASKED>(fma(read(dy, at) - level, gain, towards_x), real, at), past);
      });
    }
  }
  if (a.stream) stream_end();
}

// -- columns ---------------------------------------------------------------------------------------------

// The next real rows of a block, at most `most`.
template <class T>
struct RealRows {
  const T* at[ROWS_MEASURED];
  int64_t index[ROWS_MEASURED];
  int64_t count;
  void take(const Batch& b, const T* x, int64_t& row, int64_t last, int64_t most) {
    for (count = 0; row < last && count < most; ++row)
      if (!b.real || b.real[row]) index[count] = row, at[count++] = x + row * b.channels;
  }
};

// sum(value(row)) over rows, in two sums that are added up side by side.
template <class Value>
NW_INLINE auto sum_of_rows(int64_t rows, Value value) {
  decltype(value((int64_t)0)) even{}, odd{};
  int64_t r = 0;
  for (; r + 2 <= rows; r += 2) even = even + value(r), odd = odd + value(r + 1);
  if (r < rows) even = even + value(r);
  return even + odd;
}

template <class T>
void measure_columns(const BatchMeasure& a, int64_t begin, int64_t end) {
  using A = Acc<T>;
  const Batch& b = a.batch;
  alignas(64) A base[STRIP], means[STRIP], squares[STRIP];
  const int64_t ahead = ROWS_MEASURED * b.channels;  // elements: to the next rows
  RealRows<T> rows;
  for (int64_t t = begin; t < end; ++t) {
    const Task task(b, t);
    const int64_t width = task.end - task.channel;
    for (int64_t i = 0; i < width; ++i) base[i] = means[i] = squares[i] = 0;
    A before = 0;
    for (int64_t row = task.first; rows.take(b, (const T*)a.x + task.channel, row, task.last, ROWS_MEASURED), rows.count > 0;) {
      const A count = (A)rows.count, part = (A)1 / count, share = count / (before + count), spread = before * share;
      along<A, IN_PAIRS<T>>(width, [&](auto at) NW_ALWAYS {
        // each sweep asks for half of the rows to come
        const auto mean = sum_of_rows(rows.count, [&](int64_t r) NW_ALWAYS {
          if (r % 2 == 0) fetch(rows.at[r] + ahead, at);
          return read(rows.at[r], at);
        }) * part;
        decltype(read(rows.at[0], at)) rest{}, even{}, odd{};
        int64_t r = 0;
        for (; r + 2 <= rows.count; r += 2) {
          fetch(rows.at[r + 1] + ahead, at);
          const auto c = read(rows.at[r], at) - mean, d = read(rows.at[r + 1], at) - mean;
          rest = rest + (c + d), even = fma(c, c, even), odd = fma(d, d, odd);
        }
        if (r < rows.count) {
          const auto c = read(rows.at[r], at) - mean;
          rest = rest + c, even = fma(c, c, even);
        }
        // means are kept relative to that of the first chunk: no digits are lost to an offset
        if (before == 0) write(base, at, mean);
        const auto left = rest * part, known = read(means, at), delta = (mean - read(base, at)) + left - known;
        write(means, at, known + delta * share);
        write(squares, at, read(squares, at) + ((even + odd) - rest * left) + delta * delta * spread);
      });
      before += count;
    }
    for (int64_t c = task.channel; c < task.end; ++c) {
      const int64_t i = position(c - task.channel, width, IN_PAIRS<T>);
      a.means[task.block * b.channels + c] = (double)base[i] + means[i];
      a.squares[task.block * b.channels + c] = squares[i];
    }
  }
}

// As many rows as are 512 bytes of memory: measured on a Zen 4, where longer detours cost a third of the speed.
template <class T>
NW_INLINE int64_t rows_in_a_run(int64_t channels, int64_t limit) {
  return most(1, least(limit, 512 / (channels * (int64_t)sizeof(T))));
}

// Rows of a piece of columns, few enough that they are in the cache while one column after the other is done.
template <class T>
struct PieceRows {
  int64_t at[ROWS_MOST];
  int64_t count;
  void take(const Batch& b, T* out, int64_t& row, int64_t last) {
    const int64_t limit = rows_in_a_run<T>(b.channels, ROWS_MOST);
    for (count = 0; row < last && count < limit; ++row) {
      if (!b.real || b.real[row])
        at[count++] = row * b.channels;
      else
        memset(out + row * b.channels, 0, b.channels * sizeof(T));
    }
  }
};

template <class T>
void forward_columns(const BatchForward& a, int64_t begin, int64_t end) {
  using A = Acc<T>;
  const Batch& b = a.batch;
  const T* x = (const T*)a.x;
  T* y = (T*)a.y;
  const bool past = a.stream && begins_a_line(y) && begins_a_line(y + b.channels);
  PieceRows<T> rows;
  for (int64_t row = begin; row < end;) {
    const int64_t from = row * b.channels;
    rows.take(b, y, row, end);
    const int64_t run = row * b.channels - from;
    look_up_next(x + from, run);
    if (!past) look_up_next(y + from, run);
    along<A, IN_PAIRS<T>>(b.channels, [&](auto at) NW_ALWAYS {
      const auto mean = read((const A*)a.mean, at), gain = read((const A*)a.gain, at), add = read((const A*)a.addend, at);
      for (int64_t r = 0; r < rows.count; ++r)
        write(y + rows.at[r], at, fma(read(x + rows.at[r], at) - mean, gain, add), past);
    });
  }
  if (past) stream_end();
}

template <class T>
void sum_columns(const BatchSums& a, int64_t begin, int64_t end) {
  using A = Acc<T>;
  const Batch& b = a.batch;
  alignas(64) A sum[STRIP], dot[STRIP];
  double sums[STRIP], dots[STRIP];
  RealRows<T> rows;
  for (int64_t t = begin; t < end; ++t) {
    const Task task(b, t);
    const int64_t width = task.end - task.channel, lot = b.groups > 1 ? 8 : rows_in_a_run<T>(b.channels, 8);
    const A* means = (const A*)a.mean + task.channel;
    const T* dy = (const T*)a.dy + task.channel;
    for (int64_t i = 0; i < width; ++i) sums[i] = dots[i] = sum[i] = dot[i] = 0;
    int64_t added = 0;
    for (int64_t row = task.first;
         rows.take(b, (const T*)a.x + task.channel, row, task.last, lot), rows.count > 0;) {
      along<A, IN_PAIRS<T>>(width, [&](auto at) NW_ALWAYS {
        const auto mean = read(means, at);
        auto total = read(sum, at), along_x = read(dot, at);
        for (int64_t r = 0; r < rows.count; ++r) {
          const auto d = read(dy + rows.index[r] * b.channels, at);
          total = total + d, along_x = fma(d, read(rows.at[r], at) - mean, along_x);
        }
        write(sum, at, total);
        write(dot, at, along_x);
      });
      if (++added % 32 && row < task.last) continue;  // few numbers are added up in float32 one after the other
      for (int64_t i = 0; i < width; ++i) {
        sums[i] += sum[i], dots[i] += dot[i];
        sum[i] = dot[i] = 0;
      }
    }
    for (int64_t c = task.channel; c < task.end; ++c) {
      const int64_t i = position(c - task.channel, width, IN_PAIRS<T>);
      a.sums[task.block * b.channels + c] = sums[i] + sum[i];
      a.dots[task.block * b.channels + c] = dots[i] + dot[i];
    }
  }
}

template <class T, bool GIVEN>
void backward_columns(const BatchBackward& a, int64_t begin, int64_t end) {
  using A = Acc<T>;
  const Batch& b = a.batch;
  const T *x = (const T*)a.x, *dy = (const T*)a.dy;
  T* dx = (T*)a.dx;
  const bool past = a.stream && begins_a_line(dx) && begins_a_line(dx + b.channels);
  PieceRows<T> rows;
  for (int64_t row = begin; row < end;) {
    const int64_t from = row * b.channels;
    rows.take(b, dx, row, end);
    const int64_t run = row * b.channels - from;
    look_up_next(dy + from, run);
    if (!GIVEN) look_up_next(x + from, run);
    if (!past) look_up_next(dx + from, run);
    along<A, IN_PAIRS<T>>(b.channels, [&](auto at) NW_ALWAYS {
      const auto gain = read((const A*)a.gain, at);
      if constexpr (GIVEN) {
        for (int64_t r = 0; r < rows.count; ++r) write(dx + rows.at[r], at, read(dy + rows.at[r], at) * gain, past);
      } else {
        const auto mean = read((const A*)a.mean, at), level = read((const A*)a.level, at);
        const auto slope = read((const A*)a.along, at), addend = read((const A*)a.addend, at);
        for (int64_t r = 0; r < rows.count; ++r) {
          const auto towards_x = fma(read(x + rows.at[r], at) - mean, slope, addend);
          write(dx + rows.at[r], at, fma(read(dy + rows.at[r], at) - level, gain, towards_x), past);
        }
      }
    });
  }
  if (past) stream_end();
}

// -- channels of large numbers -----------------------------------------------------------------------------

// visit(index) for the real elements of a channel.
template <class Visit>
NW_INLINE void each_real(const Batch& b, int64_t channel, Visit visit) {
  for (int64_t n = 0; n < b.outer; ++n)
    for (int64_t i = 0; i < b.inner; ++i)
      if (!b.real || b.real[n * b.inner + i]) visit((n * b.channels + channel) * b.inner + i);
}

struct ScaledMoments {
  double mean, variance, power;  // of the channel times `power`
};

// As eager does: elements of 2^41 and more (2^321 in float64) come down to it by an exact power of two.
template <class T>
NW_APART ScaledMoments measure_channel(const Batch& b, const T* x, int64_t channel, double count) {
  double peak = 0, sum = 0, rest = 0, squares = 0;
  each_real(b, channel, [&](int64_t i) {
    const double size = magnitude((double)load1(x + i));
    if (!(size <= peak) && peak == peak) peak = size;
  });
  if (!(peak < __builtin_huge_val())) return {__builtin_nan(""), __builtin_nan(""), 1};
  constexpr int LARGE = Range<Acc<T>>::LARGE;
  const int exponent = peak > 0 ? __builtin_ilogb(peak) : 0;
  const double power = exponent > LARGE ? __builtin_ldexp(1.0, LARGE - exponent) : 1.0;
  each_real(b, channel, [&](int64_t i) { sum += load1(x + i) * power; });
  const double mean = sum / count;
  each_real(b, channel, [&](int64_t i) {
    const double c = load1(x + i) * power - mean;
    rest += c, squares += c * c;
  });
  return {mean + rest / count, (squares - rest * rest / count) / count, power};
}

// (x - mean) * rstd, where the difference might overflow.
template <class T>
NW_INLINE double hat_of(const BatchChannel& a, int64_t i) {
  constexpr double SMALL = 0x1p-64;
  return (load1((const T*)a.x + i) * SMALL - a.mean * SMALL) * (a.rstd / SMALL);
}

template <class T>
void channel_forward(const BatchChannel& a) {
  each_real(a.batch, a.channel, [&](int64_t i) {
    store1((T*)a.out + i, (Acc<T>)(hat_of<T>(a, i) * a.gain + a.bias));
  });
}

template <class T>
void channel_sums(const BatchChannel& a, double* sum, double* dot) {
  *sum = *dot = 0;
  each_real(a.batch, a.channel, [&](int64_t i) {
    const double d = load1((const T*)a.dy + i);
    *sum += d, *dot += d * hat_of<T>(a, i);
  });
}

template <class T>
void channel_backward(const BatchChannel& a) {
  each_real(a.batch, a.channel, [&](int64_t i) {
    const double d = load1((const T*)a.dy + i);
    store1((T*)a.out + i, (Acc<T>)((d - a.level - hat_of<T>(a, i) * a.along) * a.gain));
  });
}

template <class T>
void narrow_sums(const double* from, void* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store1((T*)to + i, (Acc<T>)from[i]);
}

// -- the entries of the table ------------------------------------------------------------------------------

template <class T>
void batch_merge(const BatchMerge& a, int64_t begin, int64_t end) {
  using A = Acc<T>;
  const BatchMeasure& m = a.measured;
  const Batch& b = m.batch;
  double before = m.counts[0];  // the first block's place holds the sums
  for (int64_t block = 1; block < b.blocks; ++block) {
    const double count = m.counts[block];
    if (count == 0) continue;
    const double share = count / (before + count), spread = before * share;
    const double *means = m.means + block * b.channels, *squares = m.squares + block * b.channels;
    for (int64_t c = begin; c < end; ++c)
      merge_into(m.means[c], m.squares[c], {means[c], squares[c]}, share, spread);
    before += count;
  }
  const double missing = b.real ? 0.0 : __builtin_nan("");  // of no element eager's masked mean is 0, its mean is not
  A* stats = (A*)a.stats;
  for (int64_t c = begin; c < end; ++c) {
    double mean = before > 0 ? m.means[c] : missing, variance = before > 0 ? m.squares[c] / before : missing;
    double power = 1;
    if (before > 0 && !(variance < Range<A>::SQUARES && magnitude(mean) < Range<A>::MEAN)) {
      const ScaledMoments again = measure_channel(b, (const T*)m.x, c, before);
      mean = again.mean, variance = again.variance, power = again.power;
    }
    variance = variance < 0 ? 0 : variance;  // squares - rest^2 / n of a constant channel
    const double rstd = power / root(variance + a.eps);
    mean /= power, variance = variance / power / power;
    const A high = (A)mean;
    stats[MEAN * b.channels + c] = high;
    stats[REST * b.channels + c] = (A)(mean - high);
    stats[RSTD * b.channels + c] = (A)rstd;
    stats[VARIANCE * b.channels + c] = (A)variance;
    stats[ELEMENTS * b.channels + c] = (A)before;
  }
}

template <class T>
void batch_measure(const BatchMeasure& a, int64_t begin, int64_t end) {
  if (a.batch.inner == 1) return measure_columns<T>(a, begin, end);
  return a.batch.real ? measure_planes<T, true>(a, begin, end) : measure_planes<T, false>(a, begin, end);
}

template <class T>
void batch_forward(const BatchForward& a, int64_t begin, int64_t end) {
  if (a.batch.inner == 1) return forward_columns<T>(a, begin, end);
  return a.batch.real ? forward_planes<T, true>(a, begin, end) : forward_planes<T, false>(a, begin, end);
}

template <class T>
void batch_sums(const BatchSums& a, int64_t begin, int64_t end) {
  if (a.batch.inner == 1) return sum_columns<T>(a, begin, end);
  return a.batch.real ? sum_planes<T, true>(a, begin, end) : sum_planes<T, false>(a, begin, end);
}

template <class T>
void batch_backward(const BatchBackward& a, int64_t begin, int64_t end) {
  if (a.batch.inner == 1) return a.along ? backward_columns<T, false>(a, begin, end) : backward_columns<T, true>(a, begin, end);
  if (a.batch.real)
    return a.along ? backward_planes<T, true, false>(a, begin, end) : backward_planes<T, true, true>(a, begin, end);
  return a.along ? backward_planes<T, false, false>(a, begin, end) : backward_planes<T, false, true>(a, begin, end);
}

}  // namespace normwise::NW_ISA
