// From the tensors of block-sparse matrices to kernel parameters, and from kernels to the host.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "cuda/device.h"
#include "cuda/sparse/launch.h"
#include "sparse/csr.h"

namespace spamm::cuda {

// A kernel's findings for the host, in pinned memory that it writes: copies after it take longer.
template <class T>
class HostResult {
 public:
  T* on_device() const { return static_cast<T*>(memory_.mutable_data_ptr()); }

  // Reads what the kernels of the stream have left. The host waits for them.
  T wait(cudaStream_t stream) const {
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    return *on_device();
  }

 private:
  at::Tensor memory_ = at::empty({static_cast<int64_t>(sizeof(T))},
                                 at::TensorOptions(at::kByte).pinned_memory(true));
};

inline kernels::Indices indices_of(const at::Tensor& x) {
  return {x.const_data_ptr(), x.scalar_type() == at::kLong};
}

// A pattern that kernels read in these tensors, which hold it.
inline kernels::Pattern pattern_of(const at::Tensor& crow, const at::Tensor& col) {
  return {indices_of(crow), indices_of(col), static_cast<int>(crow.numel() - 1)};
}

// The patterns and norms of two matrices, and the pattern of what is added, as kernels read them.
class CsrTensors {
 public:
  explicit CsrTensors(const BsrMaps& x, const OptTensor& crow = {}, const OptTensor& col = {})
      : norm_a_(x.norm_a.contiguous()), norm_b_(x.norm_b.contiguous()) {
    check_same_device(x.norm_a, x.norm_b, "norm_a", "norm_b");
    add(x.crow_a, x.col_a, x.crow_b.numel() - 1, "a's indices");
    add(x.crow_b, x.col_b, x.columns, "b's indices");
    if (crow) add(*crow, *col, x.columns, "input's indices");
    TORCH_CHECK(
        std::max({rows(), x.crow_b.numel(), x.columns}) <= std::numeric_limits<int32_t>::max(),
        "norm maps must have at most 2^31 - 1 block rows and columns; got ", rows(), " x ",
        x.crow_b.numel() - 1, " x ", x.columns);
    // One piece of memory for all copies.
    int64_t copied = 0;
    const auto for_each_copy = [&](const auto& use) {
      for (kernels::GivenPattern& p : patterns_) {
        if (p.given_crow.wide) use(p.crow, p.rows + 1);
        if (p.given_col.wide) use(p.col, p.stored);
      }
    };
    for_each_copy([&](const int32_t*, int64_t count) { copied += count; });
    if (copied == 0) return;
    copies_ = at::empty({copied}, norm_a_.options().dtype(at::kInt));
    auto* next = copies_.mutable_data_ptr<int32_t>();
    for_each_copy(
        [&](const int32_t*& to, int64_t count) { to = std::exchange(next, next + count); });
  }

  int64_t rows() const { return patterns_[0].rows; }
  const kernels::CsrPattern& added() const { return patterns_[2]; }

  // run(maps) with pointers of the norms' type, when `findings`, which are zero, are filled.
  template <class Run>
  void checked(kernels::CsrFindings* findings, cudaStream_t stream, const Run& run) const {
    launch_check_patterns(patterns_, findings, stream);
    const auto with = [&]<class Norm>(Norm) {
      run(kernels::CsrMaps<Norm>{patterns_[0], patterns_[1], norm_a_.const_data_ptr<Norm>(),
                                 norm_b_.const_data_ptr<Norm>()});
    };
    norm_a_.scalar_type() == at::kDouble ? with(double{}) : with(float{});
  }

 private:
  void add(const at::Tensor& crow, const at::Tensor& col, int64_t columns, const char* name) {
    for (const at::Tensor* index : {&crow, &col})
      check_same_device(norm_a_, *index, "norm_a", name);
    kernels::GivenPattern& p = patterns_[indices_.size() / 2];
    p.given_crow = indices_of(indices_.emplace_back(crow.contiguous()));
    p.given_col = indices_of(indices_.emplace_back(col.contiguous()));
    p.crow = static_cast<const int32_t*>(p.given_crow.data);
    p.col = static_cast<const int32_t*>(p.given_col.data);
    p.rows = crow.numel() - 1, p.columns = columns, p.stored = col.numel();
  }

  at::Tensor norm_a_, norm_b_, copies_;
  c10::SmallVector<at::Tensor, 6> indices_;
  kernels::GivenPattern patterns_[3] = {};
};

}  // namespace spamm::cuda
