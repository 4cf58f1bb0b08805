// Norms over an axis that is not the last, as each instruction set offers them: plain functions over pointers.
#pragma once

#include "rows_table.h"
#include "totals_table.h"

namespace normwise {

// x [outer, channels, length]: each of outer * length positions is normalized over its channels, as a row is in
// rows_table.h. The work is cut into tiles of `tile` neighbouring positions of one outer index.
struct Channels {
  const void* x;
  const void* dy;  // backward
  void* out;       // y, or dx
  const void *gain, *bias;  // [channels], of the type of sums, as all below; the bias or null
  void *mean, *rstd;        // [outer, length], or null; the mean of centred norms only
  void* parts;              // [tiles, weights, channels]: sums of dy * xhat, then of dy
  int weights;              // 0: none, 1: of the gain, 2: and of the bias
  int64_t channels, length, tile, code;
  double eps;
};

struct ChannelTable {
  void (*forward[DTYPES][DTYPES])(const Channels&, int64_t begin, int64_t end);   // [x][y], over tiles
  void (*backward[DTYPES][DTYPES])(const Channels&, int64_t begin, int64_t end);  // [x][dy], over tiles
  TotalColumns total[DTYPES];                                                     // [weight]
};

const ChannelTable& channel_table();

}  // namespace normwise
