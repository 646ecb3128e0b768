// Concatenation of deviations along their channels. Some devices have a kernel for it. Otherwise it
// is torch's concatenation, followed by a norm pass.
#include "conv/join_deviations.h"

#include <ATen/Functions.h>
#include <torch/library.h>

#include "checks.h"

namespace spamm {

using at::Tensor;

void check_parts(at::TensorList parts) {
  TORCH_CHECK(!parts.empty(), "parts must have at least one tensor; got none");
  const Tensor& first = parts[0];
  for (const Tensor& x : parts) {
    check_operand_dtype(x.scalar_type(), "parts");
    check_same_device(x, first, "all parts", "the first one");
    TORCH_CHECK_TYPE(x.scalar_type() == first.scalar_type(), "parts must have one dtype; got ",
                     dtype_of(first), " and ", dtype_of(x));
    TORCH_CHECK(x.dim() == 4, "parts must be batches (N, C, H, W); got shape ", x.sizes());
    TORCH_CHECK(
        x.size(0) == first.size(0) && x.size(2) == first.size(2) && x.size(3) == first.size(3),
        "parts must be pictures of one size, ", first.size(0), " of ", first.size(2), " x ",
        first.size(3), "; got ", x.size(0), " of ", x.size(2), " x ", x.size(3));
  }
}

namespace {

std::tuple<Tensor, Tensor> join_deviations(at::TensorList parts) {
  check_parts(parts);
  const auto* backend = Backends<JoinBackend>::find(parts[0].device().type(), parts);
  if (backend != nullptr) {
    const ConvolutionResult result = backend->run(parts);
    return {result.output, result.norms};
  }
  const Tensor output = at::cat(parts, 1).contiguous(at::MemoryFormat::ChannelsLast);
  return {output, pixel_norms(output)};
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) {
  m.impl("join_deviations", &join_deviations);
}

}  // namespace spamm
