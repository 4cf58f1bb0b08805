// Operators over gated rows: gated_rows, gated_rows_saving and gated_rows_backward; schemas in _ops_gated.py.
#include "gated_table.h"
#include "ops.h"

namespace normwise {

NW_CHOOSE(GatedTable, gated_table)

namespace {

Rows gate_of(const Tensor& z, const Rows& x, int64_t size) {
  check_same(z, x.tensor, "z");
  const Rows gate = rows_of(z, size, "z");
  STD_TORCH_CHECK(gate.dtype == x.dtype, "normwise: z must have the dtype of x");
  return gate;
}

int64_t group_of(int64_t size, int64_t groups) {
  STD_TORCH_CHECK(groups > 0 && size % groups == 0, "normwise: ", groups, " groups do not divide ", size, " elements");
  return size / groups;
}

Tensor forward(
    const Rows& x, const Tensor& z, const MaybeTensor& weight, void* rstd, int64_t size, int64_t groups, int64_t code,
    double eps, double offset) {
  const Rows gate = gate_of(z, x, size);
  const Dtype out = out_dtype(x.dtype, weight, code);
  const Widened gain(weight, x.dtype, size, offset, code & OFFSET_IN_WEIGHT_DTYPE, false, "weight");
  const auto kernel = gated_table().forward[(int)x.dtype][(int)out];
  STD_TORCH_CHECK(kernel, "normwise: no kernel for this pair of dtypes");
  const Tensor y = empty_shaped(x.tensor, out);
  const GatedForward args{x.data(),    x.stride, gate.data(), gate.stride, y.mutable_data_ptr(),
                          gain.data(), rstd,     group_of(size, groups), groups, code, eps};
  in_parallel(x.rows, size, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  return y;
}

Tensor gated_rows(
    const Tensor& x, const Tensor& z, const MaybeTensor& weight, int64_t size, int64_t groups, int64_t code, double eps,
    double offset) {
  return forward(rows_of(x, size, "x"), z, weight, nullptr, size, groups, code, eps, offset);
}

std::tuple<Tensor, Tensor> gated_rows_saving(
    const Tensor& x, const Tensor& z, const MaybeTensor& weight, int64_t size, int64_t groups, int64_t code, double eps,
    double offset) {
  const Rows rows = rows_of(x, size, "x");
  const Tensor rstd = empty_as(x, {rows.rows, groups}, sums_of(rows.dtype));
  return {forward(rows, z, weight, rstd.mutable_data_ptr(), size, groups, code, eps, offset), rstd};
}

std::tuple<Tensor, Tensor, Tensor> gated_rows_backward(
    const Tensor& dy, const Tensor& x, const Tensor& z, const Tensor& rstd, const MaybeTensor& weight, int64_t size,
    int64_t groups, int64_t code, double offset, bool needs_weight) {
  check_same(dy, x, "dy");
  const Rows rows = rows_of(x, size, "x"), gate = gate_of(z, rows, size), upstream = rows_of(dy, size, "dy");
  const auto kernel = gated_table().backward[(int)rows.dtype][(int)upstream.dtype];
  STD_TORCH_CHECK(kernel, "normwise: no kernel for a gradient of this dtype beside x");
  const Dtype sums = sums_of(rows.dtype), held = weight ? dtype_of(*weight, "weight") : sums;
  const Widened gain(weight, rows.dtype, size, offset, code & OFFSET_IN_WEIGHT_DTYPE, false, "weight");
  const int64_t blocks = blocks_of(rows.rows, size), bytes = blocks * size * bytes_of(sums);
  const std::unique_ptr<char[]> parts(needs_weight ? new char[bytes] : nullptr);
  const Tensor dx = empty_shaped(x, rows.dtype), dz = empty_shaped(x, rows.dtype);
  const GatedBackward args{
      upstream.data(), upstream.stride, rows.data(), rows.stride, gate.data(), gate.stride, rstd.const_data_ptr(),
      gain.data(), dx.mutable_data_ptr(), dz.mutable_data_ptr(), parts.get(), rows.rows, blocks,
      group_of(size, groups), groups, code};
  if (rows.rows > 0)
    in_parallel(blocks, rows.rows * size / blocks, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  else if (needs_weight)
    std::fill_n(parts.get(), bytes, 0);
  if (!needs_weight) return {dx, dz, empty_as(x, {0}, sums)};
  const bool one = weight && weight->numel() == 1 && size != 1;
  return {dx, dz, merged(x, {parts.get(), nullptr, blocks, size, size, false}, held, one)};
}

}  // namespace
}  // namespace normwise

STABLE_TORCH_LIBRARY_IMPL(normwise, CPU, m) {
  m.impl("gated_rows", TORCH_BOX(&normwise::gated_rows));
  m.impl("gated_rows_saving", TORCH_BOX(&normwise::gated_rows_saving));
  m.impl("gated_rows_backward", TORCH_BOX(&normwise::gated_rows_backward));
}

// exp as the kernels compute it, for the tests of its accuracy.
extern "C" __attribute__((visibility("default"))) void normwise_exp32(const float* from, float* to, int64_t n) {
  normwise::gated_table().exp32(from, to, n);
}
extern "C" __attribute__((visibility("default"))) void normwise_exp64(const double* from, double* to, int64_t n) {
  normwise::gated_table().exp64(from, to, n);
}
