// Norms of rows, as each instruction set offers them: plain functions over pointers, no torch.
#pragma once

#include <cstdint>

#include "types.h"

namespace normwise {

// Bit fields of `code`, as in _ops.py.
enum Code : int64_t {
  KIND = 3,  // one of Kind
  ROUND_BEFORE_WEIGHT = 4,
  PROMOTE = 8,
  OFFSET_IN_WEIGHT_DTYPE = 16,
  ROOT = 96,  // one of Root
  DIVIDE = 128,
  CHECKED = 256,   // the operator raises unless the call is an ordinary one, see check_ordinary
  ONE_GAIN = 512,  // where it is checked: the gain is one number
};
enum Kind : int64_t { RMS = 0, LAYER = 1, TORCH_LAYER = 2, L2 = 3 };
enum Root : int64_t { EPS_INSIDE = 0, EPS_OUTSIDE = 32, EPS_CLAMP = 64 };

inline constexpr bool centers(int64_t code) { return (code & KIND) == LAYER || (code & KIND) == TORCH_LAYER; }

// y = (x - mean) * rstd * gain + bias over rows of `size` elements. Gain and bias are of the type of sums.
struct RowsForward {
  const void* x;
  int64_t x_stride;  // elements from one row to the next
  void* y;           // rows without gaps
  const void* gain;
  const void* bias;  // or null
  void* mean;        // [rows], of the type of sums, or null
  void* rstd;        // [rows], or null
  int64_t rows, size, code;
  double eps;
  bool stream;  // whether y is written past the cache
};

// Gradients of the above. `dgain` and `dbias` hold a row of sums for each block of rows.
struct RowsBackward {
  const void* dy;
  int64_t dy_stride;
  const void* dsum;  // or null: a gradient to add to dx, as x
  int64_t dsum_stride;
  const void* x;
  int64_t x_stride;
  const void *mean, *rstd, *gain;
  void* dx;              // rows without gaps
  void *dgain, *dbias;   // [blocks, size] as far as `weights` wants them
  int weights;           // 0: none, 1: of the gain, 2: and of the bias
  int64_t rows, blocks, size, code;
  double eps;
  bool stream;  // whether dx is written past the cache
};

// sum = x + residual, a row at a time before it is normalized.
struct AddRows {
  const void *x, *residual;
  int64_t x_stride, residual_stride;
  void* sum;  // rows without gaps
  int64_t size;
  int64_t rows;  // of all
  int64_t ahead;  // rows that memory is asked for before they are added
};

// gain = offset + weight in the type of sums, rounded to the weight's type if asked; 1 without a weight.
struct Widen {
  const void* from;
  void* to;
  int64_t size, repeat;  // repeat: from holds one number for all
  double offset;
  bool round, paired;  // paired: laid out as rows that are read in pairs
};

// out = sum of parts over blocks, in their order; begin and end count in lots of 128 bytes of the type of sums.
struct Merge {
  const void* parts;
  void* out;
  int64_t blocks, stride, size;
  bool paired;
};

// The entries are indexed by Dtype; null where a combination is not served.
struct RowsTable {
  void (*rows_forward[DTYPES][DTYPES])(const RowsForward&, int64_t begin, int64_t end);    // [x][y]
  void (*rows_backward[DTYPES][DTYPES])(const RowsBackward&, int64_t begin, int64_t end);  // [x][dy]
  void (*add_rows[DTYPES][DTYPES][DTYPES])(const AddRows&, int64_t begin, int64_t end);    // [x][residual][sum]
  void (*widen[DTYPES])(const Widen&);                                                     // [weight]
  void (*merge[DTYPES])(const Merge&, int64_t begin, int64_t end);                         // [weight]
};

const RowsTable& rows_table();

}  // namespace normwise
