// Compiled once for each instruction set, see setup.py.
#include "batch.h"

namespace normwise {

namespace {

template <class T>
void fill(BatchTable& t, Dtype dtype) {
  using namespace NW_ISA;
  const int i = (int)dtype;
  t.measure[i] = batch_measure<T>;
  t.merge[i] = batch_merge<T>;
  t.forward[i] = batch_forward<T>;
  t.sums[i] = batch_sums<T>;
  t.backward[i] = batch_backward<T>;
  t.channel_forward[i] = channel_forward<T>;
  t.channel_sums[i] = channel_sums<T>;
  t.channel_backward[i] = channel_backward<T>;
  t.narrow[i] = narrow_sums<T>;
}

}  // namespace

BatchTable NW_NAMED(batch_table)() {
  BatchTable t{};
  fill<float>(t, Dtype::f32);
  fill<Bf16>(t, Dtype::bf16);
  fill<F16>(t, Dtype::f16);
  fill<double>(t, Dtype::f64);
  t.position = [](int64_t channel, int64_t channels) { return NW_ISA::position(channel, channels, true); };
  return t;
}

}  // namespace normwise
