// SpAMM on CUDA with fused stages. float32 operands: one pass computes norms and split parts. Half
// types: the norm kernel also sets the multiply's tile counter to zero, which saves a launch.
#include "spamm.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "checks.h"
#include "cuda/multiply/multiply.h"
#include "cuda/multiply/write_result.h"
#include "cuda/norm_map/norm_map.h"
#include "cuda/tile_counter.h"
#include "shards/spamm_devices.h"
#include "spamm/spamm.h"
#include "stage_range.h"
#include "threshold.h"

namespace spamm::cuda {
namespace {

using at::Scalar;
using at::Tensor;
using OptTensor = std::optional<Tensor>;

// An uninitialised norm map of x.
Tensor empty_map(const Tensor& x) {
  auto shape = x.sizes().vec();
  for (int64_t i = x.dim() - 2; i < x.dim(); ++i) {
    shape[i] = blocks_of(shape[i], kernels::kSplitBlock);
  }
  return at::empty(shape, x.options());
}

// Whether one pass can compute norms and split parts. It cannot if the batches share one matrix,
// which is split once and would fill the map of only one batch.
bool splits_with_norms(const Tensor& x) {
  return x.dim() == 2 || x.size(0) == 1 || x.stride(0) != 0;
}

// The operands may be on the CPU: the dispatcher calls this op if any argument is on a GPU.
bool has_blocks_on_gpu(const Tensor& a, const Tensor& b) {
  return a.is_cuda() && a.numel() > 0 && b.numel() > 0;
}

// The number of split parts that the norm pass computes for each operand; 0 if the stages are not
// fused.
int split_parts_with_norms(const Tensor& a, const Tensor& b, const Block& block, Kernel kernel) {
  constexpr int64_t kEdge = kernels::kSplitBlock;
  const bool fused = block.m == kEdge && block.k == kEdge && block.n == kEdge &&
                     splits_with_norms(a) && splits_with_norms(b);
  return fused ? split_parts_of(kernel) : 0;
}

// The norm maps of both operands; `zeroed` as in norm_maps. They may be one tensor.
std::tuple<Tensor, Tensor> maps_of(const Tensor& a, const Tensor& b, const Block& block,
                                   int* zeroed) {
  const StageRange stage(kNormMapStage);
  if (!share_norm_map(a, b, block)) return norm_maps(a, b, block, zeroed);
  const Tensor shared = norm_map(a, block.m, block.k, zeroed);
  return {shared, shared};
}

// Computes the whole product on one device into `c`, and its norm map into `norms` if that is
// defined. Both share no memory with an argument.
void whole_product(const SpammArguments& arguments, const Block& block, const Tensor& c,
                   const Tensor& norms) {
  const auto& [a, b, knob, block_edges, norm_a, norm_b, input, beta, alpha, symmetric] = arguments;
  const auto by_stages = [&] {
    spamm_into_by_stages(arguments, c, norms.defined() ? OptTensor(norms) : std::nullopt);
  };
  if (!has_blocks_on_gpu(a, b)) return by_stages();
  const OnDevice device(a);
  const Kernel kernel = kernel_for(a.scalar_type(), size_of_product(a, b), block, device);
  const Wanted wanted{symmetric, norms};
  if (!norm_a && !norm_b && norms_clear_counter(kernel)) {
    const TileCounter counter;
    const auto [map_a, map_b] = maps_of(a, b, block, counter.get());
    const Tensor found = threshold_from_knob(map_a, map_b, knob);
    const StageRange stage(kMultiplyStage);
    return product_into(c, a, b, {.kernel = kernel, .next_tile = counter.get()}, map_a, map_b,
                        found, block, input, beta, alpha, wanted);
  }
  const int count = split_parts_with_norms(a, b, block, kernel);
  if (count == 0) return by_stages();
  const auto batch_of_map = [](const Tensor& map, const OptTensor& precomputed) {
    return precomputed ? Tensor() : as_batch(map);
  };
  const Tensor map_a = norm_a ? *norm_a : empty_map(a), map_b = norm_b ? *norm_b : empty_map(b);
  std::optional<StageRange> stage(kNormMapStage);
  const SplitOperands split_parts(as_batch(a), as_batch(b), count, block,
                                  batch_of_map(map_a, norm_a), batch_of_map(map_b, norm_b),
                                  device.stream());
  stage.reset();
  const Tensor found = threshold_from_knob(map_a, map_b, knob);
  stage.emplace(kMultiplyStage);
  product_into(c, a, b, {.kernel = kernel, .split_parts = &split_parts}, map_a, map_b, found, block,
               input, beta, alpha, wanted);
}

// The product over several devices. Where it is symmetric, the whole is computed and mirrored.
Tensor product_on_devices(const SpammArguments& arguments, at::IntArrayRef devices) {
  const auto& [a, b, knob, block, norm_a, norm_b, input, beta, alpha, symmetric] = arguments;
  const Tensor c =
      shards::spamm_on_devices({a, b, knob, block, norm_a, norm_b, input, beta, alpha}, devices);
  if (symmetric) mirror_upper(c);
  return c;
}

Tensor spamm_op(const Tensor& a, const Tensor& b, const OptTensor& tau,
                std::optional<double> threshold, std::optional<double> valid_ratio,
                std::optional<double> max_error, at::IntArrayRef block_edges,
                const OptTensor& norm_a, const OptTensor& norm_b, const OptTensor& input,
                const Scalar& beta, const Scalar& alpha, at::OptionalIntArrayRef devices,
                bool symmetric) {
  const Knob knob = checked_knob({tau, threshold, valid_ratio, max_error});
  const Block block = check_product(a, b, block_edges, norm_a, norm_b, knob.tau, input);
  if (symmetric) check_symmetric(a, b, block, input);
  const SpammArguments arguments{a,      b,     knob, block_edges, norm_a,
                                 norm_b, input, beta, alpha,       symmetric};
  if (devices) return product_on_devices(arguments, *devices);
  const Tensor c = empty_result(arguments);
  whole_product(arguments, block, c, {});
  return c;
}

std::tuple<Tensor, Tensor> spamm_with_norms_op(
    const Tensor& a, const Tensor& b, const OptTensor& tau, std::optional<double> threshold,
    std::optional<double> valid_ratio, std::optional<double> max_error, at::IntArrayRef block_edges,
    const OptTensor& norm_a, const OptTensor& norm_b, const OptTensor& input, const Scalar& beta,
    const Scalar& alpha, at::OptionalIntArrayRef devices, bool symmetric) {
  const Knob knob = checked_knob({tau, threshold, valid_ratio, max_error});
  const Block block = check_product(a, b, block_edges, norm_a, norm_b, knob.tau, input);
  if (symmetric) check_symmetric(a, b, block, input);
  const SpammArguments arguments{a,      b,     knob, block_edges, norm_a,
                                 norm_b, input, beta, alpha,       symmetric};
  if (devices) {
    const Tensor c = product_on_devices(arguments, *devices);
    return {c, spamm::norm_map(c, {block.m, block.n})};
  }
  const Tensor c = empty_result(arguments), norms = empty_map_of_result(c, block);
  whole_product(arguments, block, c, norms);
  return {c, norms};
}

void spamm_into_op(const Tensor& a, const Tensor& b, const Tensor& out, const OptTensor& tau,
                   std::optional<double> threshold, std::optional<double> valid_ratio,
                   std::optional<double> max_error, at::IntArrayRef block_edges,
                   const OptTensor& norm_a, const OptTensor& norm_b, const OptTensor& input,
                   const Scalar& beta, const Scalar& alpha, at::OptionalIntArrayRef devices,
                   bool symmetric, const OptTensor& norms) {
  const Knob knob = checked_knob({tau, threshold, valid_ratio, max_error});
  const Block block = check_product(a, b, block_edges, norm_a, norm_b, knob.tau, input);
  check_into(out, a, b, block, input, symmetric, norms);
  const SpammArguments arguments{a,      b,     knob, block_edges, norm_a,
                                 norm_b, input, beta, alpha,       symmetric};
  if (devices) {
    out.copy_(product_on_devices(arguments, *devices));
    if (norms) norms->copy_(spamm::norm_map(out, {block.m, block.n}));
    return;
  }
  const auto given = [](const OptTensor& x) { return x.value_or(Tensor()); };
  const auto write = [&](const Tensor& c, const Tensor& map) {
    whole_product(arguments, block, c, map);
  };
  write_result(out, norms, {a, b, given(norm_a), given(norm_b), given(knob.tau), given(input)},
               block, write);
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) {
  m.impl("spamm", &spamm_op);
  m.impl("spamm_with_norms", &spamm_with_norms_op);
  m.impl("spamm_into", &spamm_into_op);
}

}  // namespace spamm::cuda
