// Operators over batches: batch_norm, batch_norm_given, batch_norm_backward, batch_moments; schemas in _ops_batch.py.
#include <cmath>
#include <cstring>
#include <vector>

#include "batch_table.h"
#include "ops.h"

namespace normwise {

NW_CHOOSE(BatchTable, batch_table)

namespace {

constexpr int64_t SPAN = 65536;           // elements of a plane that one thread takes at once
constexpr int64_t STRIP_OF_COLUMNS = 512;  // STRIP in batch.h

// The axes of a dense tensor in the order of memory, outermost first, without those of size 1; none if it has gaps.
std::optional<std::vector<int64_t>> axes_in_memory(const Tensor& t) {
  std::vector<int64_t> axes;
  for (int64_t axis = 0; axis < t.dim(); ++axis)
    if (t.size(axis) != 1) axes.push_back(axis);
  std::stable_sort(axes.begin(), axes.end(), [&](int64_t a, int64_t b) { return t.stride(a) > t.stride(b); });
  int64_t expected = 1;
  for (auto axis = axes.rbegin(); axis != axes.rend(); expected *= t.size(*axis++))
    if (t.stride(*axis) != expected) return std::nullopt;
  return axes;
}

// A tensor without gaps, in the memory format that elementwise operators return.
Tensor dense(const Tensor& t) {
  if (t.numel() == 0 || axes_in_memory(t)) return t;
  Tensor copy = torch::stable::empty_like(t);
  torch::stable::copy_(copy, t);
  return copy;
}

// `t` in the memory format of `x`, which is dense.
Tensor laid_out_as(const Tensor& t, const Tensor& x) {
  bool same = true;
  for (int64_t axis = 0; same && axis < x.dim(); ++axis) same = x.size(axis) == 1 || t.stride(axis) == x.stride(axis);
  if (same) return t;
  Tensor copy = torch::stable::empty_like(x);
  torch::stable::copy_(copy, t);
  return copy;
}

// The mask as bytes in the order of memory of x: [outer, inner]. Axes where it has size 1 repeat.
void gather(const Tensor& mask, const std::vector<int64_t>& axes, const Tensor& x, uint8_t* to) {
  const uint8_t* from = (const uint8_t*)mask.const_data_ptr();
  const int64_t depth = (int64_t)axes.size();
  std::vector<int64_t> at(depth, 0), strides(depth);
  for (int64_t k = 0; k < depth; ++k) strides[k] = mask.size(axes[k]) == 1 ? 0 : mask.stride(axes[k]);
  const int64_t inner = depth ? x.size(axes[depth - 1]) : 1, stride = depth ? strides[depth - 1] : 0;
  int64_t rows = 1;
  for (int64_t k = 0; k + 1 < depth; ++k) rows *= x.size(axes[k]);
  for (int64_t row = 0; row < rows; ++row, to += inner) {
    for (int64_t i = 0; i < inner; ++i) to[i] = from[i * stride] != 0;
    for (int64_t k = depth - 2; k >= 0; --k) {
      from += strides[k];
      if (++at[k] < x.size(axes[k])) break;
      from -= strides[k] * at[k];
      at[k] = 0;
    }
  }
}

// A batch, its mask and the memory that both stand in.
struct Seen {
  Tensor x;
  Dtype dtype;
  Batch batch;
  std::unique_ptr<uint8_t[]> real;

