// Norms over a batch, as each instruction set offers them: plain functions over pointers, no torch.
#pragma once

#include <cstdint>

#include "types.h"

namespace normwise {

// A batch in the order it has in memory. `inner` elements of one channel are contiguous: planes. With inner = 1
// the channels are: columns of a matrix [outer, channels].
//
// Sums are taken over `blocks` of the batch, each in `groups` of channels of which `width` belong together. Blocks
// depend on the shape alone, and their sums are merged in their order: no result depends on the number of threads.
struct Batch {
  int64_t outer, channels, inner;
  int64_t spans, span;  // a plane is cut into `spans` pieces of at most `span` elements
  int64_t blocks, groups, width;
  const uint8_t* real;  // [outer, inner], 1 where an element is real, or null: all are
  int64_t units() const { return outer * spans; }
};

// Statistics of a channel: rows of [5, channels], of the type of sums.
enum Row : int64_t { MEAN, REST, RSTD, VARIANCE, ELEMENTS, ROWS };  // mean + rest is the mean in double precision

// Mean and sum of centred squares of each block, as [blocks, channels] each. `counts` are the real elements of each
// channel in each block.
struct BatchMeasure {
  Batch batch;
  const void* x;
  double *means, *squares;
  const double* counts;
};

// Statistics from those of the blocks, for channels begin to end.
struct BatchMerge {
  BatchMeasure measured;
  void* stats;
  double eps;
};

// y = (x - mean) * gain + addend for each channel, 0 at padding.
struct BatchForward {
  Batch batch;
  const void* x;
  void* y;
  const void *mean, *gain, *addend;  // [channels], of the type of sums; see `position` for columns
  bool stream;                       // whether y is written past the cache, where its planes or rows begin with lines
};

// Sums of dy and of dy * (x - mean) over each block, as [blocks, channels] each.
struct BatchSums {
  Batch batch;
  const void *x, *dy;
  const void* mean;
  double *sums, *dots;
};

// dx = (dy - level) * gain + (x - mean) * along + addend, 0 at padding; dx = dy * gain where `along` is null.
struct BatchBackward {
  Batch batch;
  const void *x, *dy;
  void* dx;
  const void *mean, *gain, *level, *along, *addend;
  bool stream;  // whether dx is written past the cache, as above
};

// A channel whose differences overflow: everything in double, element by element.
struct BatchChannel {
  Batch batch;
  int64_t channel;
  const void *x, *dy;
  void* out;
  double mean, rstd;                 // mean with its rest
  double gain, bias, level, along;  // forward: hat * gain + bias; backward: (dy - level - hat * along) * gain
};

// The entries are indexed by Dtype. `begin` and `end` count blocks x groups for sums, channels for a merge, and for
// outputs pieces: rows of columns, spans of planes.
struct BatchTable {
  void (*measure[DTYPES])(const BatchMeasure&, int64_t begin, int64_t end);
  void (*merge[DTYPES])(const BatchMerge&, int64_t begin, int64_t end);
  void (*forward[DTYPES])(const BatchForward&, int64_t begin, int64_t end);
  void (*sums[DTYPES])(const BatchSums&, int64_t begin, int64_t end);
  void (*backward[DTYPES])(const BatchBackward&, int64_t begin, int64_t end);
  void (*channel_forward[DTYPES])(const BatchChannel&);
  void (*channel_sums[DTYPES])(const BatchChannel&, double* sum, double* dot);
  void (*channel_backward[DTYPES])(const BatchChannel&);
  void (*narrow[DTYPES])(const double* from, void* to, int64_t n);  // [to]
  int64_t (*position)(int64_t channel, int64_t channels);           // of a channel beside columns of bfloat16
};

const BatchTable& batch_table();

}  // namespace normwise
