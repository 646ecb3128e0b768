// From the op's tau, a 0-d tensor, to what kernels take.
#pragma once

#include <ATen/core/Tensor.h>

#include "checks.h"
#include "kernels/common/tau.h"

namespace spamm::cuda {

// tau in the norms' type where it is on the device: converted there, never read. A host scalar goes
// along by value.
inline at::Tensor tau_as(const at::Tensor& tau, at::ScalarType norm_type) {
  return tau.is_cpu() ? tau : tau.to(norm_type);
}

// The usual type without a call of the dispatcher.
inline double host_scalar(const at::Tensor& tau) {
  return tau.scalar_type() == at::kDouble ? *tau.const_data_ptr<double>() : tau.item<double>();
}

// `tau` must outlive the launch that takes the result.
template <class Norm>
kernels::Tau<Norm> tau_argument(const at::Tensor& tau) {
  if (tau.is_cpu()) return {nullptr, static_cast<Norm>(host_scalar(tau))};
  return {tau.const_data_ptr<Norm>(), Norm{}};
}

}  // namespace spamm::cuda
