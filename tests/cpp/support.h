// What the tests share: devices, matrices with decay, and a slow, obvious SpAMM to compare with.
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

// The definition, block by block in float64; norm maps decide exactly as they do in the library.
inline Tensor reference_mm(const Tensor& a, const Tensor& b, const Tensor& norm_a,
                           const Tensor& norm_b, double tau, at::IntArrayRef block) {
  const Tensor maps_a = norm_a.cpu(), maps_b = norm_b.cpu();
  const Tensor threshold = at::scalar_tensor(tau, maps_a.options());
  const Tensor rows = a.to(at::kDouble), columns = b.to(at::kDouble);
  Tensor c = at::zeros({a.size(0), b.size(1)}, rows.options());
  const auto part = [](const Tensor& t, int64_t dim, int64_t index, int64_t edge) {
    return t.narrow(dim, index * edge, std::min(edge, t.size(dim) - index * edge));
  };
  for (int64_t i = 0; i < maps_a.size(0); ++i) {
    for (int64_t j = 0; j < maps_b.size(1); ++j) {
      Tensor target = part(part(c, 0, i, block[0]), 1, j, block[2]);
      for (int64_t k = 0; k < maps_a.size(1); ++k) {
        if ((maps_a[i][k] * maps_b[k][j]).lt(threshold).item<bool>()) continue;
        target += part(part(rows, 0, i, block[0]), 1, k, block[1])
                      .mm(part(part(columns, 0, k, block[1]), 1, j, block[2]));
      }
    }
  }
  return c;
}

}  // namespace spamm::testing
