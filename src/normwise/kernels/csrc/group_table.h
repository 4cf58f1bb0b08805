// Norms of groups of channels, as each instruction set offers them: plain functions over pointers, no torch.
#pragma once

#include "totals_table.h"

namespace normwise {

// The work on one unit (a row of a contiguous input, a sample where channels are last) in four steps. MEASURE and
// FINISH go over chunks of the unit, which threads may share; what is between them is kept in scratch memory.
enum Stage : int { PREPARE = 1, MEASURE = 2, SETTLE = 4, FINISH = 8, ALL = 15 };

// y = (x - mean) * rstd * gain[c] + bias[c], or its gradients, of x [samples, channels, length] or, with channels
// last, [samples, length, channels]; mean and rstd are those of a sample's group of channels.
struct Groups {
  const void* x;
  const void* dy;    // backward
  void* out;         // y, or dx
  const void* gain;  // [channels], of the type of sums, as all below
  const void* bias;  // [channels], or null
  void* stats;       // [3 or 4, samples, groups], or null: pivot, rest, rstd and, in a fourth row, the variance
  bool variance;     // whether there is that row
  void* dgain;       // [samples, channels], or null: sums of dy * xhat
  void* dbias;       // [samples, channels], or null: sums of dy
  int64_t samples, channels, groups, length;
  double eps;
  bool stream;  // whether out is written past the cache, where what is written begins with a line
};

using GroupStep = void (*)(const Groups&, int stages, int64_t unit, int64_t begin, int64_t end, void* scratch);

struct GroupTable {
  GroupStep forward[DTYPES][2];   // [x][channels are last]
  GroupStep backward[DTYPES][2];  // [x][channels are last]
  TotalColumns total[DTYPES];     // [weight]
};

const GroupTable& group_table();

// How a unit is cut, by its own shape alone: results depend neither on other samples nor on threads.
constexpr int64_t CHUNK = 4096;  // elements: 128 additions in float32 for each of 32 sums, then float64

// The positions of a chunk with channels last: enough to outweigh what a chunk leaves (two numbers a channel), few
// enough to be added up one after the other in float32.
static inline int64_t positions_of(const Groups& a) {
  const int64_t fit = 8 * CHUNK / a.channels;
  return fit < 1 ? 1 : fit > 256 ? 256 : fit;
}
static inline int64_t chunks_of(const Groups& a, bool last, bool backward) {
  const int64_t pieces = (a.length + CHUNK - 1) / CHUNK, width = a.channels / a.groups;
  if (last) return (a.length + positions_of(a) - 1) / positions_of(a);
  return backward ? width * pieces : (width * a.length + CHUNK - 1) / CHUNK;
}
static inline int64_t scratch_of(const Groups& a, bool last, int64_t chunks) {
  return 8 * (last ? 4 * a.groups + 7 * a.channels + 2 * a.channels * chunks : 4 + 2 * chunks);
}

}  // namespace normwise
