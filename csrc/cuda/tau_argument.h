// From a tau, a 0-d tensor, to the kernels' parameter.
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

// A threshold: a tensor in the norms' type on the GPU, or else a number.
struct Threshold {
  at::Tensor on_device = {};
  double number = 0;

  Threshold() = default;
  explicit Threshold(double number) : number(number) {}
  Threshold(const at::Tensor& tau, at::ScalarType norm_type) {
    if (tau.is_cpu()) {
      number = host_scalar(tau);
    } else {
      on_device = tau.to(norm_type);
    }
  }

  template <class Norm>
  kernels::Tau<Norm> argument() const {
    if (on_device.defined()) return {on_device.const_data_ptr<Norm>(), Norm{}};
    return {nullptr, static_cast<Norm>(number)};
  }
};

}  // namespace spamm::cuda
