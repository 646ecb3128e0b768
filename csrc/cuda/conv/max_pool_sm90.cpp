// Hopper's max pooling, with output norms or by single pixels: turns tensors into kernel
// parameters.
#include <c10/cuda/CUDAException.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "conv/backend.h"
#include "cuda/conv/pool_sm90.h"
#include "cuda/operand.h"
#include "kernels/conv/sm90/params.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using namespace kernels::conv::sm90;

bool supports_norms(const Tensor& input, const MaxPool& pool, bool wants_output_norms) {
  return wants_output_norms && is_half(input.scalar_type()) && input.numel() > 0 &&
         input.is_contiguous(at::MemoryFormat::ChannelsLast) &&
         input.size(1) * input.element_size() % kAlignment == 0 &&
         reinterpret_cast<uintptr_t>(input.const_data_ptr()) % kAlignment == 0 &&
         has_hopper_kernels(check_device(input.device())) &&
         // Coordinates and numbers of norms are 32 bits wide.
         input.size(0) < kMost && input.size(1) < kMost &&
         input.size(2) * input.size(3) < kMost / 4 &&
         c10::multiply_integers(layer_norms_shape(input.size(0), pool.output, input.size(1))) <
             kMost;
}

ConvolutionResult run_with_norms(const Tensor& input, const MaxPool& pool, bool) {
  const OnDevice device(input);
  const int64_t images = input.size(0), channels = input.size(1);
  const Tensor output = empty_pooled(input, pool);
  const Tensor norms = at::empty(layer_norms_shape(images, pool.output, channels),
                                 input.options().dtype(at::kFloat));
  const MaxPoolParams p = {
      .job =
          norms_job(output.const_data_ptr(), images, pool.output.height * pool.output.width,
                    channels, /*log2_images=*/6, /*log2_group=*/6, norms.mutable_data_ptr<float>(),
                    /*entry_bytes=*/2, /*sliced=*/true),
      .input = input.const_data_ptr(),
      .output = output.mutable_data_ptr(),
      .in_size = {static_cast<int>(input.size(2)), static_cast<int>(input.size(3))},
      .out_size = size2(pool.output),
      .kernel = size2(pool.kernel),
      .stride = size2(pool.stride),
      .padding = size2(pool.padding),
      .dilation = size2(pool.dilation)};
  const auto launch =
      input.scalar_type() == at::kHalf ? launch_max_pool<__half> : launch_max_pool<__nv_bfloat16>;
  C10_CUDA_CHECK(launch(p, device.stream()));
  return {output, norms};
}

bool supports_plain(const Tensor& input, const MaxPool& pool, bool wants_output_norms) {
  // Of one pixel an image, torch may take channels-last memory for contiguous.
  return !wants_output_norms && input.suggest_memory_format() == at::MemoryFormat::ChannelsLast &&
         pools_by_pixels(input, pool, input.size(1) * input.element_size() / kAlignment);
}

ConvolutionResult run_plain(const Tensor& input, const MaxPool& pool, bool) {
  const OnDevice device(input);
  const Tensor read = readable_pixels(input), output = empty_pooled(input, pool);
  const auto launch = of_type(input.scalar_type(), launch_pixel_pool<__half>,
                              launch_pixel_pool<__nv_bfloat16>, launch_pixel_pool<float>);
  C10_CUDA_CHECK(launch(pixel_pool_params(read, output, pool), device.stream()));
  return {output, Tensor()};
}

const Backends<DenseBackend> with_norms(at::kCUDA, Rank::kHopper,
                                        {.pool = {&supports_norms, &run_with_norms}});
const Backends<DenseBackend> plain(at::kCUDA, Rank::kHopper,
                                   {.pool = {&supports_plain, &run_plain}});

}  // namespace
}  // namespace spamm::cuda
