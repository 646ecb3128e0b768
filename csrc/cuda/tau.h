// From the op's tau, a 0-d tensor, to what kernels take.
#pragma once

#include <ATen/core/Tensor.h>

#include "checks.h"
#include "kernels/tau.h"

namespace spamm::cuda {

// tau in the norms' type. On the device it is converted there, never read; a host scalar goes along
// by value.
inline at::Tensor tau_as(const at::Tensor& tau, at::ScalarType norm_type) {
  return tau.to(norm_type);
}

// `tau` must outlive the launch that takes the result.
template <class Norm>
kernels::Tau<Norm> tau_argument(const at::Tensor& tau) {
  if (tau.is_cpu()) return {nullptr, *tau.const_data_ptr<Norm>()};
  return {tau.const_data_ptr<Norm>(), Norm{}};
}

}  // namespace spamm::cuda
