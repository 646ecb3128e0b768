// Autocast: products and convolutions run in the lower precision of the autocast region, as torch's
// own ops do. Norm maps and thresholds keep their type, and so do ops that write to memory that is
// given, as torch's do.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "ops.h"

namespace spamm {
namespace {

using at::IntArrayRef;
using at::Scalar;
using at::Tensor;
using ops::OptTensor;

template <c10::DeviceType device>
struct Autocast {
  static Tensor cast(const Tensor& t) {
    const auto dtype = at::autocast::get_lower_precision_fp_from_device_type(device);
    return at::autocast::cached_cast(dtype, t, device);
  }

  static OptTensor cast(const OptTensor& t) { return t ? OptTensor(cast(*t)) : t; }

  static std::vector<Tensor> cast(at::TensorList tensors) {
    std::vector<Tensor> result;
    for (const Tensor& t : tensors) result.push_back(cast(t));
    return result;
  }

  static Tensor spamm(const Tensor& a, const Tensor& b, const OptTensor& tau,
                      std::optional<double> threshold, std::optional<double> valid_ratio,
                      std::optional<double> max_error, IntArrayRef block, const OptTensor& norm_a,
                      const OptTensor& norm_b, const OptTensor& input, const Scalar& beta,
                      const Scalar& alpha, at::OptionalIntArrayRef devices, bool symmetric) {
    c10::impl::ExcludeDispatchKeyGuard below(
        at::autocast::get_autocast_dispatch_key_from_device_type(device));
    return ops::spamm(cast(a), cast(b), tau, threshold, valid_ratio, max_error, block, norm_a,
                      norm_b, cast(input), beta, alpha, devices, symmetric);
  }

  static std::tuple<Tensor, Tensor> spamm_with_norms(
      const Tensor& a, const Tensor& b, const OptTensor& tau, std::optional<double> threshold,
      std::optional<double> valid_ratio, std::optional<double> max_error, IntArrayRef block,
      const OptTensor& norm_a, const OptTensor& norm_b, const OptTensor& input, const Scalar& beta,
      const Scalar& alpha, at::OptionalIntArrayRef devices, bool symmetric) {
    c10::impl::ExcludeDispatchKeyGuard below(
        at::autocast::get_autocast_dispatch_key_from_device_type(device));
    return ops::spamm_with_norms(cast(a), cast(b), tau, threshold, valid_ratio, max_error, block,
                                 norm_a, norm_b, cast(input), beta, alpha, devices, symmetric);
  }

  static Tensor conv2d(const Tensor& input, const Tensor& weight, const OptTensor& bias,
                       IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                       int64_t groups, const OptTensor& tau, std::optional<double> threshold,
                       std::optional<double> valid_ratio, std::optional<double> max_error,
                       at::OptionalIntArrayRef block, at::OptionalIntArrayRef pixel_block,
                       const OptTensor& norm_weight, const OptTensor& norm_input,
                       const OptTensor& residual, std::string_view activation,
                       bool weight_is_ready) {
    c10::impl::ExcludeDispatchKeyGuard below(
        at::autocast::get_autocast_dispatch_key_from_device_type(device));
    const Tensor cast_weight = cast(weight);
    return ops::conv2d(cast(input), cast_weight, cast(bias), stride, padding, dilation, groups, tau,
                       threshold, valid_ratio, max_error, block, pixel_block, norm_weight,
                       norm_input, cast(residual), activation,
                       weight_is_ready && cast_weight.is_same(weight));
  }

  static Tensor dense_conv2d(const Tensor& input, const Tensor& weight, const OptTensor& bias,
                             IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                             int64_t groups, const OptTensor& residual,
                             std::string_view activation) {
    c10::impl::ExcludeDispatchKeyGuard below(
        at::autocast::get_autocast_dispatch_key_from_device_type(device));
    return ops::dense_conv2d(cast(input), cast(weight), cast(bias), stride, padding, dilation,
                             groups, cast(residual), activation);
  }

  static Tensor conv2d_deviation(const Tensor& input, const Tensor& weight, const Tensor& base,
                                 IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                 int64_t groups, std::optional<double> threshold,
                                 std::optional<double> valid_ratio, std::optional<double> max_error,
                                 at::OptionalIntArrayRef block, at::OptionalIntArrayRef pixel_block,
                                 const OptTensor& norm_weight, const OptTensor& norm_input,
                                 const OptTensor& residual, std::string_view activation) {
    c10::impl::ExcludeDispatchKeyGuard below(
        at::autocast::get_autocast_dispatch_key_from_device_type(device));
    return ops::conv2d_deviation(cast(input), cast(weight), cast(base), stride, padding, dilation,
                                 groups, threshold, valid_ratio, max_error, block, pixel_block,
                                 norm_weight, norm_input, cast(residual), activation);
  }

