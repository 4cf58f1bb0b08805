// Mean and variance as torch's layer_norm finds them: Welford's recurrence, in chunks, merged pairwise.
#pragma once

#include "sums.h"

namespace normwise::NW_ISA {

template <class A>
NW_INLINE W<A> wide_fma(W<A> a, W<A> b, W<A> c) {
#if NW_BYTES > 16
  if constexpr (sizeof(A) == 4)
    return (W<A>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  else
    return (W<A>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
  return a * b + c;
#endif
}

// Of float32, float64 or float16; bfloat16 is read in pairs.
template <class A, class T>
NW_INLINE W<A> wide_load(const T* p) {
  W<A> v;
  if constexpr (sizeof(T) == sizeof(A)) {
    memcpy(&v, p, sizeof v);
  } else {
#if NW_BYTES > 16
    __m128i bits;
    memcpy(&bits, p, sizeof bits);
    v = (W<A>)_mm256_cvtph_ps(bits);
#else
    for (int64_t i = 0; i < 8; ++i) v[i] = load1(p + i);
#endif
  }
  return v;
}

template <class A>
struct Moments {  // of a number or of each lane of a vector
  A mean, square;  // square: the sum of (x - mean)^2
};

// Chan's merge of a set into one of n elements, of which there are some. Of the case that nearly all merges are, of
// sets of equal size, the result is known without a division; it is the same to the bit.
template <class A>
NW_INLINE void merge(int64_t count, Moments<W<A>> set, int64_t n, Moments<W<A>>& into) {
  const A share = n == count ? (A)0.5 : (A)count / (A)(n + count);
  const W<A> delta = set.mean - into.mean, part = share * delta;
  into.square = wide_fma<A>(delta * (A)n, part, set.square + into.square);
  into.mean = into.mean + part;
}

// The next 16 numbers of bfloat16, those at even and those at odd places; and back to natural order.
NW_INLINE void read_pairs(const Bf16* p, W<float>& even, W<float>& odd) {
  typedef uint32_t Words __attribute__((vector_size(32)));
  Words pairs;
  memcpy(&pairs, p, sizeof pairs);
  even = (W<float>)(pairs << 16);
  odd = (W<float>)(pairs & 0xffff0000u);
}
NW_INLINE void unpair(W<float>& even, W<float>& odd) {
  const W<float> a = even, b = odd;
  even = __builtin_shuffle(a, b, (Wide<float>::Places){0, 8, 1, 9, 2, 10, 3, 11});
  odd = __builtin_shuffle(a, b, (Wide<float>::Places){4, 12, 5, 13, 6, 14, 7, 15});
}

// The row to come, or null. It is asked for while this one is measured: that takes the processor longer than a sum of
// squares does, and memory would have nothing to do.
template <class T>
struct Ahead {
  const T* row = nullptr;
  bool near = false;  // into the first-level cache, else into the second
};

// Welford's recurrence over `steps` vectors, for QUEUES independent sets at once to hide its latency: chunks of a row
// or rows, `apart` elements from one to the next.
template <class A, class T, int QUEUES, int SPAN>
NW_INLINE void welford(const T* x, int64_t apart, int64_t steps, Moments<W<A>>* sets, Ahead<T> ahead) {
  static constexpr A SHARES[16] = {A(1),      A(1) / 2,  A(1) / 3,  A(1) / 4,  A(1) / 5,  A(1) / 6,  A(1) / 7,  A(1) / 8,
                                   A(1) / 9,  A(1) / 10, A(1) / 11, A(1) / 12, A(1) / 13, A(1) / 14, A(1) / 15, A(1) / 16};
  W<A> means[QUEUES * SPAN] = {}, squares[QUEUES * SPAN] = {};
  for (int64_t step = 0; step < steps; ++step) {
    const W<A> share = SHARES[step] - W<A>{};
    W<A> v[QUEUES * SPAN];
    if (ahead.row && step % 2 == 0)  // a line of memory is two steps
      _Pragma("GCC unroll 8") for (int q = 0; q < QUEUES; ++q) {
        const T* next = ahead.row + q * apart + step * SPAN * WIDTH<A>;
        ahead.near ? __builtin_prefetch(next, 0, 3) : __builtin_prefetch(next, 0, 2);
      }
    _Pragma("GCC unroll 8") for (int q = 0; q < QUEUES; ++q) {
      const T* from = x + q * apart + step * SPAN * WIDTH<A>;
      if constexpr (__is_same(T, Bf16)) {
        read_pairs(from, v[q * SPAN], v[q * SPAN + 1]);
      } else {
        _Pragma("GCC unroll 2") for (int half = 0; half < SPAN; ++half)
          v[q * SPAN + half] = wide_load<A>(from + half * WIDTH<A>);
      }
    }
    _Pragma("GCC unroll 8") for (int q = 0; q < QUEUES * SPAN; ++q) {
      const W<A> delta = v[q] - means[q];
      means[q] = wide_fma<A>(share, delta, means[q]);
      squares[q] = wide_fma<A>(delta, v[q] - means[q], squares[q]);
    }
  }
  if constexpr (__is_same(T, Bf16)) {
    _Pragma("GCC unroll 4") for (int q = 0; q < QUEUES * SPAN; q += 2) {
      unpair(means[q], means[q + 1]);
      unpair(squares[q], squares[q + 1]);
    }
  }
  _Pragma("GCC unroll 8") for (int q = 0; q < QUEUES * SPAN; ++q) {
    sets[q] = {means[q], squares[q]};
  }
}

// What torch's merges make of 1, 2, 4 or 8 chunks of 16 steps that follow each other: a merge of known sizes.
template <class A, int SPAN, int CHUNKS>
NW_INLINE Moments<W<A>> merged(const Moments<W<A>>* sets) {
  Moments<W<A>> all = sets[0];
  if constexpr (CHUNKS <= 2) {
    _Pragma("GCC unroll 4") for (int k = 1; k < CHUNKS * SPAN; ++k) merge<A>(16, sets[k], 16 * k, all);
  } else {
    constexpr int HALF = CHUNKS / 2;
    all = merged<A, SPAN, HALF>(sets);
    merge<A>(16 * HALF * SPAN, merged<A, SPAN, HALF>(sets + HALF * SPAN), 16 * HALF * SPAN, all);
  }
  return all;
}

// The lanes one after the other, each of `added` numbers: lane(i) is a number, or the same lane of several rows.
template <class A, class N, class Lane>
NW_INLINE Moments<N> lanes_merged(int64_t added, Lane lane) {
  const auto fused = [](N a, N b, N c) NW_ALWAYS {
    if constexpr (__is_same(N, A))
      return fma(a, b, c);
    else
      return wide_fma<A>(a, b, c);
  };
  Moments<N> all = lane(0);
  _Pragma("GCC unroll 8") for (int64_t i = 1; i < WIDTH<A>; ++i) {
    const Moments<N> next = lane(i);
    const N share = (A)1 / (A)(i + 1) - N{}, delta = next.mean - all.mean;
    all.mean = fused(share, delta, all.mean);
    all.square = all.square + fused(delta * delta * share, (A)i * (A)added - N{}, next.square);
  }
  return all;
}

template <class T>
NW_INLINE Moments<Acc<T>> torch_moments(const T* x, int64_t n, Ahead<T> ahead) {
  using A = Acc<T>;
  constexpr int64_t CHUNK = 16;
  constexpr int SPAN = sizeof(A) / sizeof(T);  // vectors of A in one vector of T
  constexpr int64_t EACH = CHUNK * WIDTH<A> * SPAN;
  constexpr int64_t EXACT = 1 << 24;  // below, a count is a float32
  const int64_t vectors = n / (WIDTH<A> * SPAN), chunks = (vectors + CHUNK - 1) / CHUNK;
  const int64_t last = most(ceil_log2(chunks), 1) - 1;  // level
  int64_t counts[64];
  Moments<W<A>> levels[64];
  int64_t held = 0;  // a bit for each level that holds a set
  const auto put = [&](int64_t level, int64_t size, Moments<W<A>> set) NW_ALWAYS {
    if (held >> level & 1) {
      merge<A>(size, set, counts[level], levels[level]);
      counts[level] += size;
    } else {
      levels[level] = set, counts[level] = size;
      held |= (int64_t)1 << level;
    }
  };
  const auto raise = [&](int64_t level, int64_t ones) NW_ALWAYS {
    for (; level < last && (ones & 1) == 0; ++level, ones >>= 1) {
      put(level + 1, counts[level], levels[level]);
      held ^= (int64_t)1 << level;
    }
  };
  int64_t chunk = 0;
  const auto take = [&](auto times) NW_ALWAYS {  // as many chunks at once as are there
    constexpr int QUEUES = decltype(times)::VALUE, LEVEL = __builtin_ctz(QUEUES);
    for (; (chunk + QUEUES) * CHUNK <= vectors; chunk += QUEUES) {
      Moments<W<A>> sets[QUEUES * SPAN];
      const int64_t from = chunk * EACH;
      welford<A, T, QUEUES, SPAN>(x + from, EACH, CHUNK, sets, ahead.row ? Ahead<T>{ahead.row + from, ahead.near} : ahead);
      const int64_t level = least(last, LEVEL);
      put(level, QUEUES * CHUNK * SPAN, merged<A, SPAN, QUEUES>(sets));
      raise(level, (chunk + QUEUES) >> level);
    }
  };
  if constexpr (SPAN == 1) take(Times<8>{});  // eight vectors under way hide the latency
  take(Times<4>{});
  take(Times<2>{});
  while (chunk < chunks) {
    Moments<W<A>> sets[SPAN];
    const int64_t steps = least(CHUNK, vectors - chunk * CHUNK);
    welford<A, T, 1, SPAN>(x + chunk * EACH, 0, steps, sets, {});
    for (int half = 0; half < SPAN; ++half) put(0, steps, sets[half]);
    raise(0, ++chunk);
  }
  for (int64_t level = 1; level <= last; ++level)
    if (held >> level & 1) put(0, counts[level], levels[level]);
  const Moments<W<A>> found = held ? levels[0] : Moments<W<A>>{};
  int64_t count = 0;
  A mean = 0, square = 0;
  for (int64_t i = vectors * WIDTH<A> * SPAN; i < n; ++i) {
    const A v = load1(x + i), delta = v - mean;
    ++count;
    mean += delta / (A)count;
    // as GCC compiled it: half precision in one instruction, the others in two
    square = sizeof(T) == 2 ? fma(delta, v - mean, square) : square + delta * (v - mean);
  }
  const int64_t added = vectors * SPAN;
  if (count == 0 && added * WIDTH<A> < EXACT)  // the same with the quotients known
    return lanes_merged<A, A>(
        added, [&](int64_t lane) NW_ALWAYS { return Moments<A>{found.mean[lane], found.square[lane]}; });
  for (int64_t lane = 0; lane < WIDTH<A>; ++lane) {
    const int64_t sum = count + added;
    const A share = sum == 0 ? (A)0 : (A)added / (A)sum, delta = found.mean[lane] - mean;
    mean = fma(share, delta, mean);
    square += fma(delta * delta * share, (A)count, found.square[lane]);
    count = sum;
  }
  return {mean, square};
}

constexpr int64_t FEW_CHUNKS = 4;

// The same of as many rows as there are lanes, each in a lane of its own; of whole vectors, at most FEW_CHUNKS chunks.
template <class T>
NW_INLINE Moments<W<Acc<T>>> moments_of_rows(const T* x, int64_t stride, int64_t n) {
  using A = Acc<T>;
  using Set = Moments<W<A>>;
  constexpr int SPAN = sizeof(A) / sizeof(T), TOGETHER = 4;  // so many rows under way hide the latency
  constexpr int64_t CHUNK = 16, STEP = WIDTH<A> * SPAN;
  const int64_t vectors = n / STEP, chunks = (vectors + CHUNK - 1) / CHUNK;
  const auto add = [](Set* into, int64_t& n, const Set* sets, int apart, int64_t count) NW_ALWAYS {
    _Pragma("GCC unroll 4") for (int row = 0; row < TOGETHER; ++row)
      if (n == 0)
        into[row] = sets[row * apart];
      else
        merge<A>(count, sets[row * apart], n, into[row]);
    n += count;
  };
  W<A> means[WIDTH<A>], squares[WIDTH<A>];
  for (int64_t row = 0; row < WIDTH<A>; row += TOGETHER) {
    Set low[TOGETHER], high[TOGETHER];  // torch's two lowest levels
    int64_t in_low = 0, in_high = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      Set sets[TOGETHER * SPAN];
      const int64_t steps = least(CHUNK, vectors - chunk * CHUNK);
      welford<A, T, TOGETHER, SPAN>(x + row * stride + chunk * CHUNK * STEP, stride, steps, sets, {});
      for (int half = 0; half < SPAN; ++half) add(low, in_low, sets + half, SPAN, steps);
      if (chunks > 2 && chunk % 2 == 1) add(high, in_high, low, 1, in_low), in_low = 0;
    }
    if (in_high > 0) add(low, in_low, high, 1, in_high);
    for (int64_t r = 0; r < TOGETHER; ++r) means[row + r] = low[r].mean, squares[row + r] = low[r].square;
  }
  turn<A>(means), turn<A>(squares);
  return lanes_merged<A, W<A>>(
      vectors * SPAN, [&](int64_t lane) NW_ALWAYS { return Set{means[lane], squares[lane]}; });
}

}  // namespace normwise::NW_ISA
