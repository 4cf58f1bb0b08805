// Norms of rows of bfloat16 alone, for processors that round to it in one instruction; compiled once, see setup.py.
#include "rows.h"

namespace normwise {

RowsTable rows_table_avx512();

RowsTable NW_NAMED(rows_table)() {
  using namespace NW_ISA;
  constexpr int bf16 = (int)Dtype::bf16;
  RowsTable t = rows_table_avx512();
  t.rows_forward[bf16][bf16] = rows_forward<Bf16, Bf16>;
  return t;
}

}  // namespace normwise
