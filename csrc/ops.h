// The ops of the whole pipeline with their full signatures, called through the dispatcher.
// spamm/spamm.h declares the stages, and simpler forms of these.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace spamm::ops {

using at::IntArrayRef;
using at::OptionalIntArrayRef;
using at::Scalar;
using at::Tensor;
using OptTensor = std::optional<Tensor>;

template <class Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

inline std::tuple<Tensor, Tensor> norm_maps(const Tensor& a, const Tensor& b, IntArrayRef block) {
  static const auto op = find<decltype(ops::norm_maps)>("spamm_torch::norm_maps");
  return op.call(a, b, block);
}

inline std::tuple<Tensor, Tensor> likeness_order(const Tensor& images, int64_t bands) {
  static const auto op = find<decltype(ops::likeness_order)>("spamm_torch::likeness_order");
  return op.call(images, bands);
}

inline std::tuple<Tensor, Tensor, Tensor> order_images(const Tensor& images, int64_t bands) {
  static const auto op = find<decltype(ops::order_images)>("spamm_torch::order_images");
  return op.call(images, bands);
}

inline Tensor spamm(const Tensor& a, const Tensor& b, const OptTensor& tau,
                    std::optional<double> threshold, std::optional<double> valid_ratio,
                    std::optional<double> max_error, IntArrayRef block, const OptTensor& norm_a,
                    const OptTensor& norm_b, const OptTensor& input, const Scalar& beta,
                    const Scalar& alpha, OptionalIntArrayRef devices, bool symmetric) {
  static const auto op = find<decltype(ops::spamm)>("spamm_torch::spamm");
  return op.call(a, b, tau, threshold, valid_ratio, max_error, block, norm_a, norm_b, input, beta,
                 alpha, devices, symmetric);
}

inline std::tuple<Tensor, Tensor> spamm_with_norms(
    const Tensor& a, const Tensor& b, const OptTensor& tau, std::optional<double> threshold,
    std::optional<double> valid_ratio, std::optional<double> max_error, IntArrayRef block,
    const OptTensor& norm_a, const OptTensor& norm_b, const OptTensor& input, const Scalar& beta,
    const Scalar& alpha, OptionalIntArrayRef devices, bool symmetric) {
  static const auto op = find<decltype(ops::spamm_with_norms)>("spamm_torch::spamm_with_norms");
  return op.call(a, b, tau, threshold, valid_ratio, max_error, block, norm_a, norm_b, input, beta,
                 alpha, devices, symmetric);
}

inline void spamm_into(const Tensor& a, const Tensor& b, const Tensor& out, const OptTensor& tau,
                       std::optional<double> threshold, std::optional<double> valid_ratio,
                       std::optional<double> max_error, IntArrayRef block, const OptTensor& norm_a,
                       const OptTensor& norm_b, const OptTensor& input, const Scalar& beta,
                       const Scalar& alpha, OptionalIntArrayRef devices, bool symmetric,
                       const OptTensor& norms) {
  static const auto op = find<decltype(ops::spamm_into)>("spamm_torch::spamm_into");
  op.call(a, b, out, tau, threshold, valid_ratio, max_error, block, norm_a, norm_b, input, beta,
          alpha, devices, symmetric, norms);
}

inline void multiply_into(const Tensor& a, const Tensor& b, const Tensor& norm_a,
                          const Tensor& norm_b, const Tensor& tau, IntArrayRef block,
                          const Tensor& out, const OptTensor& input, const Scalar& beta,
                          const Scalar& alpha, bool symmetric, const OptTensor& norms) {
  static const auto op = find<decltype(ops::multiply_into)>("spamm_torch::multiply_into");
  op.call(a, b, norm_a, norm_b, tau, block, out, input, beta, alpha, symmetric, norms);
}

inline std::vector<Tensor> spamm_shards(at::TensorList a, at::TensorList b, const OptTensor& tau,
                                        std::optional<double> threshold,
                                        std::optional<double> valid_ratio,
                                        std::optional<double> max_error, IntArrayRef block) {
  static const auto op = find<decltype(ops::spamm_shards)>("spamm_torch::spamm_shards");
  return op.call(a, b, tau, threshold, valid_ratio, max_error, block);
}

inline Tensor conv2d(const Tensor& input, const Tensor& weight, const OptTensor& bias,
                     IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups,
                     const OptTensor& tau, std::optional<double> threshold,
                     std::optional<double> valid_ratio, std::optional<double> max_error,
                     OptionalIntArrayRef block, OptionalIntArrayRef pixel_block,
                     const OptTensor& norm_weight, const OptTensor& norm_input,
                     const OptTensor& residual, std::string_view activation, bool weight_is_ready) {
  static const auto op = find<decltype(ops::conv2d)>("spamm_torch::conv2d");
  return op.call(input, weight, bias, stride, padding, dilation, groups, tau, threshold,
                 valid_ratio, max_error, block, pixel_block, norm_weight, norm_input, residual,
                 activation, weight_is_ready);
}

