// The threshold ops on CUDA: turns tensors into kernel parameters.
#include "threshold.h"

#include "checks.h"
#include "cuda/device.h"
#include "cuda/operand.h"
#include "cuda/threshold/launch.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using kernels::NormMaps;

// Checked, contiguous norm maps with one batch dimension.
struct Maps {
  Tensor a, b, skip_norm_b;

  Maps(const Tensor& norm_a, const Tensor& norm_b, const std::optional<Tensor>& skip_norms)
      : a(flat(norm_a)), b(flat(norm_b)), skip_norm_b(skip_norms ? flat(*skip_norms) : b) {}

  bool empty() const { return a.numel() == 0 || b.numel() == 0; }

  template <class Norm>
  NormMaps<Norm> pointers() const {
    return {a.const_data_ptr<Norm>(),           b.const_data_ptr<Norm>(),
            skip_norm_b.const_data_ptr<Norm>(), a.size(0),
            static_cast<int>(a.size(1)),        static_cast<int>(a.size(2)),
            static_cast<int>(b.size(2))};
  }

 private:
  static Tensor flat(const Tensor& map) {
    const int64_t blocks = map.size(-2) * map.size(-1);
    const int64_t batch = blocks == 0 ? 0 : map.numel() / blocks;
    return map.reshape({batch, map.size(-2), map.size(-1)}).contiguous();
  }
};

template <class Run>
void with_pointers(const Maps& maps, const Run& run) {
  const auto checked = [&](const auto& pointers) {
    TORCH_CHECK(kernels::patches(pointers) <= std::numeric_limits<int32_t>::max(),
                "norm maps are too large for the threshold kernels; got shapes ", maps.a.sizes(),
                " and ", maps.b.sizes());
    run(pointers);
  };
  if (maps.a.scalar_type() == at::kDouble) {
    checked(maps.pointers<double>());
  } else {
    checked(maps.pointers<float>());
  }
}

Tensor find_tau(FindTauArguments& x) {
  check_find_tau(x);
  const OnDevice device(x.norm_a);
  const bool of_ratio = x.valid_ratio.has_value();
  const Maps maps(x.norm_a, of_ratio ? x.skip_norm_b.value_or(x.norm_b) : x.norm_b,
                  of_ratio ? std::nullopt : x.skip_norm_b);
  if (maps.empty()) return at::zeros({}, x.norm_a.options());
  const Tensor tau = at::empty({}, x.norm_a.options());
  with_pointers(maps, [&]<class Norm>(const NormMaps<Norm>& pointers) {
    using Kernels = ThresholdKernels<Norm>;
    const Tensor workspace = bytes_beside(x.norm_a, Kernels::find_tau_workspace());
    const auto search = of_ratio ? &Kernels::find_tau : &Kernels::find_tau_for_error;
    search(pointers, of_ratio ? *x.valid_ratio : *x.max_error, workspace.mutable_data_ptr(),
           tau.mutable_data_ptr<Norm>(), device.properties(), device.stream());
  });
  return tau;
}

Tensor valid_counts(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau) {
  check_norm_maps(norm_a, norm_b);
  check_tau(tau, norm_a.device());
  const OnDevice device(norm_a);
  const auto shape = product_shape(norm_a, norm_b);
  const Maps maps(norm_a, norm_b, std::nullopt);
  if (maps.empty()) return at::zeros(shape, norm_a.options().dtype(at::kInt));
  const Tensor counts = at::empty(shape, norm_a.options().dtype(at::kInt));
  const Threshold threshold(tau, norm_a.scalar_type());
  with_pointers(maps, [&]<class Norm>(const NormMaps<Norm>& pointers) {
    ThresholdKernels<Norm>::valid_counts(pointers, threshold.argument<Norm>(),
                                         counts.mutable_data_ptr<int32_t>(), device.stream());
  });
  return counts;
}

Tensor error_bound(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau,
                   const std::optional<Tensor>& skip_norm_b) {
  check_norm_maps(norm_a, norm_b);
  check_skip_norm_map(skip_norm_b, norm_b);
  check_tau(tau, norm_a.device());
  const OnDevice device(norm_a);
  const Maps maps(norm_a, norm_b, skip_norm_b);
  if (maps.empty()) return at::zeros({}, norm_a.options());
  const Tensor bound = at::empty({}, norm_a.options());
  const Threshold threshold(tau, norm_a.scalar_type());
  with_pointers(maps, [&]<class Norm>(const NormMaps<Norm>& pointers) {
    const Tensor workspace =
        bytes_beside(norm_a, ThresholdKernels<Norm>::error_bound_workspace(pointers));
    workspace.narrow(0, 0, kErrorStateBytes).zero_();
    ThresholdKernels<Norm>::error_bound(pointers, threshold.argument<Norm>(),
                                        workspace.mutable_data_ptr(),
                                        bound.mutable_data_ptr<Norm>(), device.stream());
  });
  return bound;
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) {
  m.impl("find_tau", boxed<&find_tau>());
  m.impl("valid_counts", &valid_counts);
  m.impl("error_bound", &error_bound);
}

}  // namespace spamm::cuda
