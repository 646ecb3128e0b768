// bsr_find_tau, bsr_error_bound and bsr_drop on CUDA. For the last the host waits once, for the
// number of blocks that stay.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "cuda/sparse/maps.h"
#include "cuda/tau_argument.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using kernels::CsrFindings;
using kernels::CsrMaps;

// A workspace of zeros, one in front of the findings, and of the search.
class Workspace {
 public:
  explicit Workspace(const at::TensorOptions& options)
      : zeros_(at::zeros({1 + static_cast<int64_t>(sizeof(CsrFindings)) / int64_t{sizeof(int64_t)}},
                         options.dtype(at::kLong))),
        rest_(at::empty({static_cast<int64_t>(sparse_search_workspace())},
                        options.dtype(at::kByte))) {}

  unsigned long long* zero() const {
    return reinterpret_cast<unsigned long long*>(zeros_.mutable_data_ptr<int64_t>());
  }
  CsrFindings* findings() const { return reinterpret_cast<CsrFindings*>(zero() + 1); }
  void* rest() const { return rest_.mutable_data_ptr(); }

 private:
  Tensor zeros_, rest_;
};

Tensor bsr_find_tau(BsrFindTauArguments& x) {
  check_indices(x);
  check_search({.valid_ratio = x.valid_ratio, .max_error = x.max_error});
  const OnDevice device(x.norm_a);
  const CsrTensors tensors(x);
  const Tensor tau = at::empty({}, x.norm_a.options());
  const Workspace workspace(x.norm_a.options());
  tensors.checked(workspace.findings(), device.stream(),
                  [&]<class Index, class Norm>(const CsrMaps<Index, Norm>& maps) {
                    CsrKernels<Index, Norm>::find_tau(maps, x.valid_ratio.has_value(),
                                                      x.valid_ratio ? *x.valid_ratio : *x.max_error,
                                                      workspace.findings(), workspace.rest(),
                                                      tau.mutable_data_ptr<Norm>(),
                                                      device.properties(), device.stream());
                  });
  return tau;
}

std::tuple<Tensor, Tensor> bsr_error_bound(BsrErrorBoundArguments& x) {
  check_indices(x);
  check_tau(x.tau, x.norm_a.device());
  const OnDevice device(x.norm_a);
  const CsrTensors tensors(x);
  const Tensor threshold = tau_as(x.tau, x.norm_a.scalar_type());
  const Tensor bound = at::empty({}, x.norm_a.options());
  const Tensor products = at::zeros({2}, x.norm_a.options().dtype(at::kLong));
  const Workspace workspace(x.norm_a.options());
  tensors.checked(workspace.findings(), device.stream(),
                  [&]<class Index, class Norm>(const CsrMaps<Index, Norm>& maps) {
                    CsrKernels<Index, Norm>::error_bound(
                        maps, tau_argument<Norm>(threshold), workspace.findings(), workspace.rest(),
                        workspace.zero(),
                        reinterpret_cast<unsigned long long*>(products.mutable_data_ptr<int64_t>()),
                        bound.mutable_data_ptr<Norm>(), device.properties(), device.stream());
                  });
  return {bound, products};
}

BsrDrop bsr_drop(BsrDropArguments& x) {
  check_drop(x);
  const OnDevice device(x.norms);
  TORCH_CHECK(!is_capturing(),
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

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) {
  m.impl("bsr_find_tau", boxed<&bsr_find_tau>());
  m.impl("bsr_error_bound", boxed<&bsr_error_bound>());
  m.impl("bsr_drop", boxed<&bsr_drop>());
}

}  // namespace spamm::cuda
