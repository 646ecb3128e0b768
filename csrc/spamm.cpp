// SpAMM as one op: norm map -> threshold -> multiply. Device-free, because each stage is an op that
// is dispatched by itself.
#include "spamm.h"

#include <ATen/Functions.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "checks.h"
#include "ops.h"
#include "same_memory.h"
#include "shards/spamm_devices.h"
#include "spamm/spamm.h"
#include "threshold.h"

namespace spamm {

using OptTensor = std::optional<Tensor>;

bool share_norm_map(const Tensor& a, const Tensor& b, const Block& block) {
  return block.m == block.k && block.k == block.n && is_same_view(a, b);
}

std::tuple<Tensor, Tensor> norm_maps_of(const SpammArguments& arguments) {
  const auto& [a, b, knob, block, norm_a, norm_b, input, beta, alpha, symmetric] = arguments;
  const auto [m, k, n] = check_block(block);
  if (!norm_a && !norm_b) {
    if (!share_norm_map(a, b, {m, k, n})) return ops::norm_maps(a, b, block);
    const Tensor shared = norm_map(a, {m, k});
    return {shared, shared};
  }
  return {norm_a ? *norm_a : norm_map(a, {m, k}), norm_b ? *norm_b : norm_map(b, {k, n})};
}

Tensor empty_result(const SpammArguments& arguments) {
  auto shape = arguments.a.sizes().vec();
  shape.back() = arguments.b.size(-1);
  return at::empty(shape, arguments.a.options());
}

Tensor empty_map_of_result(const Tensor& c, const Block& block) {
  auto shape = c.sizes().vec();
  shape[shape.size() - 2] = blocks_of(c.size(-2), block.m);
  shape[shape.size() - 1] = blocks_of(c.size(-1), block.n);
  return at::empty(shape, c.options().dtype(norm_dtype(c.scalar_type())));
}

void spamm_into_by_stages(const SpammArguments& arguments, const Tensor& out,
                          const OptTensor& norms) {
  const auto& [a, b, knob, block, norm_a, norm_b, input, beta, alpha, symmetric] = arguments;
  const auto [map_a, map_b] = norm_maps_of(arguments);
  const Tensor threshold = threshold_from_knob(map_a, map_b, knob);
  ops::multiply_into(a, b, map_a, map_b, threshold, block, out, input, beta, alpha, symmetric,
                     norms);
}

Tensor spamm_by_stages(const SpammArguments& arguments) {
  const auto& [a, b, knob, block, norm_a, norm_b, input, beta, alpha, symmetric] = arguments;
  if (symmetric) {
    const Tensor c = empty_result(arguments);
    spamm_into_by_stages(arguments, c, std::nullopt);
    return c;
  }
  const auto [map_a, map_b] = norm_maps_of(arguments);
  const Tensor threshold = threshold_from_knob(map_a, map_b, knob);
  return multiply(a, b, map_a, map_b, threshold, block, input, beta, alpha);
}

void mirror_upper(const Tensor& c) {
  // In strips: few calls for large matrices, and little memory beside them.
  constexpr int64_t kLeastStrip = 512, kMostStrips = 16;
  const int64_t size = c.size(-1);
  const int64_t strip = std::max(kLeastStrip, blocks_of(size, kMostStrips));
  const Tensor index = at::arange(std::min(strip, size), c.options().dtype(at::kLong));
  const Tensor is_upper = index.unsqueeze(1).le(index);
  for (int64_t first = 0; first < size; first += strip) {
    const int64_t rows = std::min(strip, size - first), end = first + rows;
    const auto part = [&](int64_t row, int64_t height, int64_t column, int64_t width) {
      return c.narrow(-2, row, height).narrow(-1, column, width);
    };
    const Tensor square = part(first, rows, first, rows);
    const Tensor upper = is_upper.narrow(0, 0, rows).narrow(1, 0, rows);
    square.copy_(at::where(upper, square, square.mT()));
    part(end, size - end, first, rows).copy_(part(first, rows, end, size - end).mT());
  }
}

namespace {

// The maps of both operands, one after the other. CUDA computes both in one launch instead.
std::tuple<Tensor, Tensor> norm_maps_op(const Tensor& a, const Tensor& b, IntArrayRef block) {
  const auto [m, k, n] = check_block(block);
  check_matrix_pair(a, b);
  return {norm_map(a, {m, k}), norm_map(b, {k, n})};
}

// For devices that cannot multiply into memory that is given.
void multiply_into_op(const Tensor& a, const Tensor& b, const Tensor& norm_a, const Tensor& norm_b,
                      const Tensor& tau, IntArrayRef block, const Tensor& out,
                      const OptTensor& input, const Scalar& beta, const Scalar& alpha,
                      bool symmetric, const OptTensor& norms) {
  const Block edges = check_product(a, b, block, norm_a, norm_b, tau, input);
  check_into(out, a, b, edges, input, symmetric, norms);
  const Tensor c = multiply(a, b, norm_a, norm_b, tau, block, input, beta, alpha);
  if (symmetric) mirror_upper(c);
  out.copy_(c);
  if (norms) norms->copy_(norm_map(out, {edges.m, edges.n}));
}

Tensor spamm_op(const Tensor& a, const Tensor& b, const OptTensor& tau,
                std::optional<double> threshold, std::optional<double> valid_ratio,
                std::optional<double> max_error, IntArrayRef block, const OptTensor& norm_a,
                const OptTensor& norm_b, const OptTensor& input, const Scalar& beta,
                const Scalar& alpha, at::OptionalIntArrayRef devices, bool symmetric) {
  const Knob knob = checked_knob({tau, threshold, valid_ratio, max_error});
  check_operands(a, b);
  if (symmetric) check_symmetric(a, b, check_block(block), input);
  const SpammArguments arguments{a, b, knob, block, norm_a, norm_b, input, beta, alpha, symmetric};
  if (!devices) return spamm_by_stages(arguments);
  const Tensor c = shards::spamm_on_devices(arguments, *devices);
  if (symmetric) mirror_upper(c);
  return c;
}

std::tuple<Tensor, Tensor> spamm_with_norms_op(
    const Tensor& a, const Tensor& b, const OptTensor& tau, std::optional<double> threshold,
    std::optional<double> valid_ratio, std::optional<double> max_error, IntArrayRef block,
    const OptTensor& norm_a, const OptTensor& norm_b, const OptTensor& input, const Scalar& beta,
    const Scalar& alpha, at::OptionalIntArrayRef devices, bool symmetric) {
  const Block edges = check_block(block);
  if (devices) {
    const Tensor c = spamm_op(a, b, tau, threshold, valid_ratio, max_error, block, norm_a, norm_b,
                              input, beta, alpha, devices, symmetric);
    return {c, norm_map(c, {edges.m, edges.n})};
  }
  const Knob knob = checked_knob({tau, threshold, valid_ratio, max_error});
  check_operands(a, b);
  const SpammArguments arguments{a, b, knob, block, norm_a, norm_b, input, beta, alpha, symmetric};
  const Tensor c = empty_result(arguments), norms = empty_map_of_result(c, edges);
  spamm_into_by_stages(arguments, c, norms);
  return {c, norms};
}

void spamm_into_op(const Tensor& a, const Tensor& b, const Tensor& out, const OptTensor& tau,
                   std::optional<double> threshold, std::optional<double> valid_ratio,
                   std::optional<double> max_error, IntArrayRef block, const OptTensor& norm_a,
                   const OptTensor& norm_b, const OptTensor& input, const Scalar& beta,
                   const Scalar& alpha, at::OptionalIntArrayRef devices, bool symmetric,
                   const OptTensor& norms) {
  const Knob knob = checked_knob({tau, threshold, valid_ratio, max_error});
  const Block edges = check_product(a, b, block, norm_a, norm_b, knob.tau, input);
  check_into(out, a, b, edges, input, symmetric, norms);
  if (devices) {
    out.copy_(spamm_op(a, b, tau, threshold, valid_ratio, max_error, block, norm_a, norm_b, input,
                       beta, alpha, devices, symmetric));
    if (norms) norms->copy_(norm_map(out, {edges.m, edges.n}));
    return;
  }
  spamm_into_by_stages({a, b, knob, block, norm_a, norm_b, input, beta, alpha, symmetric}, out,
                       norms);
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) {
  m.impl("norm_maps", &norm_maps_op);
  m.impl("multiply_into", &multiply_into_op);
  m.impl("spamm", &spamm_op);
  m.impl("spamm_with_norms", &spamm_with_norms_op);
  m.impl("spamm_into", &spamm_into_op);
}

}  // namespace spamm
