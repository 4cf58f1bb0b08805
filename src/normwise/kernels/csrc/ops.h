// What the operators share: tensors of the stable ABI seen as rows of contiguous elements, and scratch memory.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "isa.h"
#include "rows_table.h"

namespace normwise {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Work below this many elements is not worth a second thread: waking one takes about as long as normalizing them.
constexpr int64_t GRAIN = 32768;

inline Dtype dtype_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return Dtype::f32;
    case ScalarType::BFloat16:
      return Dtype::bf16;
    case ScalarType::Half:
      return Dtype::f16;
    case ScalarType::Double:
      return Dtype::f64;
    default:
      STD_TORCH_CHECK(false, "normwise: ", name, " must be float16, bfloat16, float32 or float64");
  }
}

inline int32_t torch_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
      return aoti_torch_dtype_float32();
    case Dtype::bf16:
      return aoti_torch_dtype_bfloat16();
    case Dtype::f16:
      return aoti_torch_dtype_float16();
    default:
      return aoti_torch_dtype_float64();
  }
}

inline Dtype sums_of(Dtype dtype) { return dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32; }
inline int64_t bytes_of(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2; }

// Contiguous memory on the CPU. new_empty of the stable ABI looks its operator up by name and boxes its arguments:
// for a short row that takes as long as normalizing it.
inline Tensor empty_of(torch::headeronly::IntHeaderOnlyArrayRef sizes, Dtype dtype) {
  constexpr size_t FEW = 8;
  int64_t few[FEW];
  const std::unique_ptr<int64_t[]> many(sizes.size() > FEW ? new int64_t[sizes.size()] : nullptr);
  int64_t* strides = many ? many.get() : few;
  int64_t stride = 1;
  for (size_t axis = sizes.size(); axis-- > 0;) {
    strides[axis] = stride;
    stride *= std::max<int64_t>(1, sizes[axis]);
  }
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      (int64_t)sizes.size(), sizes.data(), strides, torch_dtype(dtype), aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

inline Tensor empty_as(const Tensor& like, std::initializer_list<int64_t> sizes, Dtype dtype) {
  return empty_of(torch::headeronly::IntHeaderOnlyArrayRef(sizes.begin(), sizes.size()), dtype);
}

// Large fresh memory costs more to fault in, 4 KiB at a time, than to write. As NumPy does from 4 MiB on, ask Linux
// for 2 MiB pages; where it has none, or the memory is not fresh, nothing changes. NORMWISE_HUGE_PAGES=0 turns it off.
Tensor advised(const Tensor& fresh);

// Whether a result is better written past the cache: it and what it is made from do not fit there together, and its
// rows begin and end with cache lines.
bool streams(const Tensor& out, int64_t bytes_read, int64_t row_bytes);

inline Tensor empty_shaped(const Tensor& like, Dtype dtype) {
  return advised(empty_of(like.sizes(), dtype));
}

// A tensor as rows of `size` contiguous elements, `stride` elements apart; copied only where it is not that.
struct Rows {
  Tensor tensor;
  Dtype dtype;
  int64_t rows, stride;
  const void* data() const { return tensor.const_data_ptr(); }
};

inline bool has_rows(const Tensor& t, int64_t size, int64_t& stride) {
  const auto sizes = t.sizes(), strides = t.strides();
  int64_t axis = (int64_t)sizes.size() - 1, inner = 1;
  for (; axis >= 0 && inner < size; --axis) {  // the axes of one row, without gaps
    if (sizes[axis] != 1 && strides[axis] != inner) return false;
    inner *= sizes[axis];
  }
  if (inner != size) return false;
  stride = size;
  int64_t next = -1;  // the stride that the axis before must have
  for (; axis >= 0; --axis) {
    if (sizes[axis] == 1) continue;
    if (next < 0)
      stride = strides[axis];
    else if (strides[axis] != next)
      return false;
    next = strides[axis] * sizes[axis];
  }
  return true;
}

inline Rows rows_of(const Tensor& t, int64_t size, const char* name) {
  STD_TORCH_CHECK(size > 0 && t.numel() % size == 0, "normwise: ", name, " has no rows of ", size, " elements");
  int64_t stride = size;
  const Dtype dtype = dtype_of(t, name);
  if (t.is_contiguous() || t.numel() == 0 || has_rows(t, size, stride)) return {t, dtype, t.numel() / size, stride};
  return {torch::stable::contiguous(t), dtype, t.numel() / size, size};
}

inline void check_same(const Tensor& t, const Tensor& x, const char* name) {
  bool same = t.dim() == x.dim();
  for (int64_t axis = 0; same && axis < x.dim(); ++axis) same = t.size(axis) == x.size(axis);
  STD_TORCH_CHECK(same, "normwise: ", name, " must have the shape of x");
}

// Gain or bias in the type of sums, one number for each of `size` elements; the weight itself where it is that.
class Widened {
 public:
  Widened(
      const MaybeTensor& weight, Dtype x, int64_t size, double offset, bool round, bool paired, const char* name) {
    const Dtype sums = sums_of(x);
    if (!weight) {
      fill({nullptr, nullptr, size, 0, 0.0, false, paired}, sums);
      return;
    }
    const Dtype dtype = dtype_of(*weight, name);
    STD_TORCH_CHECK(sums_of(dtype) == sums, "normwise: ", name, " must have the dtype of x or float32");
    STD_TORCH_CHECK(
        weight->numel() == size || weight->numel() == 1, "normwise: ", name, " must hold 1 or ", size, " elements");
    tensor_ = weight->is_contiguous() ? *weight : torch::stable::contiguous(*weight);
    if (dtype == sums && offset == 0.0 && weight->numel() == size && !paired)
      data_ = tensor_->const_data_ptr();
    else
      fill({tensor_->const_data_ptr(), nullptr, size, weight->numel() == 1 && size != 1, offset, round, paired}, dtype);
  }
  const void* data() const { return data_; }

 private:
  void fill(Widen args, Dtype dtype) {
    scratch_.reset(new char[args.size * bytes_of(sums_of(dtype))]);
    args.to = scratch_.get();
    rows_table().widen[(int)dtype](args);
    data_ = scratch_.get();
  }
  std::unique_ptr<char[]> scratch_;
  MaybeTensor tensor_;
  const void* data_ = nullptr;
};

// Into how many blocks rows are cut for the sums of weight gradients. It depends on the shape alone, so that the
// result does not depend on the number of threads: enough blocks for 64 threads where there is work for them, and
// at most about 1024 rows a block, so that float32 adds up few numbers one after the other.
inline int64_t blocks_of(int64_t rows, int64_t size) {
  const int64_t by_work = std::min<int64_t>(64, rows * size / GRAIN), by_length = (rows + 1023) / 1024;
  return std::max<int64_t>(1, std::min(rows, std::max(by_work, by_length)));
}

// Rows of bfloat16 alone are read in pairs, see lot.h.
inline bool in_pairs(Dtype x, Dtype y) { return x == Dtype::bf16 && y == Dtype::bf16; }

template <class F>
inline void in_parallel(int64_t count, int64_t elements_each, const F& work) {
  if (count > 0) torch::stable::parallel_for(0, count, std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, elements_each)), work);
}

// The dtype of the output of rows.
inline Dtype out_dtype(Dtype x, const MaybeTensor& weight, int64_t code) {
  if ((code & PROMOTE) && weight && dtype_of(*weight, "weight") == Dtype::f32 && x != Dtype::f64) return Dtype::f32;
  return x;
}

// The sums of all blocks, in their order; `parts` as the kernels left them.
inline Tensor merged(const Tensor& like, Merge args, Dtype dtype, bool one) {
  const Dtype each = one ? sums_of(dtype) : dtype;
  const int64_t lot = 128 / bytes_of(sums_of(dtype));
  const Tensor out = empty_as(like, {args.size}, each);
  args.out = out.mutable_data_ptr();
  in_parallel((args.size + lot - 1) / lot, args.blocks * lot, [&](int64_t begin, int64_t end) {
    rows_table().merge[(int)each](args, begin, end);
  });
  if (!one) return out;
  // one number for all features: its gradient is the sum of theirs, added up in one fixed order
  const Tensor number = empty_as(like, {1}, dtype);
  rows_table().merge[(int)dtype]({args.out, number.mutable_data_ptr(), args.size, 1, 1, false}, 0, 1);
  return number;
}

}  // namespace normwise
