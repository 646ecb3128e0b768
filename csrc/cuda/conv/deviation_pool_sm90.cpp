// Hopper's max pooling of deviations: turns tensors into kernel parameters.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "conv/backend.h"
#include "cuda/conv/channels_last.h"
#include "cuda/conv/launch_sm90.h"
#include "cuda/conv/sizes_sm90.h"
#include "cuda/device.h"
#include "cuda/hopper.h"
#include "cuda/operand.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using namespace kernels::conv::sm90;

bool supports(const Tensor& input, const Tensor& reference, const MaxPool& pool) {
  const at::ScalarType dtype = input.scalar_type();
  const auto shape = pixel_norms_shape(input.size(0), pool.output, input.size(1));
  return (is_half(dtype) || dtype == at::kFloat) && input.numel() > 0 &&
         input.is_contiguous(at::MemoryFormat::ChannelsLast) &&
         input.size(1) * input.element_size() % kAlignment == 0 &&
         has_hopper_kernels(check_device(input.device())) && reference.numel() < kMost &&
         // Coordinates and numbers of norms are 32 bits wide.
         input.size(0) < kMost && input.size(1) < kMost &&
         input.size(2) * input.size(3) < kMost / 4 && c10::multiply_integers(shape) < kMost;
}

ConvolutionResult run(const Tensor& input, const Tensor& reference, const MaxPool& pool) {
  const OnDevice device(input);
  const int64_t images = input.size(0), channels = input.size(1);
  const Tensor read = readable_pixels(input), of_reference = readable_pixels(reference);
  const Tensor output = at::empty({images, channels, pool.output.height, pool.output.width},
                                  input.options(), at::MemoryFormat::ChannelsLast);
  const Tensor norms = at::empty(pixel_norms_shape(images, pool.output, channels),
                                 input.options().dtype(at::kFloat), at::MemoryFormat::Contiguous);
  const DeviationPoolParams p = {
      .input = read.const_data_ptr(),
      .reference = of_reference.const_data_ptr(),
      .output = output.mutable_data_ptr(),
      .norms = norms.mutable_data_ptr<float>(),
      .images = static_cast<int>(images),
      .channels = static_cast<int>(channels),
      .groups = static_cast<int>(norms.size(3)),
      .in_size = {static_cast<int>(input.size(2)), static_cast<int>(input.size(3))},
      .out_size = size2(pool.output),
      .kernel = size2(pool.kernel),
      .stride = size2(pool.stride),
      .padding = size2(pool.padding),
      .dilation = size2(pool.dilation)};
  const auto launch = [&] {
    switch (input.scalar_type()) {
      case at::kHalf:
        return launch_deviation_pool<__half>;
      case at::kBFloat16:
        return launch_deviation_pool<__nv_bfloat16>;
      default:
        return launch_deviation_pool<float>;
    }
  }();
  C10_CUDA_CHECK(launch(p, device.stream()));
  return {output, norms};
}

const Backends<DeviationPoolBackend> registered(at::kCUDA, Rank::kHopper, {&supports, &run});

}  // namespace
}  // namespace spamm::cuda
