// Operators over groups of channels: norm_groups, norm_groups_saving and norm_groups_backward; schemas in
// _ops_group.py.
#include "group_table.h"
#include "ops.h"
#include "ops_totals.h"

namespace normwise {

NW_CHOOSE(GroupTable, group_table)

namespace {

// A tensor [N, C, *] whose elements lie as [N, C, L] or as [N, L, C]; copied only where it is neither.
struct Layout {
  Tensor tensor;
  bool last;
};

bool has_channels_last(const Tensor& t) {
  const auto sizes = t.sizes(), strides = t.strides();
  int64_t inner = sizes[1];
  if (sizes[1] != 1 && strides[1] != 1) return false;
  for (int64_t axis = (int64_t)sizes.size() - 1; axis >= 0; --axis) {
    if (axis == 1) continue;
    if (sizes[axis] != 1 && strides[axis] != inner) return false;
    inner *= sizes[axis];
  }
  return true;
}

Layout layout_of(const Tensor& x) {
  if (x.is_contiguous()) return {x, false};
  if (has_channels_last(x)) return {x, true};
  return {torch::stable::contiguous(x), false};
}

// Memory shaped and laid out like a tensor of layout_of.
Tensor empty_laid(const Layout& like, const Tensor& x, Dtype dtype) {
  return like.last ? advised(torch::stable::empty_like(like.tensor)) : empty_shaped(x, dtype);
}

// A gradient in the layout of x.
Tensor laid_as(const Layout& x, const Tensor& dy) {
  if (!x.last) return dy.is_contiguous() ? dy : torch::stable::contiguous(dy);
  if (has_channels_last(dy)) return dy;
  Tensor copy = torch::stable::empty_like(x.tensor);
  torch::stable::copy_(copy, dy);
  return copy;
}

// Calls work(stages, unit, begin, end, scratch) for all chunks of all units: one unit after the other, while it is in
// the cache, or, where a few large units would leave threads idle, one stage after the other. The results are the same.
void in_stages(const Groups& args, bool last, bool backward, GroupStep step) {
  const int64_t per_sample = args.channels * args.length;
  const int64_t units = last ? args.samples : args.samples * args.groups;
  const int64_t size = last ? per_sample : per_sample / args.groups;
  const int64_t chunks = chunks_of(args, last, backward), bytes = scratch_of(args, last, chunks);
  const int64_t threads = torch::stable::get_num_threads();
  if (threads == 1 || units >= 4 * threads || units % threads == 0 || size < 2 * GRAIN) {
    in_parallel(units, size, [&](int64_t begin, int64_t end) {
      const std::unique_ptr<char[]> scratch(new char[bytes]);
      for (int64_t unit = begin; unit < end; ++unit) step(args, ALL, unit, 0, chunks, scratch.get());
    });
    return;
  }
  const std::unique_ptr<char[]> scratch(new char[units * bytes]);
  const auto whole = [&](int stages) {
    in_parallel(units, size / chunks, [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) step(args, stages, unit, 0, 0, scratch.get() + unit * bytes);
    });
  };
  const auto shared = [&](int stages) {
    in_parallel(units * chunks, size / chunks, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end;) {
        const int64_t unit = i / chunks, stop = std::min(end, (unit + 1) * chunks);
        step(args, stages, unit, i - unit * chunks, stop - unit * chunks, scratch.get() + unit * bytes);
        i = stop;
      }
    });
  };
  whole(PREPARE);
  shared(MEASURE);
  whole(SETTLE);
  shared(FINISH);
}

Groups sizes_of(const Tensor& x, int64_t groups) {
  STD_TORCH_CHECK(x.dim() >= 2, "normwise: x must be [N, C, *]");
  Groups args{};
  args.samples = x.size(0), args.channels = x.size(1), args.groups = groups;
  STD_TORCH_CHECK(
      groups > 0 && args.channels % groups == 0, "normwise: ", args.channels, " channels make no ", groups, " groups");
  args.length = 1;
  for (int64_t axis = 2; axis < x.dim(); ++axis) args.length *= x.size(axis);
  return args;
}

