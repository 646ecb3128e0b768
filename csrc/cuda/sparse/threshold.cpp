// bsr_find_tau and bsr_error_bound on CUDA. Nothing waits.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
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
                    launch_find_sparse_tau(maps, x.valid_ratio.has_value(),
                                           x.valid_ratio ? *x.valid_ratio : *x.max_error,
                                           workspace.findings(), workspace.rest(),
                                           tau.mutable_data_ptr<Norm>(), device.properties(),
                                           device.stream());
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
                    launch_sparse_error_bound(
                        maps, tau_argument<Norm>(threshold), workspace.findings(), workspace.rest(),
                        workspace.zero(),
                        reinterpret_cast<unsigned long long*>(products.mutable_data_ptr<int64_t>()),
                        bound.mutable_data_ptr<Norm>(), device.properties(), device.stream());
                  });
  return {bound, products};
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) {
  m.impl("bsr_find_tau", boxed<&bsr_find_tau>());
  m.impl("bsr_error_bound", boxed<&bsr_error_bound>());
}

}  // namespace spamm::cuda
