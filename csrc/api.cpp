// The C++ API. Each function calls its op through the dispatcher, so that C++ gets autograd,
// autocast and both devices as Python does.
#include <algorithm>

#include "checks.h"
#include "ops.h"
#include "shards/plan.h"
#include "spamm/spamm.h"

namespace spamm {

using ops::find;
using ops::OptTensor;

Knob Knob::with_tau(double tau) {
  Knob knob;
  knob.threshold = tau;
  return knob;
}

Knob Knob::with_tau(const Tensor& tau) {
  Knob knob;
  knob.tau = tau;
  return knob;
}

Knob Knob::with_valid_ratio(double valid_ratio) {
  Knob knob;
  knob.valid_ratio = valid_ratio;
  return knob;
}

Knob Knob::with_max_error(double max_error) {
  Knob knob;
  knob.max_error = max_error;
  return knob;
}

Tensor norm_map(const Tensor& a, IntArrayRef block) {
  static const auto op = find<Tensor(const Tensor&, IntArrayRef)>("spamm_torch::norm_map");
  return op.call(a, block);
}

Tensor find_tau(const Tensor& norm_a, const Tensor& norm_b, double valid_ratio,
                int64_t max_iterations, double tolerance) {
  static const auto op =
      find<Tensor(const Tensor&, const Tensor&, double, int64_t, double)>("spamm_torch::find_tau");
  return op.call(norm_a, norm_b, valid_ratio, max_iterations, tolerance);
}

Tensor find_tau_for_error(const Tensor& norm_a, const Tensor& norm_b, double max_error,
                          const OptTensor& skip_norm_b) {
  static const auto op = find<Tensor(const Tensor&, const Tensor&, double, const OptTensor&)>(
      "spamm_torch::find_tau_for_error");
  return op.call(norm_a, norm_b, max_error, skip_norm_b);
}

Tensor valid_counts(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau) {
  static const auto op =
      find<Tensor(const Tensor&, const Tensor&, const Tensor&)>("spamm_torch::valid_counts");
  return op.call(norm_a, norm_b, tau);
}

Tensor valid_ratio(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau) {
  static const auto op =
      find<Tensor(const Tensor&, const Tensor&, const Tensor&)>("spamm_torch::valid_ratio");
  return op.call(norm_a, norm_b, tau);
}

Tensor error_bound(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau,
                   const OptTensor& skip_norm_b) {
  static const auto op =
      find<Tensor(const Tensor&, const Tensor&, const Tensor&, const OptTensor&)>(
          "spamm_torch::error_bound");
  return op.call(norm_a, norm_b, tau, skip_norm_b);
}

Tensor multiply(const Tensor& a, const Tensor& b, const Tensor& norm_a, const Tensor& norm_b,
                const Tensor& tau, IntArrayRef block, const OptTensor& input, const Scalar& beta,
                const Scalar& alpha, at::OptionalIntArrayRef whole) {
  static const auto op =
      find<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                  IntArrayRef, const OptTensor&, const Scalar&, const Scalar&,
                  at::OptionalIntArrayRef)>("spamm_torch::multiply");
  return op.call(a, b, norm_a, norm_b, tau, block, input, beta, alpha, whole);
}

namespace {

void check_two_matrices(const char* name, const Tensor& a, const Tensor& b) {
  TORCH_CHECK(a.dim() == 2 && b.dim() == 2, name, " expects two matrices; got shapes ", a.sizes(),
              " and ", b.sizes());
}

}  // namespace

Tensor mm(const Tensor& a, const Tensor& b, const Knob& knob, IntArrayRef block,
          const OptTensor& norm_a, const OptTensor& norm_b, bool symmetric) {
  check_two_matrices("mm", a, b);
  return ops::spamm(a, b, knob.tau, knob.threshold, knob.valid_ratio, knob.max_error, block, norm_a,
                    norm_b, std::nullopt, 1, 1, std::nullopt, symmetric);
}

