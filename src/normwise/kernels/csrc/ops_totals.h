// Weight gradients from what parts of the work have left; see totals_table.h.
#pragma once

#include "ops.h"
#include "totals_table.h"

namespace normwise {

// A tensor [args.size] of dtype `held`.
inline Tensor totalled(const Tensor& like, Columns args, Dtype held, const TotalColumns* total) {
  const Tensor out = empty_as(like, {args.size}, held);
  args.out = out.mutable_data_ptr();
  in_parallel((args.size + COLUMNS - 1) / COLUMNS, args.rows * COLUMNS, [&](int64_t begin, int64_t end) {
    total[(int)held](args, begin, end);
  });
  return out;
}

}  // namespace normwise
