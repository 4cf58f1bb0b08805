// Compiled once for each instruction set, see setup.py.
#include "gated.h"

namespace normwise {

GatedTable NW_NAMED(gated_table)() {
  using namespace NW_ISA;
  constexpr int f32 = (int)Dtype::f32, bf16 = (int)Dtype::bf16, f16 = (int)Dtype::f16, f64 = (int)Dtype::f64;
  GatedTable t{};

  t.forward[f32][f32] = gated_forward<float, float>;
  t.forward[bf16][bf16] = gated_forward<Bf16, Bf16>;
  t.forward[f16][f16] = gated_forward<F16, F16>;
  t.forward[f64][f64] = gated_forward<double, double>;
  t.forward[bf16][f32] = gated_forward<Bf16, float>;  // a float32 gain promotes
  t.forward[f16][f32] = gated_forward<F16, float>;

  t.backward[f32][f32] = gated_backward<float, float>;
  t.backward[bf16][bf16] = gated_backward<Bf16, Bf16>;
  t.backward[f16][f16] = gated_backward<F16, F16>;
  t.backward[f64][f64] = gated_backward<double, double>;
  t.backward[bf16][f32] = gated_backward<Bf16, float>;
  t.backward[f16][f32] = gated_backward<F16, float>;

  t.exp32 = exponentials<float>;
  t.exp64 = exponentials<double>;
  return t;
}

}  // namespace normwise
