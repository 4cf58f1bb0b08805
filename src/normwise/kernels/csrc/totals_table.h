// Sums of the weight gradients that parts of the work have left, one row of channels for each part.
#pragma once

#include <cstdint>

#include "types.h"

namespace normwise {

constexpr int64_t COLUMNS = 32;  // begin and end of a `total` count in so many columns

struct Columns {
  const void* parts;  // [rows, size], rows `stride` elements apart, of the type of sums
  void* out;          // [size]
  int64_t rows, stride, size;
};

using TotalColumns = void (*)(const Columns&, int64_t begin, int64_t end);

}  // namespace normwise
