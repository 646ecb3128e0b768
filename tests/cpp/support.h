// Parts that the tests share: devices, matrices with decay, and a slow, obvious SpAMM.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Device.h>
#include <gtest/gtest.h>

#include <string>

#include "spamm/spamm.h"

namespace spamm::testing {

inline const Knob kDense = {.threshold = 0.0};  // nothing is skipped

// Why CUDA tests cannot run here; empty where they can.
inline std::string no_cuda() {
  if (!at::hasCUDA()) return "needs a CUDA device";
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("spamm_torch::norm_map", "");
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::CUDA)) return "the library has no CUDA kernels";
  return "";
}

// A test that runs on the CPU and, where there is one, on a CUDA device.
class OnDevice : public ::testing::TestWithParam<c10::DeviceType> {
 protected:
  void SetUp() override {
    if (GetParam() == at::kCUDA && !no_cuda().empty()) GTEST_SKIP() << no_cuda();
    at::manual_seed(0);
  }

  at::TensorOptions options(at::ScalarType dtype = at::kFloat) const {
    return at::TensorOptions().device(GetParam()).dtype(dtype);
  }

  // Random entries that fall by e every `length` steps away from the diagonal. Made on the CPU, so
  // that every device gets the same.
  Tensor decaying(int64_t rows, int64_t columns, at::ScalarType dtype = at::kFloat,
                  double length = 8) const {
    const Tensor i = at::arange(rows, at::kDouble).unsqueeze(1);
    const Tensor j = at::arange(columns, at::kDouble).unsqueeze(0);
    const Tensor entries =
        at::randn({rows, columns}, at::kDouble) * at::exp(-(i - j).abs() / length);
    return entries.to(options(dtype));
  }

  Tensor random(at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) const {
    return at::randn(shape, at::kDouble).to(options(dtype));
  }
};

inline std::string device_name(const ::testing::TestParamInfo<c10::DeviceType>& info) {
  return c10::DeviceTypeName(info.param, /*lower_case=*/false);
}

#define SPAMM_TEST_ON_DEVICES(suite)                                               \
  INSTANTIATE_TEST_SUITE_P(Devices, suite, ::testing::Values(at::kCPU, at::kCUDA), \
                           ::spamm::testing::device_name)

// norm(x - y) / norm(y) in float64; 0 for two zeros.
inline double relative_error(const Tensor& x, const Tensor& y) {
  const Tensor expected = y.to(at::kDouble);
  const double distance = (x.to(at::kDouble) - expected).norm().item<double>();
  return distance == 0 ? 0 : distance / expected.norm().item<double>();
}

// Rounding that a product of entries of this type may show, relative to the whole matrix.
inline double tolerance(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return 1e-3;
    case at::kBFloat16:
      return 8e-3;
    case at::kFloat:
      return 1e-5;
    default:
      return 1e-13;
  }
}

}  // namespace spamm::testing