Tensor addmm(const Tensor& input, const Tensor& a, const Tensor& b, const Knob& knob,
             IntArrayRef block, const Scalar& beta, const Scalar& alpha, const OptTensor& norm_a,
             const OptTensor& norm_b, bool symmetric) {
  check_two_matrices("addmm", a, b);
  return ops::spamm(a, b, knob.tau, knob.threshold, knob.valid_ratio, knob.max_error, block, norm_a,
                    norm_b, input, beta, alpha, std::nullopt, symmetric);
}

std::tuple<Tensor, Tensor> mm_with_norms(const Tensor& a, const Tensor& b, const Knob& knob,
                                         IntArrayRef block, const OptTensor& norm_a,
                                         const OptTensor& norm_b, bool symmetric) {
  check_two_matrices("mm_with_norms", a, b);
  return ops::spamm_with_norms(a, b, knob.tau, knob.threshold, knob.valid_ratio, knob.max_error,
                               block, norm_a, norm_b, std::nullopt, 1, 1, std::nullopt, symmetric);
}

std::tuple<Tensor, Tensor> addmm_with_norms(const Tensor& input, const Tensor& a, const Tensor& b,
                                            const Knob& knob, IntArrayRef block, const Scalar& beta,
                                            const Scalar& alpha, const OptTensor& norm_a,
                                            const OptTensor& norm_b, bool symmetric) {
  check_two_matrices("addmm_with_norms", a, b);
  return ops::spamm_with_norms(a, b, knob.tau, knob.threshold, knob.valid_ratio, knob.max_error,
                               block, norm_a, norm_b, input, beta, alpha, std::nullopt, symmetric);
}

void mm_out(const Tensor& out, const Tensor& a, const Tensor& b, const Knob& knob,
            IntArrayRef block, const OptTensor& norm_a, const OptTensor& norm_b, bool symmetric) {
  check_two_matrices("mm_out", a, b);
  ops::spamm_into(a, b, out, knob.tau, knob.threshold, knob.valid_ratio, knob.max_error, block,
                  norm_a, norm_b, std::nullopt, 1, 1, std::nullopt, symmetric, std::nullopt);
}

void addmm_out(const Tensor& out, const Tensor& input, const Tensor& a, const Tensor& b,
               const Knob& knob, IntArrayRef block, const Scalar& beta, const Scalar& alpha,
               const OptTensor& norm_a, const OptTensor& norm_b, bool symmetric) {
  check_two_matrices("addmm_out", a, b);
  ops::spamm_into(a, b, out, knob.tau, knob.threshold, knob.valid_ratio, knob.max_error, block,
                  norm_a, norm_b, input, beta, alpha, std::nullopt, symmetric, std::nullopt);
}

Tensor bmm(const Tensor& a, const Tensor& b, const Knob& knob, IntArrayRef block) {
  TORCH_CHECK(a.dim() == 3 && b.dim() == 3,
              "bmm expects two batches of matrices (3-d); got shapes ", a.sizes(), " and ",
              b.sizes());
  return ops::spamm(a, b, knob.tau, knob.threshold, knob.valid_ratio, knob.max_error, block,
                    std::nullopt, std::nullopt, std::nullopt, 1, 1, std::nullopt,
                    /*symmetric=*/false);
}

Tensor linear(const Tensor& input, const Tensor& weight, const OptTensor& bias, const Knob& knob,
              IntArrayRef block) {
  TORCH_CHECK(input.dim() >= 1 && weight.dim() == 2 && input.size(-1) == weight.size(1),
              "linear expects input (..., in_features) and weight (out_features, in_features); got "
              "shapes ",
              input.sizes(), " and ", weight.sizes());
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == weight.size(0)),
              "bias must have shape [", weight.size(0), "] for a weight of shape ", weight.sizes(),
              "; got shape ", bias->sizes());
  auto shape = input.sizes().vec();
  shape.back() = weight.size(0);
  const Tensor rows = input.dim() == 1 ? input.unsqueeze(0) : input.flatten(0, -2);
  return ops::spamm(rows, weight.t(), knob.tau, knob.threshold, knob.valid_ratio, knob.max_error,
                    block, std::nullopt, std::nullopt, bias, 1, 1, std::nullopt,
                    /*symmetric=*/false)
      .reshape(shape);
}

