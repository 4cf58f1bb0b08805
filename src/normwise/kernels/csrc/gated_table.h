// Gated norms of rows, as each instruction set offers them: plain functions over pointers, no torch.
#pragma once

#include "rows_table.h"

namespace normwise {

// Bit fields of `code` beside those of Code, as in _ops_gated.py.
enum GatedCode : int64_t {
  GATE_FIRST = 256,      // N(x * act(z)), else N(x) * act(z)
  SIGMOID = 512,         // act is the sigmoid, else silu
  ROUND_PRODUCT = 1024,  // xhat * gain is rounded to the type of x before act(z)
};

// Rows of `groups` groups of `size` elements with a mean square each. The gain is of the type of sums.
struct GatedForward {
  const void* x;
  int64_t x_stride;  // elements from one row to the next
  const void* z;
  int64_t z_stride;
  void* y;  // rows without gaps
  const void* gain;
  void* rstd;  // [rows, groups], of the type of sums, or null
  int64_t size, groups, code;
  double eps;
};

// Gradients of the above. `parts` holds one row of sums, those of the gain, for each block of rows.
struct GatedBackward {
  const void* dy;
  int64_t dy_stride;
  const void* x;
  int64_t x_stride;
  const void* z;
  int64_t z_stride;
  const void *rstd, *gain;
  void *dx, *dz;  // rows without gaps
  void* parts;    // [blocks, groups * size], or null
  int64_t rows, blocks, size, groups, code;
};

// The entries are indexed by Dtype; null where a combination is not served.
struct GatedTable {
  void (*forward[DTYPES][DTYPES])(const GatedForward&, int64_t begin, int64_t end);    // [x][y]
  void (*backward[DTYPES][DTYPES])(const GatedBackward&, int64_t begin, int64_t end);  // [x][dy]
  void (*exp32)(const float* from, float* to, int64_t n);  // what act(z) stands on, to be tested by itself
  void (*exp64)(const double* from, double* to, int64_t n);
};

const GatedTable& gated_table();

}  // namespace normwise
