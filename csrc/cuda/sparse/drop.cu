// bsr_drop on CUDA. The host waits once, for the number of blocks that stay.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <torch/library.h>

#include "cuda/sparse/blocks.h"
#include "kernels/sparse/drop.cuh"
#include "sparse/csr.h"

namespace spamm::cuda {
namespace {

using at::Tensor;

BsrDrop bsr_drop(BsrDropArguments& x) {
  check_drop(x);
  const OnDevice device(x.norms);
  const Tensor crow = x.crow.contiguous(), col = x.col.contiguous(), norms = x.norms.contiguous();
  const int64_t stored = norms.numel();
  const auto index = norms.options().dtype(at::kLong);
  const Tensor kept_crow = at::empty({crow.numel()}, index), kept = at::empty({2, stored}, index);
  const Tensor kept_norms = at::empty_like(norms), bound = at::empty({}, norms.options());
  const Tensor places = at::empty({stored + 1}, index.dtype(at::kInt)),
               count = at::empty({}, index);
  const auto run = [&]<class Norm>(Norm) {
    kernels::DropParams<Norm> params{};
    params.pattern = pattern_of(crow, col);
    params.norms = norms.const_data_ptr<Norm>(), params.stored = stored;
    params.below = x.below, params.share = x.share.value_or(-1), params.symmetric = x.symmetric;
    Tensor a, b;
    if (x.share) {
      a = x.norm_a->contiguous(), b = x.norm_b->contiguous();
      params.norm_a = a.const_data_ptr<Norm>(), params.stored_a = a.numel();
      params.norm_b = b.const_data_ptr<Norm>(), params.stored_b = b.numel();
    }
    params.crow = kept_crow.mutable_data_ptr<int64_t>();
    params.col = kept.mutable_data_ptr<int64_t>(), params.numbers = params.col + stored;
    params.count = count.mutable_data_ptr<int64_t>();
    params.kept_norms = kept_norms.mutable_data_ptr<Norm>();
    params.bound = bound.mutable_data_ptr<Norm>();
    params.places = places.mutable_data_ptr<int>();
    kernels::drop_blocks<<<1, kernels::kDropThreads, 0, device.stream()>>>(params);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  };
  norms.scalar_type() == at::kDouble ? run(double{}) : run(float{});
  const int64_t stay = count.item<int64_t>();
  return {kept_crow, kept[0].narrow(0, 0, stay), kept_norms.narrow(0, 0, stay),
          kept[1].narrow(0, 0, stay), bound};
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) {
  m.impl("bsr_drop", torch::CppFunction::makeFromBoxedFunction<&run_bsr<&bsr_drop>>());
}

}  // namespace spamm::cuda
