// Hopper's concatenation of deviations, and their max pooling by single pixels: turns tensors into
// kernel parameters.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <bit>
#include <vector>

#include "block.h"
#include "cuda/conv/pool_sm90.h"
#include "cuda/conv/sizes_sm90.h"
#include "cuda/device.h"
#include "cuda/operand.h"
#include "kernels/reference/params.h"
#include "reference/reference.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using namespace kernels::reference;

int64_t channels_of(at::TensorList parts) {
  int64_t sum = 0;
  for (const Tensor& part : parts) sum += part.size(1);
  return sum;
}

bool supports(at::TensorList parts) {
  const Tensor& first = parts[0];
  const at::ScalarType dtype = first.scalar_type();
  const int64_t lanes = blocks_of(channels_of(parts), kLayerNormBlock) * kLayerNormBlock *
                        first.element_size() / kAlignment;
  const auto fits = [](const Tensor& part) {
    return part.size(1) > 0 && part.size(1) * part.element_size() % kAlignment == 0;
  };
  return (is_half(dtype) || dtype == at::kFloat) && first.numel() > 0 &&
         parts.size() <= kMostJoined && std::all_of(parts.begin(), parts.end(), fits) &&
         has_hopper_kernels(check_device(first.device())) &&
         // Numbers of lines and of a line's threads are 32 bits wide, and so are those of the lines
         // behind the last, which lie up to 2^18 further on.
         first.size(0) * first.size(2) < kMost - (1 << 18) && first.size(3) * lanes < kMost;
}

ConvolutionResult run(at::TensorList parts) {
  const Tensor& first = parts[0];
  const OnDevice device(first);
  const int64_t images = first.size(0), channels = channels_of(parts);
  const Size2 size = {first.size(2), first.size(3)};
  const Tensor output = at::empty({images, channels, size.height, size.width}, first.options(),
                                  at::MemoryFormat::ChannelsLast);
  const Tensor norms = at::empty(pixel_norms_shape(images, size, channels),
                                 first.options().dtype(at::kFloat), at::MemoryFormat::Contiguous);
  JoinParams p{};
  p.output = output.mutable_data_ptr();
  p.norms = norms.mutable_data_ptr<float>();
  p.images = static_cast<int>(images);
  p.channels = static_cast<int>(channels);
  p.groups = static_cast<int>(norms.size(3));
  p.size = size2(size);
  std::vector<Tensor> read;  // kept until the launch
  for (const Tensor& part : parts) {
    read.push_back(readable_pixels(part));
    const int before =
        p.count == 0 ? 0 : p.parts[p.count - 1].first + p.parts[p.count - 1].channels;
    p.parts[p.count++] = {read.back().const_data_ptr(), before, static_cast<int>(part.size(1))};
  }
  const auto launch = of_type(first.scalar_type(), launch_join_deviations<__half>,
                              launch_join_deviations<__nv_bfloat16>, launch_join_deviations<float>);
  C10_CUDA_CHECK(launch(p, device.stream()));
  return {output, norms};
}

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

const Backends<ReferenceBackend> registered(at::kCUDA, Rank::kHopper,
                                            {.join = {&supports, &run}, .pool = {&supports, &run}});

}  // namespace
}  // namespace spamm::cuda
