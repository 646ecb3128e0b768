// Hopper's max pooling of deviations by single pixels: turns tensors into kernel parameters.
#include "cuda/conv/pool_sm90.h"

#include <c10/cuda/CUDAException.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>

#include "block.h"
#include "cuda/operand.h"
#include "kernels/reference/params.h"
#include "reference/reference.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using namespace kernels::reference;

bool supports(const Tensor& input, const Tensor& reference, const std::optional<Tensor>&,
              const MaxPool& pool) {
  const int64_t group_chunks = kLayerNormBlock * input.element_size() / kAlignment;
  return reference.numel() < kMost &&
         pools_by_pixels(input, pool, blocks_of(input.size(1), kLayerNormBlock) * group_chunks);
}

ConvolutionResult run(const Tensor& input, const Tensor& reference,
                      const std::optional<Tensor>& norm_input, const MaxPool& pool) {
  const OnDevice device(input);
  const Tensor read = readable_pixels(input), of_reference = readable_pixels(reference);
  const Tensor output = empty_pooled(input, pool);
  const Tensor norms = at::empty(pixel_norms_shape(input.size(0), pool.output, input.size(1)),
                                 input.options().dtype(at::kFloat), at::MemoryFormat::Contiguous);
  DeviationPoolParams p{};
  static_cast<kernels::conv::sm90::PixelPoolParams&>(p) = pixel_pool_params(read, output, pool);
  p.reference = of_reference.const_data_ptr();
  p.norms = norms.mutable_data_ptr<float>();
  p.groups = static_cast<int>(norms.size(3));
  Tensor of_input;  // kept until the launch
  const int64_t together = norm_input ? input.size(3) / norm_input->size(2) : 0;
  if (std::has_single_bit(static_cast<uint64_t>(together))) {
    of_input = norm_input->contiguous();
    p.norm_input = of_input.const_data_ptr<float>();
    p.log2_norm_columns = log2_of(together);
    p.norm_groups = static_cast<int>(of_input.size(3));
  }
  const auto launch = of_type(input.scalar_type(), launch_deviation_pool<__half>,
                              launch_deviation_pool<__nv_bfloat16>, launch_deviation_pool<float>);
  C10_CUDA_CHECK(launch(p, device.stream()));
  return {output, norms};
}

const Backends<ReferenceBackend> registered(at::kCUDA, Rank::kHopper, {.pool = {&supports, &run}});

}  // namespace
}  // namespace spamm::cuda