  Seen(const Tensor& given, const MaybeTensor& mask, int64_t channel) : x(dense(given)), dtype(dtype_of(given, "x")) {
    STD_TORCH_CHECK(channel >= 0 && channel < x.dim(), "normwise: x has no axis ", channel, " of channels");
    const std::vector<int64_t> axes = axes_in_memory(x).value_or(std::vector<int64_t>{});
    batch = Batch{1, x.size(channel), 1, 1, 1, 1, 1, 1, nullptr};
    bool inside = batch.channels == 1;
    std::vector<int64_t> others;
    for (const int64_t axis : axes) {
      if (axis == channel) {
        inside = true;
        continue;
      }
      others.push_back(axis);
      (inside ? batch.inner : batch.outer) *= x.size(axis);
    }
    if (x.numel() == 0) batch.outer = 0;  // strides of nothing say nothing
    if (mask) {
      STD_TORCH_CHECK(
          mask->scalar_type() == ScalarType::Bool && mask->dim() == x.dim() && mask->size(channel) == 1,
          "normwise: the mask must be bool, with the axes of x, of size 1 where the channels are");
      for (const int64_t axis : others)
        STD_TORCH_CHECK(
            mask->size(axis) == 1 || mask->size(axis) == x.size(axis), "normwise: the mask must broadcast to x");
      real.reset(new uint8_t[std::max<int64_t>(1, batch.outer * batch.inner)]);
      if (x.numel()) gather(*mask, others, x, real.get());
      batch.real = real.get();
    }
    divide();
  }

  bool columns() const { return batch.inner == 1; }
  bool paired() const { return columns() && dtype == Dtype::bf16; }
  int64_t tasks() const { return batch.blocks * batch.groups; }
  int64_t elements() const { return batch.outer * batch.inner; }
  int64_t pieces() const { return x.numel() == 0 ? 0 : columns() ? batch.outer : batch.outer * batch.channels * batch.spans; }
  int64_t elements_of_piece() const { return columns() ? batch.channels : std::min(batch.span, batch.inner); }

  // The real elements of a channel in a block.
  double count(int64_t block) const {
    const int64_t first = block * batch.units() / batch.blocks, last = (block + 1) * batch.units() / batch.blocks;
    int64_t count = 0;
    for (int64_t unit = first; unit < last; ++unit) {
      const int64_t from = unit % batch.spans * batch.span, size = std::min(batch.span, batch.inner - from);
      const uint8_t* at = batch.real + unit / batch.spans * batch.inner + from;
      if (!batch.real)
        count += size;
      else
        for (int64_t i = 0; i < size; ++i) count += at[i];
    }
    return (double)count;
  }

 private:
  // Into blocks and groups of channels, by the shape alone: work for 64 threads where there is so much.
  void divide() {
    if (columns()) {
      batch.span = 1;
      batch.blocks = batch.outer ? blocks_of(batch.outer, batch.channels) : 1;
      batch.width = std::min(STRIP_OF_COLUMNS, std::max<int64_t>(1, batch.channels));
    } else {
      batch.spans = (batch.inner + SPAN - 1) / SPAN;
      batch.span = batch.spans > 1 ? SPAN : batch.inner;
      const int64_t wanted = std::max<int64_t>(1, std::min<int64_t>(64, x.numel() / GRAIN));
      batch.blocks = std::max<int64_t>(1, std::min(batch.units(), wanted));
      const int64_t groups = std::min(batch.channels, (wanted + batch.blocks - 1) / batch.blocks);
      batch.width = (batch.channels + groups - 1) / groups;
    }
    batch.groups = batch.channels ? (batch.channels + batch.width - 1) / batch.width : 1;
  }
};

template <class F>
void over_tasks(const Seen& seen, const F& work) {
  in_parallel(seen.tasks(), seen.x.numel() / std::max<int64_t>(1, seen.tasks()), work);
}

// Numbers for each channel in the type of sums, in the order in which kernels read them.
class Coefficients {
 public:
  Coefficients(const Seen& seen, int64_t rows)
      : wide_(sums_of(seen.dtype) == Dtype::f64),
        channels_(seen.batch.channels),
        stride_(channels_ * (wide_ ? 8 : 4) / 64 * 64 + 192),  // aligned; no two rows 4 KiB apart, which loads mistake
        paired_(seen.paired()),
        data_(new char[rows * stride_ + 64]),
        first_((char*)(((uintptr_t)data_.get() + 63) / 64 * 64)) {}
  void set(int64_t row, int64_t c, double value) {
    // elements of a row of bfloat16 are read in pairs, in blocks of 128 bytes of sums: see `position` in lot.h
    const int64_t i = paired_ ? batch_table().position(c, channels_) : c;
    if (wide_)
      ((double*)(first_ + row * stride_))[i] = value;
    else  // a NaN without a payload: what writes pairs relies on it
      ((float*)(first_ + row * stride_))[i] = value != value ? NAN : (float)value;
  }
  const void* row(int64_t row) const { return first_ + row * stride_; }

