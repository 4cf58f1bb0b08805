// Sums of a row in the order of torch's CPU kernels, so that a norm has the bits of its eager definition.
//
// torch adds in vectors of 32 bytes, four at a time (128 bytes: PARTS registers here, whatever their width), and
// in levels: after 2^power blocks the lowest level is added to the next, which keeps the error of long rows small.
// Since the order is written down here, not left to the width of the machine, AVX2 and AVX-512 give the same bits.
#pragma once

#include "lot.h"

namespace normwise::NW_ISA {

NW_INLINE int64_t ceil_log2(int64_t n) { return n <= 2 ? 1 : 64 - __builtin_clzll((uint64_t)(n - 1)); }

// The last additions of a row of whole blocks: torch's four vectors, then the lanes of what they give.
template <class A, bool PAIRED>
NW_INLINE A sum_of_lanes(const A* stored) {
  constexpr int64_t WIDTH = 32 / sizeof(A);
  typedef A Half __attribute__((vector_size(16)));  // as many lanes as lie side by side in rows read in pairs
  constexpr int64_t SIDE = 16 / sizeof(A);
  Half halves[2];
  _Pragma("GCC unroll 2") for (int half = 0; half < 2; ++half) {
    _Pragma("GCC unroll 4") for (int64_t row = 0; row < 4; ++row) {
      const int64_t from = PAIRED ? position(row * WIDTH + half, BLOCK<A>, true) : row * WIDTH + half * SIDE;
      Half next;
      memcpy(&next, stored + from, sizeof next);
      halves[half] = row == 0 ? next : halves[half] + next;
    }
  }
  A sum = 0;
  _Pragma("GCC unroll 8") for (int64_t lane = 0; lane < WIDTH; ++lane)
    sum += PAIRED ? halves[lane % 2][lane / 2] : halves[lane / SIDE][lane % SIDE];
  return sum;
}

// The sum over a row of n, where add(sum, place) is the sum with the term at that place.
template <class A, bool PAIRED, class Add>
NW_INLINE A cascade(int64_t n, Add add) {
  constexpr int LEVELS = 4;
  constexpr int64_t WIDTH = 32 / sizeof(A);  // of torch's vector
  if (n < WIDTH) {                           // torch adds such rows one by one, in four sums
    A part[4] = {0, 0, 0, 0};
    int64_t i = 0;
    if (n >= 4)
      for (; i < 4; ++i) part[i] = add((A)0, One{i});
    for (; i < n; ++i) part[0] = add(part[0], One{i});
    return ((part[0] + part[1]) + part[2]) + part[3];
  }
  const int64_t blocks = n / BLOCK<A>;
  const int64_t power = most(4, ceil_log2(blocks) / LEVELS), step = (int64_t)1 << power, mask = step - 1;
  const int64_t whole = blocks & ~mask;
  Lot<A> rest{}, first{}, second{}, third{};  // variables, not an array, which would be cleared in memory
  int64_t block = 0;
  while (block < whole) {
    Lot<A> low{};
    for (const int64_t end = block + step; block < end; ++block) low = add(low, Block<PAIRED>{block * BLOCK<A>});
    first = first + low;
    if (block & (mask << power)) continue;
    second = second + first, first = Lot<A>{};
    if (block & (mask << 2 * power)) continue;
    third = third + second, second = Lot<A>{};
  }
  for (; block < blocks; ++block) rest = add(rest, Block<PAIRED>{block * BLOCK<A>});
  if (whole > 0) rest = ((rest + first) + second) + third;  // without whole steps these are +0, and no sum is -0
  A stored[BLOCK<A>];
  memcpy(stored, rest.v, sizeof stored);
  if (n % BLOCK<A> == 0) return sum_of_lanes<A, PAIRED>(stored);
  A part[BLOCK<A>];
  _Pragma("GCC unroll 32") for (int64_t i = 0; i < BLOCK<A>; ++i) part[i] = stored[position(i, BLOCK<A>, PAIRED)];
  int64_t i = blocks * BLOCK<A>;
  for (; i + WIDTH <= n; i += WIDTH)
    for (int64_t lane = 0; lane < WIDTH; ++lane) part[lane] = add(part[lane], One{i + lane});
  for (int64_t row = 1; row < 4; ++row)
    for (int64_t lane = 0; lane < WIDTH; ++lane) part[lane] += part[row * WIDTH + lane];
  A sum = 0;
  for (; i < n; ++i) sum = add(sum, One{i});
  for (int64_t lane = 0; lane < WIDTH; ++lane) sum += part[lane];
  return sum;
}

// The sum of term(place) over a row of n.
template <class A, bool PAIRED, class Term>
NW_INLINE A cascade_sum(int64_t n, Term term) {
  return cascade<A, PAIRED>(n, [&](auto sum, auto at) NW_ALWAYS { return sum + term(at); });
}

// The sum of squares of a row. The square of a half-precision number is exact in float32, so that multiplying and
// adding in one instruction gives the same bits there.
template <class T, bool PAIRED>
NW_INLINE Acc<T> sum_of_squares(const T* x, int64_t n) {
  return cascade<Acc<T>, PAIRED>(n, [&](auto sum, auto at) NW_ALWAYS {
    const auto v = read(x, at);
    if constexpr (sizeof(T) == 2)
      return fma(v, v, sum);
    else
      return sum + v * v;
  });
}

// -- mean and variance as torch's layer_norm finds them: Welford's recurrence, in chunks, merged pairwise -------

template <class A>
struct Wide;  // a vector of 32 bytes
template <>
struct Wide<float> {
  typedef float Type __attribute__((vector_size(32)));
  typedef int32_t Places __attribute__((vector_size(32)));
};
template <>
struct Wide<double> {
  typedef double Type __attribute__((vector_size(32)));
};
template <class A>
using W = typename Wide<A>::Type;

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

// Welford's recurrence over `steps` vectors, for QUEUES independent sets at once to hide its latency.
template <class A, class T, int QUEUES, int SPAN>
NW_INLINE void welford(const T* x, int64_t steps, Moments<W<A>>* sets, Ahead<T> ahead) {
  constexpr int64_t WIDTH = 32 / sizeof(A);
  static constexpr A SHARES[16] = {A(1),      A(1) / 2,  A(1) / 3,  A(1) / 4,  A(1) / 5,  A(1) / 6,  A(1) / 7,  A(1) / 8,
                                   A(1) / 9,  A(1) / 10, A(1) / 11, A(1) / 12, A(1) / 13, A(1) / 14, A(1) / 15, A(1) / 16};
  W<A> means[QUEUES * SPAN] = {}, squares[QUEUES * SPAN] = {};
  for (int64_t step = 0; step < steps; ++step) {
    const W<A> share = SHARES[step] - W<A>{};
    W<A> v[QUEUES * SPAN];
    if (ahead.row && step % 2 == 0)  // a line of memory is two steps
      _Pragma("GCC unroll 8") for (int q = 0; q < QUEUES; ++q) {
        const T* next = ahead.row + (q * 16 + step) * SPAN * WIDTH;
        ahead.near ? __builtin_prefetch(next, 0, 3) : __builtin_prefetch(next, 0, 2);
      }
    _Pragma("GCC unroll 8") for (int q = 0; q < QUEUES; ++q) {
      const T* from = x + (q * 16 + step) * SPAN * WIDTH;
      if constexpr (__is_same(T, Bf16)) {
        read_pairs(from, v[q * SPAN], v[q * SPAN + 1]);
      } else {
        _Pragma("GCC unroll 2") for (int half = 0; half < SPAN; ++half)
          v[q * SPAN + half] = wide_load<A>(from + half * WIDTH);
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

template <class T>
NW_INLINE Moments<Acc<T>> torch_moments(const T* x, int64_t n, Ahead<T> ahead) {
  using A = Acc<T>;
  constexpr int64_t WIDTH = 32 / sizeof(A), CHUNK = 16;
  constexpr int SPAN = sizeof(A) / sizeof(T);  // vectors of A in one vector of T
  constexpr int64_t EXACT = 1 << 24;  // below, a count is a float32
  const int64_t vectors = n / (WIDTH * SPAN), chunks = (vectors + CHUNK - 1) / CHUNK;
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
      const int64_t from = chunk * CHUNK * WIDTH * SPAN;
      welford<A, T, QUEUES, SPAN>(x + from, CHUNK, sets, ahead.row ? Ahead<T>{ahead.row + from, ahead.near} : ahead);
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
    welford<A, T, 1, SPAN>(x + chunk * CHUNK * WIDTH * SPAN, steps, sets, {});
    for (int half = 0; half < SPAN; ++half) put(0, steps, sets[half]);
    raise(0, ++chunk);
  }
  for (int64_t level = 1; level <= last; ++level)
    if (held >> level & 1) put(0, counts[level], levels[level]);
  const Moments<W<A>> found = held ? levels[0] : Moments<W<A>>{};
  int64_t count = 0;
  A mean = 0, square = 0;
  for (int64_t i = vectors * WIDTH * SPAN; i < n; ++i) {
    const A v = load1(x + i), delta = v - mean;
    ++count;
    mean += delta / (A)count;
    // as GCC compiled it: half precision in one instruction, the others in two
    square = sizeof(T) == 2 ? fma(delta, v - mean, square) : square + delta * (v - mean);
  }
  const int64_t added = vectors * SPAN;
  if (count == 0 && added * WIDTH < EXACT) {  // the same with the quotients known
    mean = found.mean[0], square = found.square[0];
    _Pragma("GCC unroll 8") for (int64_t lane = 1; lane < WIDTH; ++lane) {
      const A share = (A)1 / (A)(lane + 1), delta = found.mean[lane] - mean;
      mean = fma(share, delta, mean);
      square += fma(delta * delta * share, (A)lane * (A)added, found.square[lane]);
    }
    return {mean, square};
  }
  for (int64_t lane = 0; lane < WIDTH; ++lane) {
    const int64_t sum = count + added;
    const A share = sum == 0 ? (A)0 : (A)added / (A)sum, delta = found.mean[lane] - mean;
    mean = fma(share, delta, mean);
    square += fma(delta * delta * share, (A)count, found.square[lane]);
    count = sum;
  }
  return {mean, square};
}

}  // namespace normwise::NW_ISA
