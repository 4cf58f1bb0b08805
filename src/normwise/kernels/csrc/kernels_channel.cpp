// Compiled once for each instruction set, see setup.py.
#include "channel.h"

namespace normwise {

ChannelTable NW_NAMED(channel_table)() {
  using namespace NW_ISA;
  constexpr int f32 = (int)Dtype::f32, bf16 = (int)Dtype::bf16, f16 = (int)Dtype::f16, f64 = (int)Dtype::f64;
  ChannelTable t{};

  t.forward[f32][f32] = channels_forward<float, float>;
  t.forward[bf16][bf16] = channels_forward<Bf16, Bf16>;
  t.forward[f16][f16] = channels_forward<F16, F16>;
  t.forward[f64][f64] = channels_forward<double, double>;
  t.forward[bf16][f32] = channels_forward<Bf16, float>;  // a float32 gain promotes
  t.forward[f16][f32] = channels_forward<F16, float>;

  t.backward[f32][f32] = channels_backward<float, float>;
  t.backward[bf16][bf16] = channels_backward<Bf16, Bf16>;
  t.backward[f16][f16] = channels_backward<F16, F16>;
  t.backward[f64][f64] = channels_backward<double, double>;
  t.backward[bf16][f32] = channels_backward<Bf16, float>;
  t.backward[f16][f32] = channels_backward<F16, float>;

  t.total[f32] = total_columns<float>;
  t.total[bf16] = total_columns<Bf16>;
  t.total[f16] = total_columns<F16>;
  t.total[f64] = total_columns<double>;
  return t;
}

}  // namespace normwise