 private:
  bool wide_;
  int64_t channels_, stride_;
  bool paired_;
  std::unique_ptr<char[]> data_;
  char* first_;
};

// Statistics, or a gain, read as doubles.
struct Numbers {
  const void* data;
  bool wide;
  double operator[](int64_t i) const { return wide ? ((const double*)data)[i] : (double)((const float*)data)[i]; }
};

struct Stats {
  Numbers all;
  int64_t channels;
  Stats(const Tensor& stats, const Seen& seen)
      : all{stats.const_data_ptr(), sums_of(seen.dtype) == Dtype::f64}, channels(seen.batch.channels) {
    STD_TORCH_CHECK(
        stats.numel() == ROWS * channels && dtype_of(stats, "stats") == sums_of(seen.dtype) && stats.is_contiguous(),
        "normwise: statistics of another batch");
  }
  double operator()(Row row, int64_t c) const { return all[row * channels + c]; }
  // Of numbers so far apart that x - mean might overflow; see channel_forward.
  bool far(int64_t c) const { return (*this)(RSTD, c) < (all.wide ? 0x1p-900 : 0x1p-100); }
};

Tensor new_stats(const Seen& seen) { return empty_as(seen.x, {ROWS, seen.batch.channels}, sums_of(seen.dtype)); }

void measure(const Seen& seen, const Tensor& stats, double eps) {
  const Batch& b = seen.batch;
  const int64_t each = b.blocks * b.channels;
  const std::unique_ptr<double[]> parts(new double[2 * each + b.blocks]);
  double* counts = parts.get() + 2 * each;
  for (int64_t block = 0; block < b.blocks; ++block) counts[block] = seen.count(block);
  const BatchMeasure args{b, seen.x.const_data_ptr(), parts.get(), parts.get() + each, counts};
  const BatchMerge merging{args, stats.mutable_data_ptr(), eps};
  const BatchTable& table = batch_table();
  if (seen.x.numel())
    over_tasks(seen, [&](int64_t begin, int64_t end) { table.measure[(int)seen.dtype](args, begin, end); });
  in_parallel(b.channels, b.blocks * 8, [&](int64_t begin, int64_t end) {
    table.merge[(int)seen.dtype](merging, begin, end);
  });
}

Tensor normalized(
    const Seen& seen, const Tensor& stats, const MaybeTensor& weight, const MaybeTensor& bias, double offset) {
  const Batch& b = seen.batch;
  const Widened gain(weight, seen.dtype, b.channels, offset, false, false, "weight");
  std::optional<Widened> shift;
  if (bias) shift.emplace(bias, seen.dtype, b.channels, 0.0, false, false, "bias");
  const Stats found(stats, seen);
  const Numbers gains{gain.data(), found.all.wide}, shifts{shift ? shift->data() : nullptr, found.all.wide};
  Coefficients coefficients(seen, 3);
  for (int64_t c = 0; c < b.channels; ++c) {
    const double by = found(RSTD, c) * gains[c], addend = shift ? shifts[c] : 0.0, rest = found(REST, c);
    coefficients.set(0, c, found(MEAN, c));
    coefficients.set(1, c, by);
    coefficients.set(2, c, rest == 0 ? addend : addend - rest * by);
  }
  const Tensor y = advised(torch::stable::empty_like(seen.x));
  const BatchForward args{b, seen.x.const_data_ptr(), y.mutable_data_ptr(),
                          coefficients.row(0), coefficients.row(1), coefficients.row(2),
                          streams(y, y.numel() * bytes_of(seen.dtype), 64)};
  const BatchTable& table = batch_table();
  in_parallel(seen.pieces(), seen.elements_of_piece(), [&](int64_t begin, int64_t end) {
    table.forward[(int)seen.dtype](args, begin, end);
  });
  for (int64_t c = 0; c < b.channels; ++c)
    if (found.far(c))
      table.channel_forward[(int)seen.dtype](
          {b, c, args.x, nullptr, args.y, found(MEAN, c) + found(REST, c), found(RSTD, c), gains[c],
           shift ? shifts[c] : 0.0, 0.0, 0.0});
  return y;
}

std::tuple<Tensor, Tensor> batch_norm(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, const MaybeTensor& mask, int64_t channel,
    double eps, double offset) {
  const Seen seen(x, mask, channel);
  const Tensor stats = new_stats(seen);
  measure(seen, stats, eps);
  return {normalized(seen, stats, weight, bias, offset), stats};
}

Tensor batch_moments(const Tensor& x, const MaybeTensor& mask, int64_t channel) {
  const Seen seen(x, mask, channel);
  const Tensor stats = new_stats(seen);
  measure(seen, stats, 0.0);
  return stats;
}

std::tuple<Tensor, Tensor> batch_norm_given(
    const Tensor& x, const Tensor& mean, const Tensor& variance, const MaybeTensor& weight, const MaybeTensor& bias,
    const MaybeTensor& mask, int64_t channel, double eps, double offset) {
  const Seen seen(x, mask, channel);
  const int64_t channels = seen.batch.channels;
  const Dtype sums = sums_of(seen.dtype);
  for (const Tensor* each : {&mean, &variance})
    STD_TORCH_CHECK(
        each->numel() == channels && dtype_of(*each, "statistics") == sums,
        "normwise: statistics must hold one number a channel, in float32 (float64 for float64)");
  const Tensor own_mean = torch::stable::contiguous(mean), own_variance = torch::stable::contiguous(variance);
  const bool wide = sums == Dtype::f64;
  const Numbers means{own_mean.const_data_ptr(), wide}, variances{own_variance.const_data_ptr(), wide};
  const Tensor stats = new_stats(seen);
  const auto set = [&](Row row, int64_t c, double value) {
    wide ? ((double*)stats.mutable_data_ptr())[row * channels + c] = value
         : ((float*)stats.mutable_data_ptr())[row * channels + c] = (float)value;
  };
  for (int64_t c = 0; c < channels; ++c) {
    set(MEAN, c, means[c]);
    set(REST, c, 0.0);
    set(RSTD, c, 1.0 / std::sqrt(variances[c] + eps));
    set(VARIANCE, c, variances[c]);
    set(ELEMENTS, c, 0.0);
  }
  return {normalized(seen, stats, weight, bias, offset), stats};
}

Tensor narrowed(const Tensor& like, const double* values, int64_t n, Dtype dtype) {
  const Tensor out = empty_as(like, {n}, dtype);
  batch_table().narrow[(int)dtype](values, out.mutable_data_ptr(), n);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_backward(
    const Tensor& dy, const Tensor& x, const Tensor& stats, const MaybeTensor& weight, const MaybeTensor& mask,
    int64_t axis, double offset, bool given, int64_t needs) {
  check_same(dy, x, "dy");
  STD_TORCH_CHECK(dtype_of(dy, "dy") == dtype_of(x, "x"), "normwise: dy must have the dtype of x");
  const Seen seen(x, mask, axis);
  const Batch& b = seen.batch;
  const int i = (int)seen.dtype;
  const Tensor upstream = laid_out_as(dy, seen.x);
  const Stats found(stats, seen);
  const BatchTable& table = batch_table();
  const int64_t channels = b.channels, each = b.blocks * channels;
  const std::unique_ptr<double[]> sums(new double[2 * channels]()), parts(new double[2 * each]());
  double *level = sums.get(), *dots = level + channels;  // sums of dy and of dy * xhat
  const void *px = seen.x.const_data_ptr(), *pdy = upstream.const_data_ptr();
  const Widened gain(weight, seen.dtype, channels, offset, false, false, "weight");
  const Numbers gains{gain.data(), found.all.wide};
  Coefficients coefficients(seen, 5);
  for (int64_t c = 0; c < channels; ++c) coefficients.set(0, c, found(MEAN, c));
  const auto channel = [&](int64_t c, void* out) {
    const double elements = std::max(1.0, found(ELEMENTS, c));
    return BatchChannel{b, c, px, pdy, out, found(MEAN, c) + found(REST, c), found(RSTD, c), found(RSTD, c) * gains[c],
                        0.0, level[c] / elements, dots[c] / elements};
  };
  if (x.numel() && (!given || needs & 6)) {
    const BatchSums args{b, px, pdy, coefficients.row(0), parts.get(), parts.get() + each};
    over_tasks(seen, [&](int64_t begin, int64_t end) { table.sums[i](args, begin, end); });
    for (int64_t block = 0; block < b.blocks; ++block)
      for (int64_t c = 0; c < channels; ++c) {
        level[c] += args.sums[block * channels + c];
        dots[c] += args.dots[block * channels + c];
      }
    for (int64_t c = 0; c < channels; ++c) {
      dots[c] = (dots[c] - found(REST, c) * level[c]) * found(RSTD, c);
      if (found.far(c)) table.channel_sums[i](channel(c, nullptr), level + c, dots + c);
    }
  }
  const Dtype held = weight ? dtype_of(*weight, "weight") : sums_of(seen.dtype);
  const Tensor none = empty_as(x, {0}, sums_of(seen.dtype));
  const Tensor dweight = needs & 2 ? narrowed(x, dots, channels, held) : none;
  const Tensor dbias = needs & 4 ? narrowed(x, level, channels, held) : none;
  if (!(needs & 1)) return {none, dweight, dbias};

  for (int64_t c = 0; c < channels; ++c) {
    const double elements = std::max(1.0, found(ELEMENTS, c)), by = found(RSTD, c) * gains[c];
    const double mean = level[c] / elements, slope = -by * found(RSTD, c) * (dots[c] / elements);
    const double rounded = found.all.wide ? mean : (double)(float)mean;
    coefficients.set(1, c, by);
    coefficients.set(2, c, rounded);
    coefficients.set(3, c, slope);
    coefficients.set(4, c, -by * (mean - rounded) - found(REST, c) * slope);
  }
  const Tensor dx = advised(torch::stable::empty_like(seen.x));
  const BatchBackward args{b, px, pdy, dx.mutable_data_ptr(), coefficients.row(0), coefficients.row(1),
                           coefficients.row(2), given ? nullptr : coefficients.row(3), coefficients.row(4),
                           streams(dx, 2 * dx.numel() * bytes_of(seen.dtype), 64)};
  in_parallel(seen.pieces(), seen.elements_of_piece(), [&](int64_t begin, int64_t end) {
    table.backward[i](args, begin, end);
  });
  for (int64_t c = 0; !given && c < channels; ++c)
    if (found.far(c)) table.channel_backward[i](channel(c, args.dx));
  return {dx, dweight, dbias};
}

}  // namespace
}  // namespace normwise

STABLE_TORCH_LIBRARY_IMPL(normwise, CPU, m) {
  m.impl("batch_norm", TORCH_BOX(&normwise::batch_norm));
  m.impl("batch_norm_given", TORCH_BOX(&normwise::batch_norm_given));
  m.impl("batch_norm_backward", TORCH_BOX(&normwise::batch_norm_backward));
  m.impl("batch_moments", TORCH_BOX(&normwise::batch_moments));
}