Tensor forward(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, int64_t groups, int64_t code, double eps,
    double offset, const Tensor* stats, bool variance) {
  const Dtype dtype = dtype_of(x, "x");
  Groups args = sizes_of(x, groups);
  const Layout layout = layout_of(x);
  const Tensor y = empty_laid(layout, x, dtype);
  if (x.numel() == 0) return y;
  const Widened gain(weight, dtype, args.channels, offset, code & OFFSET_IN_WEIGHT_DTYPE, false, "weight");
  std::optional<Widened> shift;
  if (bias) shift.emplace(bias, dtype, args.channels, 0.0, false, false, "bias");
  args.x = layout.tensor.const_data_ptr(), args.out = y.mutable_data_ptr();
  args.gain = gain.data(), args.bias = shift ? shift->data() : nullptr, args.eps = eps;
  args.stream = streams(y, x.numel() * bytes_of(dtype), 64);
  args.stats = stats ? stats->mutable_data_ptr() : nullptr, args.variance = variance;
  const bool last = layout.last || args.length == 1;
  in_stages(args, last, false, group_table().forward[(int)dtype][last]);
  return y;
}

Tensor norm_groups(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, int64_t groups, int64_t code, double eps,
    double offset) {
  return forward(x, weight, bias, groups, code, eps, offset, nullptr, false);
}

std::tuple<Tensor, Tensor> norm_groups_saving(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, int64_t groups, int64_t code, double eps,
    double offset, bool variance) {
  STD_TORCH_CHECK(x.dim() >= 2, "normwise: x must be [N, C, *]");
  const Tensor stats = empty_as(x, {variance ? 4 : 3, x.size(0), groups}, sums_of(dtype_of(x, "x")));
  return {forward(x, weight, bias, groups, code, eps, offset, &stats, variance), stats};
}

std::tuple<Tensor, Tensor, Tensor> norm_groups_backward(
    const Tensor& dy, const Tensor& x, const Tensor& stats, const MaybeTensor& weight, int64_t groups, int64_t code,
    double offset, int64_t needs) {
  const Dtype dtype = dtype_of(x, "x"), sums = sums_of(dtype), held = weight ? dtype_of(*weight, "weight") : sums;
  check_same(dy, x, "dy");
  STD_TORCH_CHECK(dtype_of(dy, "dy") == dtype, "normwise: dy must have the dtype of x");
  Groups args = sizes_of(x, groups);
  const Layout layout = layout_of(x);
  const Tensor upstream = laid_as(layout, dy), dx = empty_laid(layout, x, dtype);
  const int64_t cells = x.numel() ? args.samples * args.channels : 0, bytes = cells * bytes_of(sums);
  const std::unique_ptr<char[]> dgain(new char[needs & 2 ? bytes : 0]), dbias(new char[needs & 4 ? bytes : 0]);
  if (cells) {
    const Widened gain(weight, dtype, args.channels, offset, code & OFFSET_IN_WEIGHT_DTYPE, false, "weight");
    args.x = layout.tensor.const_data_ptr(), args.dy = upstream.const_data_ptr(), args.out = dx.mutable_data_ptr();
    args.gain = gain.data(), args.stats = (void*)stats.const_data_ptr();
    args.stream = streams(dx, 2 * x.numel() * bytes_of(dtype), 64);
    args.dgain = needs & 2 ? dgain.get() : nullptr, args.dbias = needs & 4 ? dbias.get() : nullptr;
    const bool last = layout.last || args.length == 1;
    in_stages(args, last, true, group_table().backward[(int)dtype][last]);
  }
  const int64_t rows = cells ? args.samples : 0, channels = args.channels;
  const auto total = [&](bool needed, const char* parts) {
    return totalled(x, {parts, nullptr, rows, channels, needed ? channels : 0}, held, group_table().total);
  };
  return {dx, total(needs & 2, dgain.get()), total(needs & 4, dbias.get())};
}

}  // namespace
}  // namespace normwise

STABLE_TORCH_LIBRARY_IMPL(normwise, CPU, m) {
  m.impl("norm_groups", TORCH_BOX(&normwise::norm_groups));
  m.impl("norm_groups_saving", TORCH_BOX(&normwise::norm_groups_saving));
  m.impl("norm_groups_backward", TORCH_BOX(&normwise::norm_groups_backward));
}
