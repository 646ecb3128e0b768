// bsr_drop on CUDA. The host waits once, for the number of blocks that stay.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <torch/library.h>

#include "cuda/sparse/maps.h"

namespace spamm::cuda {
namespace {

using at::Tensor;

BsrDrop bsr_drop(BsrDropArguments& x) {
  check_drop(x);
  const OnDevice device(x.norms);
  TORCH_CHECK(c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None,
              "to drop blocks of a result the host waits for their number: expected no drop; got "
              "one while a CUDA graph is captured");
  const Tensor crow = x.crow.contiguous(), col = x.col.contiguous(), norms = x.norms.contiguous();
  const int64_t stored = norms.numel(), rows = crow.numel() - 1;
  const auto index = norms.options().dtype(at::kLong);
  const Tensor kept_crow = at::empty({rows + 1}, index), kept = at::empty({2, stored}, index);
  const Tensor kept_norms = at::empty_like(norms), bound = at::empty({}, norms.options());
  const Tensor values = x.values ? x.values->contiguous() : Tensor();
  const HostResult<kernels::DropTotals> totals;
  const auto run = [&]<class Norm>(Norm) {
    const auto room = static_cast<int64_t>(drop_workspace<Norm>());
    const Tensor work = at::empty({room + stored}, norms.options().dtype(at::kByte));
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
    if (x.values) {
      params.values = values.const_data_ptr<Norm>();
      params.edge = static_cast<int>(values.size(1));
    }
    params.work = static_cast<kernels::DropWork<Norm>*>(work.mutable_data_ptr());
    params.stays = reinterpret_cast<bool*>(work.mutable_data_ptr<uint8_t>() + room);
    params.crow = kept_crow.mutable_data_ptr<int64_t>();
    params.col = kept.mutable_data_ptr<int64_t>(), params.numbers = params.col + stored;
    params.kept_norms = kept_norms.mutable_data_ptr<Norm>();
    params.bound = bound.mutable_data_ptr<Norm>();
    params.totals = totals.on_device();
    launch_drop(params, device.multiprocessors(), device.stream());
  };
  norms.scalar_type() == at::kDouble ? run(double{}) : run(float{});
  const auto [stay, trace, norm] = totals.wait(device.stream());
  const Tensor sums = x.values ? at::tensor({trace, norm}, at::kDouble)
                               : at::empty({0}, at::TensorOptions().dtype(at::kDouble));
  return {kept_crow,
          kept[0].narrow(0, 0, stay),
          kept_norms.narrow(0, 0, stay),
          kept[1].narrow(0, 0, stay),
          bound,
          sums};
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) { m.impl("bsr_drop", boxed<&bsr_drop>()); }

}  // namespace spamm::cuda