  static std::tuple<Tensor, Tensor> conv2d_deviation_with_norms(
      const Tensor& input, const Tensor& weight, const Tensor& base, IntArrayRef stride,
      IntArrayRef padding, IntArrayRef dilation, int64_t groups, std::optional<double> threshold,
      std::optional<double> valid_ratio, std::optional<double> max_error,
      at::OptionalIntArrayRef block, at::OptionalIntArrayRef pixel_block,
      const OptTensor& norm_weight, const OptTensor& norm_input, const OptTensor& residual,
      std::string_view activation) {
    c10::impl::ExcludeDispatchKeyGuard below(
        at::autocast::get_autocast_dispatch_key_from_device_type(device));
    return ops::conv2d_deviation_with_norms(cast(input), cast(weight), cast(base), stride, padding,
                                            dilation, groups, threshold, valid_ratio, max_error,
                                            block, pixel_block, norm_weight, norm_input,
                                            cast(residual), activation);
  }

  static std::tuple<Tensor, Tensor> conv2d_deviation_parts(
      at::TensorList parts, const Tensor& weight, const Tensor& base, IntArrayRef stride,
      IntArrayRef padding, IntArrayRef dilation, double threshold, at::OptionalIntArrayRef block,
      at::OptionalIntArrayRef pixel_block, const OptTensor& norm_weight, at::TensorList norm_parts,
      std::string_view activation, bool in_phases) {
    c10::impl::ExcludeDispatchKeyGuard below(
        at::autocast::get_autocast_dispatch_key_from_device_type(device));
    return ops::conv2d_deviation_parts(cast(parts), cast(weight), cast(base), stride, padding,
                                       dilation, threshold, block, pixel_block, norm_weight,
                                       norm_parts, activation, in_phases);
  }

  static std::tuple<Tensor, Tensor> conv2d_with_norms(
      const Tensor& input, const Tensor& weight, const OptTensor& bias, IntArrayRef stride,
      IntArrayRef padding, IntArrayRef dilation, int64_t groups, const OptTensor& tau,
      std::optional<double> threshold, std::optional<double> valid_ratio,
      std::optional<double> max_error, at::OptionalIntArrayRef block,
      at::OptionalIntArrayRef pixel_block, const OptTensor& norm_weight,
      const OptTensor& norm_input, const OptTensor& residual, std::string_view activation,
      bool weight_is_ready) {
    c10::impl::ExcludeDispatchKeyGuard below(
        at::autocast::get_autocast_dispatch_key_from_device_type(device));
    const Tensor cast_weight = cast(weight);
    return ops::conv2d_with_norms(cast(input), cast_weight, cast(bias), stride, padding, dilation,
                                  groups, tau, threshold, valid_ratio, max_error, block,
                                  pixel_block, norm_weight, norm_input, cast(residual), activation,
                                  weight_is_ready && cast_weight.is_same(weight));
  }

  static std::vector<Tensor> conv2d_shards(
      at::TensorList input_shards, at::TensorList weight, at::TensorList bias, IntArrayRef stride,
      IntArrayRef padding, IntArrayRef dilation, int64_t groups, const OptTensor& tau,
      std::optional<double> threshold, std::optional<double> valid_ratio,
      std::optional<double> max_error, at::OptionalIntArrayRef block,
      at::OptionalIntArrayRef pixel_block, std::string_view activation) {
    c10::impl::ExcludeDispatchKeyGuard below(
        at::autocast::get_autocast_dispatch_key_from_device_type(device));
    return ops::conv2d_shards(cast(input_shards), cast(weight), cast(bias), stride, padding,
                              dilation, groups, tau, threshold, valid_ratio, max_error, block,
                              pixel_block, activation);
  }

  static Tensor conv2d_on_devices(const Tensor& input, const Tensor& weight, const OptTensor& bias,
                                  IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                  int64_t groups, IntArrayRef devices, const OptTensor& tau,
                                  std::optional<double> threshold,
                                  std::optional<double> valid_ratio,
                                  std::optional<double> max_error, at::OptionalIntArrayRef block,
                                  at::OptionalIntArrayRef pixel_block,
                                  std::string_view activation) {
    c10::impl::ExcludeDispatchKeyGuard below(
        at::autocast::get_autocast_dispatch_key_from_device_type(device));
    return ops::conv2d_on_devices(cast(input), cast(weight), cast(bias), stride, padding, dilation,
                                  groups, devices, tau, threshold, valid_ratio, max_error, block,
                                  pixel_block, activation);
  }

  static void register_ops(torch::Library& m) {
    m.impl("spamm", &spamm);
    m.impl("spamm_with_norms", &spamm_with_norms);
    m.impl("conv2d", &conv2d);
    m.impl("dense_conv2d", &dense_conv2d);
    m.impl("conv2d_deviation", &conv2d_deviation);
    m.impl("conv2d_deviation_with_norms", &conv2d_deviation_with_norms);
    m.impl("conv2d_deviation_parts", &conv2d_deviation_parts);
    m.impl("conv2d_shards", &conv2d_shards);
    m.impl("conv2d_on_devices", &conv2d_on_devices);
    m.impl("conv2d_with_norms", &conv2d_with_norms);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, AutocastCPU, m) { Autocast<at::kCPU>::register_ops(m); }
TORCH_LIBRARY_IMPL(spamm_torch, AutocastCUDA, m) { Autocast<at::kCUDA>::register_ops(m); }

}  // namespace spamm
