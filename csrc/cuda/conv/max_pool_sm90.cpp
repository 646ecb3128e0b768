// Hopper's max pooling with output norms: turns tensors into kernel parameters.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>

#include "conv/backend.h"
#include "cuda/conv/sizes_sm90.h"
#include "cuda/device.h"
#include "cuda/hopper.h"
#include "cuda/operand.h"
#include "kernels/conv/sm90/params.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using namespace kernels::conv::sm90;

bool supports(const Tensor& input, const MaxPool& pool, bool wants_output_norms) {
  return wants_output_norms && is_half(input.scalar_type()) && input.numel() > 0 &&
         input.is_contiguous(at::MemoryFormat::ChannelsLast) &&
         input.size(1) * input.element_size() % kAlignment == 0 &&
         reinterpret_cast<uintptr_t>(input.const_data_ptr()) % kAlignment == 0 &&
         has_hopper_kernels(check_device(input.device())) &&
         // Coordinates and numbers of norms are 32 bits wide.
         input.size(0) < kMost && input.size(2) * input.size(3) < kMost / 4 &&
         c10::multiply_integers(layer_norms_shape(input.size(0), pool.output, input.size(1))) <
             kMost;
}

ConvolutionResult run(const Tensor& input, const MaxPool& pool, bool) {
  const OnDevice device(input);
  const int64_t images = input.size(0), channels = input.size(1);
  const Tensor output = at::empty({images, channels, pool.output.height, pool.output.width},
                                  input.options(), at::MemoryFormat::ChannelsLast);
  const Tensor norms = at::empty(layer_norms_shape(images, pool.output, channels),
                                 input.options().dtype(at::kFloat));
  const MaxPoolParams p = {
      .job = pixel_norms_job(output.const_data_ptr(), images,
                             pool.output.height * pool.output.width, channels, /*log2_images=*/6,
                             /*log2_group=*/6, norms.mutable_data_ptr<float>(),
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

const Backends<DenseBackend> registered(at::kCUDA, Rank::kHopper, {.pool = {&supports, &run}});

}  // namespace
}  // namespace spamm::cuda
