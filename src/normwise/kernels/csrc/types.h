// Element types, and the types that their rows are summed in.
#pragma once

#include <cstdint>

namespace normwise {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

template <class T>
struct Sums {
  using Type = float;
};
template <>
struct Sums<double> {
  using Type = double;
};
template <class T>
using Acc = typename Sums<T>::Type;

enum class Dtype : int { f32, bf16, f16, f64 };
constexpr int DTYPES = 4;

}  // namespace normwise
