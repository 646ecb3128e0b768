// The C++ API. Each function calls its op through the dispatcher, so that C++ gets autograd,
// autocast and both devices as Python does. backend_for, whose arguments hold no tensor, is here.
#include "arguments.h"
#include "backends.h"
#include "checks.h"
#include "shards/plan.h"

namespace spamm {

using ops::call;
using ops::find;

Tensor norm_map(const Tensor& a, IntArrayRef block) {
  static const auto op = find("spamm_torch::norm_map").typed<Tensor(const Tensor&, IntArrayRef)>();
  return op.call(a, block);
}

Tensor find_tau(const Tensor& norm_a, const Tensor& norm_b, double valid_ratio) {
  static const auto op = find("spamm_torch::find_tau");
  return call<Tensor>(op, FindTauArguments{norm_a, norm_b, valid_ratio});
}

Tensor find_tau_for_error(const Tensor& norm_a, const Tensor& norm_b, double max_error,
                          const OptTensor& skip_norm_b) {
  static const auto op = find("spamm_torch::find_tau");
  return call<Tensor>(op, FindTauArguments{norm_a, norm_b, {}, max_error, skip_norm_b});
}

// An op of two norm maps and a threshold.
using OfMaps = Tensor(const Tensor&, const Tensor&, const Tensor&);

Tensor valid_counts(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau) {
  static const auto op = find("spamm_torch::valid_counts").typed<OfMaps>();
  return op.call(norm_a, norm_b, tau);
}

// The counts are exact, so only the division rounds.
Tensor valid_ratio(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau) {
  const Tensor counts = valid_counts(norm_a, norm_b, tau);
  const int64_t products = counts.numel() * norm_a.size(-1);
  if (products == 0) return at::ones({}, norm_a.options());
  const Tensor valid = counts.sum(at::kLong).to(at::kDouble);
  // Divides by a tensor: by a number, CUDA multiplies by its rounded inverse.
  return valid.div(at::full({}, products, valid.options())).to(norm_a.scalar_type());
}

Tensor error_bound(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau,
                   const OptTensor& skip_norm_b) {
  static const auto op =
      find("spamm_torch::error_bound")
          .typed<Tensor(const Tensor&, const Tensor&, const Tensor&, const OptTensor&)>();
  return op.call(norm_a, norm_b, tau, skip_norm_b);
}

Tensor multiply(const Tensor& a, const Tensor& b, const Tensor& norm_a, const Tensor& norm_b,
                const Tensor& tau, IntArrayRef block, const MultiplyOptions& options) {
  static const auto op = find("spamm_torch::multiply");
  return call<Tensor>(op, MultiplyArguments{options, a, b, norm_a, norm_b, tau, DimVector(block)});
}

namespace {

void check_two_matrices(const char* name, const Tensor& a, const Tensor& b) {
  TORCH_CHECK(a.dim() == 2 && b.dim() == 2, name, " expects two matrices; got shapes ", a.sizes(),
              " and ", b.sizes());
}

}  // namespace

Tensor mm(const Tensor& a, const Tensor& b, const ProductOptions& options) {
  check_two_matrices("mm", a, b);
  return ops::spamm({options, a, b});
}

std::tuple<Tensor, Tensor> mm_with_norms(const Tensor& a, const Tensor& b,
                                         const ProductOptions& options) {
  check_two_matrices("mm_with_norms", a, b);
  static const auto op = find("spamm_torch::spamm_with_norms");
  return call<std::tuple<Tensor, Tensor>>(op, ProductArguments{options, a, b});
}

void mm_out(const Tensor& out, const Tensor& a, const Tensor& b, const ProductOptions& options) {
  check_two_matrices("mm_out", a, b);
  static const auto op = find("spamm_torch::spamm_into");
  call<void>(op, ProductArguments{options, a, b, out});
}

Tensor bmm(const Tensor& a, const Tensor& b, const ProductOptions& options) {
  TORCH_CHECK(a.dim() == 3 && b.dim() == 3,
              "bmm expects two batches of matrices (3-d); got shapes ", a.sizes(), " and ",
              b.sizes());
  return ops::spamm({options, a, b});
}

Tensor linear(const Tensor& input, const Tensor& weight, const OptTensor& bias,
              const ProductOptions& options) {
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
  ProductArguments product{options, rows, weight.t()};
  product.input = bias;
  return ops::spamm(product).reshape(shape);
}

Tensor conv2d(const Tensor& input, const Tensor& weight, const OptTensor& bias,
              const ConvOptions& options) {
  static const auto op = find("spamm_torch::conv2d");
  return call<Tensor>(op, ConvArguments{options, input, weight, bias});
}

Tensor dense_conv2d(const Tensor& input, const Tensor& weight, const OptTensor& bias,
                    const ConvOptions& options) {
  static const auto op = find("spamm_torch::dense_conv2d");
  return call<Tensor>(op, DenseConvArguments{{options, input, weight, bias}});
}

std::vector<int64_t> row_cuts(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau,
                              int64_t parts, IntArrayRef block) {
  using Work = std::tuple<Tensor, std::vector<int64_t>>(const Tensor&, const Tensor&, const Tensor&,
                                                        int64_t, int64_t);
  static const auto op = find("spamm_torch::row_work").typed<Work>();
  const int64_t m = check_block(block).m;
  TORCH_CHECK_VALUE(parts > 0, "parts must be positive; got ", parts);
  auto cuts = std::get<1>(op.call(norm_a, norm_b, tau, parts, std::max(m, shards::kCutRows) / m));
  for (int64_t& cut : cuts) cut *= m;
  return cuts;
}

std::vector<Tensor> mm_shards(at::TensorList a_shards, at::TensorList b_shards,
                              const ProductOptions& options) {
  static const auto op = find("spamm_torch::spamm_shards");
  return call<std::vector<Tensor>>(
      op, ProductShardsArguments{a_shards.vec(), b_shards.vec(), options.knob, options.block});
}

namespace {

std::string backend_for_op(at::Device device, at::ScalarType dtype, IntArrayRef block) {
  check_operand_dtype(dtype, "dtype");
  const Block edges = check_block(block);
  const auto* kernels = Backends<NamedKernels>::find(device.type());
  TORCH_CHECK(kernels != nullptr || !device.is_cuda(),
              "this build of spamm_torch is for the CPU only; build it again where nvcc is found, "
              "for device ",
              device);
  TORCH_CHECK(kernels != nullptr, "device must be a CPU or a CUDA device; got ", device);
  return kernels->name(device, dtype, edges);
}

}  // namespace

std::string backend_for(at::Device device, at::ScalarType dtype, IntArrayRef block) {
  static const auto op = find("spamm_torch::backend_for")
                             .typed<std::string(at::Device, at::ScalarType, IntArrayRef)>();
  return op.call(device, dtype, block);
}

TORCH_LIBRARY_IMPL(spamm_torch, CompositeImplicitAutograd, m) {
  m.impl("backend_for", &backend_for_op);
}

}  // namespace spamm
