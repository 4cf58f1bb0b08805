// Operators over rows: norm_rows, norm_rows_saving, norm_rows_backward and add_norm_rows; schemas in _ops.py.
#include "ops.h"

namespace normwise {

NW_CHOOSE_BF16(RowsTable, rows_table)

namespace {

void forward(
    const Rows& x, const Tensor& y, const MaybeTensor& weight, const MaybeTensor& bias, const Tensor* stats,
    int64_t size, int64_t code, double eps, double offset) {
  const bool paired = in_pairs(x.dtype, dtype_of(y, "y"));
  const Widened gain(weight, x.dtype, size, offset, code & OFFSET_IN_WEIGHT_DTYPE, paired, "weight");
  std::optional<Widened> shift;
  if (bias) shift.emplace(bias, x.dtype, size, 0.0, false, paired, "bias");
  char* kept = stats ? (char*)stats->mutable_data_ptr() : nullptr;
  const int64_t row_of_stats = x.rows * bytes_of(sums_of(x.dtype));
  const bool mean = kept && centers(code);
  const RowsForward args{
      x.data(), x.stride, y.mutable_data_ptr(), gain.data(), shift ? shift->data() : nullptr,
      mean ? kept : nullptr, mean ? kept + row_of_stats : kept, x.rows, size, code, eps,
      streams(y, x.rows * size * bytes_of(x.dtype), size * bytes_of(dtype_of(y, "y")))};
  const auto kernel = rows_table().rows_forward[(int)x.dtype][(int)dtype_of(y, "y")];
  STD_TORCH_CHECK(kernel, "normwise: no kernel for this pair of dtypes");
  in_parallel(x.rows, size, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

// [2 or 1, *the axes of x before those of a row]
Tensor new_stats(const Rows& x, int64_t size, int64_t code) {
  const auto sizes = x.tensor.sizes();
  int64_t axes = (int64_t)sizes.size(), inner = 1;
  while (axes > 0 && inner != size) inner *= sizes[--axes];
  std::vector<int64_t> shape{centers(code) ? 2 : 1};
  if (inner == size)
    shape.insert(shape.end(), sizes.begin(), sizes.begin() + axes);
  else
    shape.push_back(x.rows);
  return empty_of({shape.data(), shape.size()}, sums_of(x.dtype));
}

// An ordinary call: rows are the last axis; a gain of the shape of a row, or one number, in the dtype of x or float32
// beside half precision; a shift like the gain. Who calls from Python leaves it to these few lines to see, for there
// each look at a tensor takes a twentieth of a microsecond.
void check_ordinary(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, int64_t size, int64_t code) {
  if (!(code & CHECKED)) return;
  const Dtype dtype = dtype_of(x, "x");
  const auto like = [&](const Tensor& t, Dtype held) {
    const bool shaped = code & ONE_GAIN ? t.dim() == 0 : t.dim() == 1 && t.numel() == size;
    return shaped && t.is_cpu() && dtype_of(t, "weight") == held;
  };
  const int64_t axes = x.dim();
  bool ordinary = axes > 0 && x.sizes()[axes - 1] == size && (weight || !bias);
  if (ordinary && weight) {
    const Dtype held = dtype_of(*weight, "weight");
    ordinary = (held == dtype || (held == Dtype::f32 && bytes_of(dtype) == 2)) && like(*weight, held) &&
               (!bias || like(*bias, held));
  }
  STD_TORCH_CHECK(ordinary, "normwise: not an ordinary norm of the last axis");
}

Tensor norm_rows(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, int64_t size, int64_t code, double eps,
    double offset) {
  check_ordinary(x, weight, bias, size, code);
  const Rows rows = rows_of(x, size, "x");
  const Tensor y = empty_shaped(x, out_dtype(rows.dtype, weight, code));
  forward(rows, y, weight, bias, nullptr, size, code, eps, offset);
  return y;
}

std::tuple<Tensor, Tensor> norm_rows_saving(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, int64_t size, int64_t code, double eps,
    double offset) {
  check_ordinary(x, weight, bias, size, code);
  const Rows rows = rows_of(x, size, "x");
  const Tensor y = empty_shaped(x, out_dtype(rows.dtype, weight, code)), stats = new_stats(rows, size, code);
  forward(rows, y, weight, bias, &stats, size, code, eps, offset);
  return {y, stats};
}

std::tuple<Tensor, Tensor, Tensor> add_norm_rows(
    const Tensor& x, const Tensor& residual, const MaybeTensor& weight, const MaybeTensor& bias, int64_t size,
    int64_t code, double eps, double offset, bool wide) {
  check_ordinary(x, weight, bias, size, code);
  check_same(residual, x, "residual");
  const Rows own = rows_of(x, size, "x"), stream = rows_of(residual, size, "residual");
  const Dtype sum = own.dtype == Dtype::f64 ? Dtype::f64
                    : wide || own.dtype != stream.dtype ? Dtype::f32
                                                        : own.dtype;
  const auto add = rows_table().add_rows[(int)own.dtype][(int)stream.dtype][(int)sum];
  const auto kernel = rows_table().rows_forward[(int)sum][(int)own.dtype];
  STD_TORCH_CHECK(add && kernel, "normwise: no kernel for a residual of this dtype beside x");
  const Tensor summed = empty_shaped(x, sum), y = empty_shaped(x, own.dtype);
  const Rows rows{summed, sum, own.rows, size};
  const Tensor stats = new_stats(rows, size, code);

  const bool paired = in_pairs(sum, own.dtype);
  const Widened gain(weight, sum, size, offset, code & OFFSET_IN_WEIGHT_DTYPE, paired, "weight");
  std::optional<Widened> shift;
  if (bias) shift.emplace(bias, sum, size, 0.0, false, paired, "bias");
  char* kept = (char*)stats.mutable_data_ptr();
  const int64_t few = std::max<int64_t>(1, (16 << 10) / (size * bytes_of(sum)));
  const AddRows adding{
      own.data(), stream.data(), own.stride, stream.stride, summed.mutable_data_ptr(), size, own.rows, few};
  const RowsForward args{
      adding.sum, size, y.mutable_data_ptr(), gain.data(), shift ? shift->data() : nullptr,
      centers(code) ? kept : nullptr, centers(code) ? kept + rows.rows * bytes_of(sums_of(sum)) : kept, rows.rows, size,
      code, eps,
      streams(y, 2 * rows.rows * size * bytes_of(sum), size * bytes_of(own.dtype))};
  in_parallel(rows.rows, size, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row += few) {  // a few rows: their sums are read again while in the cache
      add(adding, row, std::min(row + few, end));
      kernel(args, row, std::min(row + few, end));
    }
  });
  return {y, summed, stats};
}

std::tuple<Tensor, Tensor, Tensor> norm_rows_backward(
    const Tensor& dy, const MaybeTensor& dsum, const Tensor& x, const Tensor& stats, const MaybeTensor& weight,
    int64_t size, int64_t code, double eps, double offset, int64_t needs) {
  check_same(dy, x, "dy");
  const Rows rows = rows_of(x, size, "x"), upstream = rows_of(dy, size, "dy");
  std::optional<Rows> stream;
  if (dsum) {
    check_same(*dsum, x, "dsum");
    stream.emplace(rows_of(*dsum, size, "dsum"));
    STD_TORCH_CHECK(stream->dtype == rows.dtype, "normwise: dsum must have the dtype of x");
  }
  const auto kernel = rows_table().rows_backward[(int)rows.dtype][(int)upstream.dtype];
  STD_TORCH_CHECK(kernel, "normwise: no kernel for a gradient of this dtype beside x");
  const Dtype sums = sums_of(rows.dtype), held = weight ? dtype_of(*weight, "weight") : sums;
  const bool paired = in_pairs(rows.dtype, upstream.dtype);
  const Widened gain(weight, rows.dtype, size, offset, code & OFFSET_IN_WEIGHT_DTYPE, paired, "weight");
  const int weights = needs & 4 ? 2 : needs & 2 ? 1 : 0;
  const int64_t blocks = blocks_of(rows.rows, size);
  // The sums of one block, in the dtype of the weight, are its gradient; those of several are added up.
  const bool one = weight && weight->numel() == 1 && size != 1;
  const bool whole = blocks == 1 && held == sums && !paired && !one;
  const int64_t bytes = blocks * size * bytes_of(sums);
  const std::unique_ptr<char[]> parts(new char[whole ? 0 : weights * bytes]);
  const Tensor none, dgain = whole && weights ? empty_as(x, {size}, sums) : none;
  const Tensor dbias = whole && weights == 2 ? empty_as(x, {size}, sums) : none;
  char* const gains = whole ? weights ? (char*)dgain.mutable_data_ptr() : nullptr : parts.get();
  char* const biases = whole ? weights == 2 ? (char*)dbias.mutable_data_ptr() : nullptr : parts.get() + bytes;
  const Tensor dx = empty_shaped(x, rows.dtype);
  STD_TORCH_CHECK(
      stats.numel() == (centers(code) ? 2 : 1) * rows.rows && dtype_of(stats, "stats") == sums,
      "normwise: stats must be those of norm_rows_saving");
  const Tensor statistics = stats.is_contiguous() ? stats : torch::stable::contiguous(stats);
  const char* kept = (const char*)statistics.const_data_ptr();
  const RowsBackward args{
      upstream.data(), upstream.stride, stream ? stream->data() : nullptr, stream ? stream->stride : 0, rows.data(),
      rows.stride, kept, centers(code) ? kept + rows.rows * bytes_of(sums) : kept, gain.data(), dx.mutable_data_ptr(),
      gains, biases, weights, rows.rows, blocks, size, code, eps,
      streams(dx, rows.rows * size * (bytes_of(rows.dtype) + bytes_of(upstream.dtype)), size * bytes_of(rows.dtype))};
  if (rows.rows > 0) {
    in_parallel(blocks, rows.rows * size / blocks, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  } else if (weights) {
    std::fill_n(gains, bytes, 0);
    if (weights == 2) std::fill_n(biases, bytes, 0);
  }
  const Tensor& mine = needs & 1 ? dx : none;
  if (whole) return {mine, needs & 2 ? dgain : none, dbias};
  const auto total = [&](bool needed, const char* sum, bool single) {
    return needed ? merged(x, {sum, nullptr, blocks, size, size, paired}, held, single) : none;
  };
  return {mine, total(needs & 2, gains, one), total(needs & 4, biases, false)};
}

}  // namespace
}  // namespace normwise

STABLE_TORCH_LIBRARY_IMPL(normwise, CPU, m) {
  m.impl("norm_rows", TORCH_BOX(&normwise::norm_rows));
  m.impl("norm_rows_saving", TORCH_BOX(&normwise::norm_rows_saving));
  m.impl("norm_rows_backward", TORCH_BOX(&normwise::norm_rows_backward));
  m.impl("add_norm_rows", TORCH_BOX(&normwise::add_norm_rows));
}
