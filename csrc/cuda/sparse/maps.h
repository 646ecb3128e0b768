// From the tensors of block-sparse matrices to kernel parameters, and from kernels to the host.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>

#include "cuda/device.h"
#include "cuda/sparse/launch.h"
#include "sparse/csr.h"

namespace spamm::cuda {

// What a kernel finds for the host, in pinned memory, which it writes itself: a copy behind it
// would take longer.
template <class T>
class HostResult {
 public:
  T* on_device() const { return static_cast<T*>(memory_.mutable_data_ptr()); }

  // What the kernels of the stream have left. The host waits for them.
  T wait(cudaStream_t stream) const {
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    return *on_device();
  }

 private:
  at::Tensor memory_ = at::empty({static_cast<int64_t>(sizeof(T))},
                                 at::TensorOptions(at::kByte).pinned_memory(true));
};

// A pattern that kernels read in these tensors, which hold it.
inline kernels::Pattern pattern_of(const at::Tensor& crow, const at::Tensor& col) {
  const auto indices = [](const at::Tensor& x) {
    return kernels::Indices{x.const_data_ptr(), x.scalar_type() == at::kLong};
  };
  return {indices(crow), indices(col), static_cast<int>(crow.numel() - 1)};
}

// Indices of one type, contiguous.
struct CsrTensors {
  at::Tensor crow_a, col_a, norm_a, crow_b, col_b, norm_b, crow_added, col_added;
  int64_t columns;

  explicit CsrTensors(const BsrMaps& x, const OptTensor& crow = {}, const OptTensor& col = {})
      : norm_a(x.norm_a.contiguous()), norm_b(x.norm_b.contiguous()), columns(x.columns) {
    const auto is_narrow = [&](const at::Tensor& index, const char* name) {
      check_same_device(x.norm_a, index, "norm_a", name);
      return index.scalar_type() == at::kInt;
    };
    check_same_device(x.norm_a, x.norm_b, "norm_a", "norm_b");
    bool narrow = is_narrow(x.crow_a, "a's indices") & is_narrow(x.col_a, "a's indices") &
                  is_narrow(x.crow_b, "b's indices") & is_narrow(x.col_b, "b's indices");
    if (crow) narrow &= is_narrow(*crow, "input's indices") & is_narrow(*col, "input's indices");
    const auto read = [&](const at::Tensor& index) {
      return index.to(narrow ? at::kInt : at::kLong).contiguous();
    };
    crow_a = read(x.crow_a), col_a = read(x.col_a);
    crow_b = read(x.crow_b), col_b = read(x.col_b);
    if (crow) crow_added = read(*crow), col_added = read(*col);
    TORCH_CHECK(std::max({rows(), crow_b.numel(), columns}) <= std::numeric_limits<int32_t>::max(),
                "norm maps must have at most 2^31 - 1 block rows and columns; got ", rows(), " x ",
                crow_b.numel() - 1, " x ", columns);
  }

  int64_t rows() const { return crow_a.numel() - 1; }

  template <class Index, class Norm>
  kernels::CsrMaps<Index, Norm> pointers() const {
    return {pattern<Index>(crow_a, col_a, crow_b.numel() - 1),
            pattern<Index>(crow_b, col_b, columns), norm_a.const_data_ptr<Norm>(),
            norm_b.const_data_ptr<Norm>()};
  }
  template <class Index>
  kernels::CsrPattern<Index> added() const {
    if (!crow_added.defined()) return {};
    return pattern<Index>(crow_added, col_added, columns);
  }

  // run(maps) with pointers of the tensors' types, when `findings`, which are zero, are filled.
  template <class Run>
  void checked(kernels::CsrFindings* findings, cudaStream_t stream, const Run& run) const {
    const auto with = [&]<class Index, class Norm>(Index, Norm) {
      const auto maps = pointers<Index, Norm>();
      const auto added = this->added<Index>();
      CsrKernels<Index, Norm>::check_patterns(maps, added, findings, stream);
      run(maps);
    };
    const auto with_index = [&](auto index) {
      norm_a.scalar_type() == at::kDouble ? with(index, double{}) : with(index, float{});
    };
    crow_a.scalar_type() == at::kInt ? with_index(int32_t{}) : with_index(int64_t{});
  }

 private:
  template <class Index>
  static kernels::CsrPattern<Index> pattern(const at::Tensor& crow, const at::Tensor& col,
                                            int64_t columns) {
    return {crow.const_data_ptr<Index>(), col.const_data_ptr<Index>(), crow.numel() - 1, columns,
            col.numel()};
  }
};

}  // namespace spamm::cuda
