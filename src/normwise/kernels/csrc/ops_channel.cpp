// Operators over an axis that is not the last: norm_channels, norm_channels_saving and norm_channels_backward; schemas
// in _ops_channel.py.
#include "channel_table.h"
#include "ops.h"
#include "ops_totals.h"

namespace normwise {

NW_CHOOSE(ChannelTable, channel_table)

namespace {

struct Sizes {
  int64_t outer, channels, length;
};

Sizes sizes_of(const Tensor& x, int64_t axis) {
  STD_TORCH_CHECK(axis < 0 && axis >= -x.dim(), "normwise: x has no axis ", axis);
  Sizes sizes{1, x.size(x.dim() + axis), 1};
  for (int64_t i = 0; i < x.dim() + axis; ++i) sizes.outer *= x.size(i);
  for (int64_t i = x.dim() + axis + 1; i < x.dim(); ++i) sizes.length *= x.size(i);
  return sizes;
}

Tensor without_gaps(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

// As many positions as keep `buffers` copies of their channels in half a second-level cache of 512 KiB, and whole
// blocks of 128 bytes: few are slow to read, and many more add nothing. By the shape alone, as gradients of gains are
// added up by tile.
int64_t tile_of(const Sizes& sizes, Dtype sums, int64_t buffers) {
  const int64_t bytes = sizes.channels * buffers * bytes_of(sums);
  const int64_t tile = std::clamp<int64_t>((256 << 10) / bytes / 64 * 64, 64, 512);
  return std::max<int64_t>(1, std::min(tile, sizes.length));
}

// Tiles of nearly one size instead of a short last one.
int64_t evened(int64_t tile, int64_t length) {
  const int64_t tiles = (length + tile - 1) / tile, even = (length + tiles - 1) / tiles;
  return std::min(tile, (even + 31) / 32 * 32);
}

struct Work {
  Channels args;
  int64_t tiles;
};

Work cut(const Sizes& sizes, Dtype sums, int64_t buffers, int64_t code, double eps) {
  Work work{};
  if (sizes.outer * sizes.channels * sizes.length == 0) return work;
  work.args.channels = sizes.channels, work.args.length = sizes.length, work.args.code = code, work.args.eps = eps;
  work.args.tile = evened(tile_of(sizes, sums, buffers), sizes.length);
  work.tiles = sizes.outer * ((sizes.length + work.args.tile - 1) / work.args.tile);
  return work;
}

template <class Kernel>
void run(Kernel kernel, const Channels& args, int64_t tiles) {
  in_parallel(tiles, args.channels * args.tile, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

Tensor forward(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, int64_t axis, int64_t code, double eps,
    double offset, const Tensor* stats) {
  const Sizes sizes = sizes_of(x, axis);
  const Dtype dtype = dtype_of(x, "x");
  const bool promoted = (code & PROMOTE) && weight && dtype_of(*weight, "weight") == Dtype::f32 && dtype != Dtype::f64;
  const Dtype out = promoted ? Dtype::f32 : dtype;
  const Tensor dense = without_gaps(x), y = empty_shaped(x, out);
  auto [args, tiles] = cut(sizes, sums_of(dtype), 1, code, eps);
  if (tiles == 0) return y;
  const Widened gain(weight, dtype, sizes.channels, offset, code & OFFSET_IN_WEIGHT_DTYPE, false, "weight");
  std::optional<Widened> shift;
  if (bias) shift.emplace(bias, dtype, sizes.channels, 0.0, false, false, "bias");
  args.x = dense.const_data_ptr(), args.out = y.mutable_data_ptr();
  args.gain = gain.data(), args.bias = shift ? shift->data() : nullptr;
  if (stats) {
    char* kept = (char*)stats->mutable_data_ptr();
    args.mean = kept;
    args.rstd = centers(code) ? kept + sizes.outer * sizes.length * bytes_of(sums_of(dtype)) : kept;
  }
  const auto kernel = channel_table().forward[(int)dtype][(int)out];
  STD_TORCH_CHECK(kernel, "normwise: no kernel for this pair of dtypes");
  run(kernel, args, tiles);
  return y;
}

Tensor norm_channels(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, int64_t axis, int64_t code, double eps,
    double offset) {
  return forward(x, weight, bias, axis, code, eps, offset, nullptr);
}

std::tuple<Tensor, Tensor> norm_channels_saving(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, int64_t axis, int64_t code, double eps,
    double offset) {
  const Sizes sizes = sizes_of(x, axis);
  const Tensor stats = empty_as(x, {centers(code) ? 2 : 1, sizes.outer, sizes.length}, sums_of(dtype_of(x, "x")));
  return {forward(x, weight, bias, axis, code, eps, offset, &stats), stats};
}

std::tuple<Tensor, Tensor, Tensor> norm_channels_backward(
    const Tensor& dy, const Tensor& x, const Tensor& stats, const MaybeTensor& weight, int64_t axis, int64_t code,
    double eps, double offset, int64_t needs) {
  check_same(dy, x, "dy");
  const Sizes sizes = sizes_of(x, axis);
  const Dtype dtype = dtype_of(x, "x"), sums = sums_of(dtype), held = weight ? dtype_of(*weight, "weight") : sums;
  const auto kernel = channel_table().backward[(int)dtype][(int)dtype_of(dy, "dy")];
  STD_TORCH_CHECK(kernel, "normwise: no kernel for a gradient of this dtype beside x");
  const Tensor dense = without_gaps(x), upstream = without_gaps(dy), dx = empty_shaped(x, dtype);
  auto [args, tiles] = cut(sizes, sums, 2, code, eps);
  args.weights = needs & 4 ? 2 : needs & 2 ? 1 : 0;
  const int64_t channels = sizes.channels, stride = args.weights * channels;
  const std::unique_ptr<char[]> parts(new char[tiles * stride * bytes_of(sums)]);
  if (tiles > 0) {
    const Widened gain(weight, dtype, channels, offset, code & OFFSET_IN_WEIGHT_DTYPE, false, "weight");
    char* kept = (char*)stats.const_data_ptr();
    args.x = dense.const_data_ptr(), args.dy = upstream.const_data_ptr(), args.out = dx.mutable_data_ptr();
    args.gain = gain.data(), args.parts = parts.get(), args.mean = kept;
    args.rstd = centers(code) ? kept + sizes.outer * sizes.length * bytes_of(sums) : kept;
    run(kernel, args, tiles);
  }
  const auto total = [&, tiles = tiles](bool needed, const char* from) {
    return totalled(x, {from, nullptr, tiles, stride, needed ? channels : 0}, held, channel_table().total);
  };
  return {dx, total(needs & 2, parts.get()), total(needs & 4, parts.get() + channels * bytes_of(sums))};
}

}  // namespace
}  // namespace normwise

STABLE_TORCH_LIBRARY_IMPL(normwise, CPU, m) {
  m.impl("norm_channels", TORCH_BOX(&normwise::norm_channels));
  m.impl("norm_channels_saving", TORCH_BOX(&normwise::norm_channels_saving));
  m.impl("norm_channels_backward", TORCH_BOX(&normwise::norm_channels_backward));
}
