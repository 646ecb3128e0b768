// From an op's tau, a 0-d tensor, to the kernels' parameter.
#pragma once

#include <ATen/core/Tensor.h>

#include "checks.h"
#include "kernels/common/tau.h"
#include "threshold.h"

namespace spamm::cuda {

// tau in the norms' type. On a GPU it is converted there, so that the host never waits for it. A
// host scalar is unchanged: kernels get it by value.
inline at::Tensor tau_as(const at::Tensor& tau, at::ScalarType norm_type) {
  return tau.is_cpu() ? tau : tau.to(norm_type);
}

// `tau` must outlive the launch that uses the result.
template <class Norm>
kernels::Tau<Norm> tau_argument(const at::Tensor& tau) {
  if (tau.is_cpu()) return {nullptr, static_cast<Norm>(host_scalar(tau))};
  return {tau.const_data_ptr<Norm>(), Norm{}};
}

}  // namespace spamm::cuda
