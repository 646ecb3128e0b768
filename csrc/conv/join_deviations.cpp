// Concatenation of deviations along their channels, of which some may be in phases. Some devices
// have a kernel for it. Otherwise it is torch's concatenation, followed by a norm pass.
#include "conv/join_deviations.h"

#include <ATen/Functions.h>
#include <torch/library.h>

#include "checks.h"

namespace spamm {
namespace {

using at::Tensor;

std::vector<JoinedPart> check_parts(at::TensorList parts, const c10::List<bool>& in_phases) {
  TORCH_CHECK(!parts.empty(), "parts must have at least one tensor; got none");
  TORCH_CHECK(in_phases.size() == parts.size(), "in_phases must have one entry for each of the ",
              parts.size(), " parts; got ", in_phases.size());
  std::vector<JoinedPart> joined;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Tensor& x = parts[i];
    check_operand_dtype(x.scalar_type(), "parts");
    check_same_device(x, parts[0], "all parts", "the first one");
    TORCH_CHECK_TYPE(x.scalar_type() == parts[0].scalar_type(), "parts must have one dtype; got ",
                     dtype_of(parts[0]), " and ", dtype_of(x));
    TORCH_CHECK(x.dim() == 4, "parts must be batches (N, C, H, W); got shape ", x.sizes());
    TORCH_CHECK(!in_phases[i] || x.size(1) % 4 == 0,
                "parts in phases must have a multiple of 4 channels; got shape ", x.sizes());
    joined.push_back({x, in_phases[i]});
    const auto [height, width] = joined[0].size();
    const auto [own_height, own_width] = joined.back().size();
    TORCH_CHECK(x.size(0) == parts[0].size(0) && own_height == height && own_width == width,
                "parts must be pictures of one size, ", parts[0].size(0), " of ", height, " x ",
                width, "; got ", x.size(0), " of ", own_height, " x ", own_width);
  }
  return joined;
}

// Images at twice the rows and columns.
Tensor without_phases(const JoinedPart& part) {
  const Tensor& x = part.images;
  if (!part.in_phases) return x;
  const auto [height, width] = part.size();
  return x.view({x.size(0), 2, 2, part.channels(), x.size(2), x.size(3)})
      .permute({0, 3, 4, 1, 5, 2})
      .reshape({x.size(0), part.channels(), height, width});
}

std::tuple<Tensor, Tensor> join_deviations(at::TensorList parts, const c10::List<bool>& in_phases) {
  const std::vector<JoinedPart> joined = check_parts(parts, in_phases);
  const auto* backend = Backends<JoinBackend>::find(parts[0].device().type(), joined);
  if (backend != nullptr) {
    const ConvolutionResult result = backend->run(joined);
    return {result.output, result.norms};
  }
  std::vector<Tensor> plain;
  for (const JoinedPart& part : joined) plain.push_back(without_phases(part));
  const Tensor output = at::cat(plain, 1).contiguous(at::MemoryFormat::ChannelsLast);
  return {output, pixel_norms(output)};
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) {
  m.impl("join_deviations", &join_deviations);
}

}  // namespace spamm
