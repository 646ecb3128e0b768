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
#include "stage_range.h"
#include "threshold.h"

namespace spamm::cuda {
namespace {

using at::Tensor;

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

// `c` and `norms` share no memory with an argument.
void write_new(const ProductArguments& product, const Block& block, const Tensor& c,
               const Tensor& norms) {
  const Tensor &a = product.a, &b = product.b;
  const OptTensor &norm_a = product.norm_a, &norm_b = product.norm_b;
  if (!has_blocks_on_gpu(a, b)) return product_by_stages(product, block, c, norms);
  const OnDevice device(a);
  const Kernel kernel = kernel_for(a.scalar_type(), size_of_product(a, b), block, device);
  const Wanted wanted{product.symmetric, norms};
  const auto multiply = [&](const Prepared& prepared, const Tensor& map_a, const Tensor& map_b,
                            const Tensor& tau) {
    product_into(c, a, b, prepared, map_a, map_b, tau, block, product.input, product.beta,
                 product.alpha, wanted);
  };
  if (!norm_a && !norm_b && norms_clear_counter(kernel)) {
    const TileCounter counter;
    const auto [map_a, map_b] = maps_of(a, b, block, counter.get());
    const Tensor tau = threshold_from_knob(map_a, map_b, product.knob);
    const StageRange stage(kMultiplyStage);
    return multiply({.kernel = kernel, .next_tile = counter.get()}, map_a, map_b, tau);
  }
  const int count = split_parts_with_norms(a, b, block, kernel);
  if (count == 0) return product_by_stages(product, block, c, norms);
  const auto batch_of_map = [](const Tensor& map, const OptTensor& precomputed) {
    return precomputed ? Tensor() : as_batch(map);
  };
  const Tensor map_a = norm_a ? *norm_a : empty_map(a), map_b = norm_b ? *norm_b : empty_map(b);
  std::optional<StageRange> stage(kNormMapStage);
  const SplitOperands split_parts(as_batch(a), as_batch(b), count, block,
                                  batch_of_map(map_a, norm_a), batch_of_map(map_b, norm_b),
                                  device.stream());
  stage.reset();
  const Tensor tau = threshold_from_knob(map_a, map_b, product.knob);
  stage.emplace(kMultiplyStage);
  multiply({.kernel = kernel, .split_parts = &split_parts}, map_a, map_b, tau);
}

void write_given(const ProductArguments& product, const Block& block, const Tensor& out,
                 const Tensor& norms) {
  const auto given = [](const OptTensor& x) { return x.value_or(Tensor()); };
  const auto write = [&](const Tensor& c, const Tensor& map) { write_new(product, block, c, map); };
  write_result(out, norms.defined() ? OptTensor(norms) : std::nullopt,
               {product.a, product.b, given(product.norm_a), given(product.norm_b),
                given(product.knob.tau), given(product.input)},
               block, write);
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) { ProductOps<write_new, write_given>::register_in(m); }

}  // namespace spamm::cuda