Tensor conv2d(const Tensor& input, const Tensor& weight, const OptTensor& bias, const Knob& knob,
              IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups,
              at::OptionalIntArrayRef block, at::OptionalIntArrayRef pixel_block,
              const OptTensor& residual, std::string_view activation) {
  return ops::conv2d(input, weight, bias, stride, padding, dilation, groups, knob.tau,
                     knob.threshold, knob.valid_ratio, knob.max_error, block, pixel_block,
                     std::nullopt, std::nullopt, residual, activation, /*weight_is_ready=*/false);
}

Tensor dense_conv2d(const Tensor& input, const Tensor& weight, const OptTensor& bias,
                    IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups,
                    const OptTensor& residual, std::string_view activation) {
  return ops::dense_conv2d(input, weight, bias, stride, padding, dilation, groups, residual,
                           activation);
}

std::vector<int64_t> row_cuts(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau,
                              int64_t parts, IntArrayRef block) {
  static const auto op =
      find<std::vector<int64_t>(const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t)>(
          "spamm_torch::row_cuts");
  const int64_t m = check_block(block).m;
  auto cuts = op.call(norm_a, norm_b, tau, parts, std::max(m, shards::kCutRows) / m);
  for (int64_t& cut : cuts) cut *= m;
  return cuts;
}

std::vector<Tensor> conv2d_shards(at::TensorList input_shards, at::TensorList weight,
                                  at::TensorList bias, const Knob& knob, IntArrayRef stride,
                                  IntArrayRef padding, IntArrayRef dilation, int64_t groups,
                                  at::OptionalIntArrayRef block,
                                  at::OptionalIntArrayRef pixel_block,
                                  std::string_view activation) {
  return ops::conv2d_shards(input_shards, weight, bias, stride, padding, dilation, groups, knob.tau,
                            knob.threshold, knob.valid_ratio, knob.max_error, block, pixel_block,
                            activation);
}

std::vector<Tensor> mm_shards(at::TensorList a_shards, at::TensorList b_shards, const Knob& knob,
                              IntArrayRef block) {
  return ops::spamm_shards(a_shards, b_shards, knob.tau, knob.threshold, knob.valid_ratio,
                           knob.max_error, block);
}

Tensor mm_on_devices(const Tensor& a, const Tensor& b, IntArrayRef devices, const Knob& knob,
                     IntArrayRef block) {
  return ops::spamm(a, b, knob.tau, knob.threshold, knob.valid_ratio, knob.max_error, block,
                    std::nullopt, std::nullopt, std::nullopt, 1, 1, devices, /*symmetric=*/false);
}

Tensor conv2d_on_devices(const Tensor& input, const Tensor& weight, const OptTensor& bias,
                         IntArrayRef devices, const Knob& knob, IntArrayRef stride,
                         IntArrayRef padding, IntArrayRef dilation, int64_t groups,
                         at::OptionalIntArrayRef block, at::OptionalIntArrayRef pixel_block,
                         std::string_view activation) {
  return ops::conv2d_on_devices(input, weight, bias, stride, padding, dilation, groups, devices,
                                knob.tau, knob.threshold, knob.valid_ratio, knob.max_error, block,
                                pixel_block, activation);
}

std::string backend_for(at::Device device, at::ScalarType dtype, IntArrayRef block) {
  static const auto op =
      find<std::string(at::Device, at::ScalarType, IntArrayRef)>("spamm_torch::backend_for");
  return op.call(device, dtype, block);
}

}  // namespace spamm
