// Compiled once for each instruction set, see setup.py.
#include "gains.h"
#include "rows_back.h"

namespace normwise {

RowsTable NW_NAMED(rows_table)() {
  using namespace NW_ISA;
  constexpr int f32 = (int)Dtype::f32, bf16 = (int)Dtype::bf16, f16 = (int)Dtype::f16, f64 = (int)Dtype::f64;
  RowsTable t{};

  t.rows_forward[f32][f32] = rows_forward<float, float>;
  t.rows_forward[bf16][bf16] = rows_forward<Bf16, Bf16>;
  t.rows_forward[f16][f16] = rows_forward<F16, F16>;
  t.rows_forward[f64][f64] = rows_forward<double, double>;
  t.rows_forward[bf16][f32] = rows_forward<Bf16, float>;  // a float32 gain promotes
  t.rows_forward[f16][f32] = rows_forward<F16, float>;
  t.rows_forward[f32][bf16] = rows_forward<float, Bf16>;  // a float32 stream beside half-precision sublayers
  t.rows_forward[f32][f16] = rows_forward<float, F16>;

  t.rows_backward[f32][f32] = rows_backward<float, float>;
  t.rows_backward[bf16][bf16] = rows_backward<Bf16, Bf16>;
  t.rows_backward[f16][f16] = rows_backward<F16, F16>;
  t.rows_backward[f64][f64] = rows_backward<double, double>;
  t.rows_backward[bf16][f32] = rows_backward<Bf16, float>;
  t.rows_backward[f16][f32] = rows_backward<F16, float>;
  t.rows_backward[f32][bf16] = rows_backward<float, Bf16>;
  t.rows_backward[f32][f16] = rows_backward<float, F16>;

  t.add_rows[f32][f32][f32] = add_rows<float, float, float>;
  t.add_rows[bf16][bf16][bf16] = add_rows<Bf16, Bf16, Bf16>;
  t.add_rows[f16][f16][f16] = add_rows<F16, F16, F16>;
  t.add_rows[f64][f64][f64] = add_rows<double, double, double>;
  t.add_rows[bf16][bf16][f32] = add_rows<Bf16, Bf16, float>;
  t.add_rows[f16][f16][f32] = add_rows<F16, F16, float>;
  t.add_rows[bf16][f32][f32] = add_rows<Bf16, float, float>;
  t.add_rows[f16][f32][f32] = add_rows<F16, float, float>;

  t.widen[f32] = widen_weight<float>;
  t.widen[bf16] = widen_weight<Bf16>;
  t.widen[f16] = widen_weight<F16>;
  t.widen[f64] = widen_weight<double>;

  t.merge[f32] = merge_parts<float>;
  t.merge[bf16] = merge_parts<Bf16>;
  t.merge[f16] = merge_parts<F16>;
  t.merge[f64] = merge_parts<double>;
  return t;
}

}  // namespace normwise
