// Compiled once for each instruction set, see setup.py.
#include "group.h"

namespace normwise {

namespace NW_ISA {
template <class T>
void fill_groups(GroupTable& t, Dtype dtype) {
  const int at = (int)dtype;
  t.forward[at][0] = forward_groups<T>;
  t.forward[at][1] = forward_groups_last<T>;
  t.backward[at][0] = backward_groups<T>;
  t.backward[at][1] = backward_groups_last<T>;
  t.total[at] = total_columns<T>;
}
}  // namespace NW_ISA

GroupTable NW_NAMED(group_table)() {
  using namespace NW_ISA;
  GroupTable t{};
  fill_groups<float>(t, Dtype::f32);
  fill_groups<Bf16>(t, Dtype::bf16);
  fill_groups<F16>(t, Dtype::f16);
  fill_groups<double>(t, Dtype::f64);
  return t;
}

}  // namespace normwise
