// What parts need of B, and the op row_work: composed of ATen ops and valid_counts.
#include "shards/plan_maps.h"

#include <ATen/Functions.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "arguments.h"
#include "block.h"
#include "checks.h"
#include "shards/plan.h"
#include "spamm/spamm.h"

namespace spamm::shards {
namespace {

// Fitted to float16 products on one GPU: time is linear in the valid products, and a product with
// none of them takes 0.6% of the time of the dense one.
constexpr int64_t kWorkOfValid = 1000, kWorkOfAny = 6;

void check_maps(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau) {
  check_norm_maps(norm_a, norm_b);
  TORCH_CHECK(norm_a.dim() == 2, "norm maps must be 2-d: (MB, KB) and (KB, NB); got shapes ",
              norm_a.sizes(), " and ", norm_b.sizes());
  check_tau(tau, norm_a.device());
}

}  // namespace

Tensor in_stages(const Tensor& norm_b, int64_t stage_blocks) {
  const int64_t stages = blocks_of(norm_b.size(1), stage_blocks);
  const int64_t missing = stages * stage_blocks - norm_b.size(1);
  const Tensor whole = missing == 0 ? norm_b : at::constant_pad_nd(norm_b, {0, missing});
  return whole.contiguous().view({norm_b.size(0), stages, stage_blocks});
}

// A unit is needed if its largest norm, times the largest norm in the part's column, is valid.
// Rounding is monotone, so this is true exactly if some block product of the part with the unit is
// valid. at::amax keeps NaN.
Tensor needed_units(const Tensor& largest_a, const Tensor& norm_b, const Tensor& tau,
                    int64_t stage_blocks) {
  const Tensor largest_b = in_stages(norm_b, stage_blocks).amax(2);
  const Tensor products = largest_a.unsqueeze(2).mul(largest_b);
  return products.lt(tau.to(products.scalar_type())).logical_not_();
}

namespace {

std::tuple<Tensor, std::vector<int64_t>> row_work_op(const Tensor& norm_a, const Tensor& norm_b,
                                                     const Tensor& tau, int64_t parts,
                                                     int64_t multiple) {
  TORCH_CHECK_VALUE(parts >= 0, "parts must be at least 0; got ", parts);
  TORCH_CHECK_VALUE(multiple > 0, "multiple must be positive; got ", multiple);
  const Tensor work = row_work(norm_a, norm_b, tau);
  if (parts == 0) return {work, {}};
  const Tensor read = work.cpu();
  return {work, row_cuts({read.const_data_ptr<int64_t>(), static_cast<size_t>(read.numel())}, parts,
                         multiple)};
}

}  // namespace

Tensor row_work(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau) {
  check_maps(norm_a, norm_b, tau);
  return valid_counts(norm_a, norm_b, tau)
      .sum(1, /*keepdim=*/false, at::kLong)
      .mul_(kWorkOfValid)
      .add_(kWorkOfAny * norm_b.numel());
}

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) { m.impl("row_work", &row_work_op); }

}  // namespace spamm::shards