inline Tensor dense_conv2d(const Tensor& input, const Tensor& weight, const OptTensor& bias,
                           IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                           int64_t groups, const OptTensor& residual, std::string_view activation) {
  static const auto op = find<decltype(ops::dense_conv2d)>("spamm_torch::dense_conv2d");
  return op.call(input, weight, bias, stride, padding, dilation, groups, residual, activation);
}

inline Tensor conv2d_deviation(const Tensor& input, const Tensor& weight, const Tensor& base,
                               IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                               int64_t groups, std::optional<double> threshold,
                               std::optional<double> valid_ratio, std::optional<double> max_error,
                               OptionalIntArrayRef block, OptionalIntArrayRef pixel_block,
                               const OptTensor& norm_weight, const OptTensor& norm_input,
                               const OptTensor& residual, std::string_view activation) {
  static const auto op = find<decltype(ops::conv2d_deviation)>("spamm_torch::conv2d_deviation");
  return op.call(input, weight, base, stride, padding, dilation, groups, threshold, valid_ratio,
                 max_error, block, pixel_block, norm_weight, norm_input, residual, activation);
}

inline std::tuple<Tensor, Tensor> conv2d_deviation_with_norms(
    const Tensor& input, const Tensor& weight, const Tensor& base, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation, int64_t groups, std::optional<double> threshold,
    std::optional<double> valid_ratio, std::optional<double> max_error, OptionalIntArrayRef block,
    OptionalIntArrayRef pixel_block, const OptTensor& norm_weight, const OptTensor& norm_input,
    const OptTensor& residual, std::string_view activation) {
  static const auto op =
      find<decltype(ops::conv2d_deviation_with_norms)>("spamm_torch::conv2d_deviation_with_norms");
  return op.call(input, weight, base, stride, padding, dilation, groups, threshold, valid_ratio,
                 max_error, block, pixel_block, norm_weight, norm_input, residual, activation);
}

inline std::tuple<Tensor, Tensor> conv2d_deviation_parts(
    at::TensorList parts, const Tensor& weight, const Tensor& base, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation, double threshold, OptionalIntArrayRef block,
    OptionalIntArrayRef pixel_block, const OptTensor& norm_weight, at::TensorList norm_parts,
    std::string_view activation, bool in_phases) {
  static const auto op =
      find<decltype(ops::conv2d_deviation_parts)>("spamm_torch::conv2d_deviation_parts");
  return op.call(parts, weight, base, stride, padding, dilation, threshold, block, pixel_block,
                 norm_weight, norm_parts, activation, in_phases);
}

inline std::vector<Tensor> conv2d_shards(at::TensorList input_shards, at::TensorList weight,
                                         at::TensorList bias, IntArrayRef stride,
                                         IntArrayRef padding, IntArrayRef dilation, int64_t groups,
                                         const OptTensor& tau, std::optional<double> threshold,
                                         std::optional<double> valid_ratio,
                                         std::optional<double> max_error, OptionalIntArrayRef block,
                                         OptionalIntArrayRef pixel_block,
                                         std::string_view activation) {
  static const auto op = find<decltype(ops::conv2d_shards)>("spamm_torch::conv2d_shards");
  return op.call(input_shards, weight, bias, stride, padding, dilation, groups, tau, threshold,
                 valid_ratio, max_error, block, pixel_block, activation);
}

inline Tensor conv2d_on_devices(const Tensor& input, const Tensor& weight, const OptTensor& bias,
                                IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                int64_t groups, IntArrayRef devices, const OptTensor& tau,
                                std::optional<double> threshold, std::optional<double> valid_ratio,
                                std::optional<double> max_error, OptionalIntArrayRef block,
                                OptionalIntArrayRef pixel_block, std::string_view activation) {
  static const auto op = find<decltype(ops::conv2d_on_devices)>("spamm_torch::conv2d_on_devices");
  return op.call(input, weight, bias, stride, padding, dilation, groups, devices, tau, threshold,
                 valid_ratio, max_error, block, pixel_block, activation);
}

inline std::tuple<Tensor, Tensor> conv2d_with_norms(
    const Tensor& input, const Tensor& weight, const OptTensor& bias, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation, int64_t groups, const OptTensor& tau,
    std::optional<double> threshold, std::optional<double> valid_ratio,
    std::optional<double> max_error, OptionalIntArrayRef block, OptionalIntArrayRef pixel_block,
    const OptTensor& norm_weight, const OptTensor& norm_input, const OptTensor& residual,
    std::string_view activation, bool weight_is_ready) {
  static const auto op = find<decltype(ops::conv2d_with_norms)>("spamm_torch::conv2d_with_norms");
  return op.call(input, weight, bias, stride, padding, dilation, groups, tau, threshold,
                 valid_ratio, max_error, block, pixel_block, norm_weight, norm_input, residual,
                 activation, weight_is_ready);
}

}  // namespace spamm::ops
