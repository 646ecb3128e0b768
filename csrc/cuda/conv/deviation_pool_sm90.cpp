// Hopper's max pooling by single pixels, plain and of deviations: turns tensors into kernel
// parameters.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>

#include "block.h"
#include "cuda/conv/channels_last.h"
#include "cuda/conv/sizes_sm90.h"
#include "cuda/device.h"
#include "cuda/hopper.h"
#include "cuda/operand.h"
#include "kernels/conv/sm90/params.h"
#include "reference/reference.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using namespace kernels::conv::sm90;

// `pixel_chunks`: what threads pool of an output pixel, 16 bytes each.
bool fits(const Tensor& input, const MaxPool& pool, int64_t pixel_chunks) {
  const at::ScalarType dtype = input.scalar_type();
  return (is_half(dtype) || dtype == at::kFloat) && input.numel() > 0 &&
         input.is_contiguous(at::MemoryFormat::ChannelsLast) &&
         input.size(1) * input.element_size() % kAlignment == 0 &&
         has_hopper_kernels(check_device(input.device())) &&
         // Coordinates and numbers of threads are 32 bits wide.
         input.size(0) < kMost && input.size(1) < kMost &&
         input.size(2) * input.size(3) < kMost / 4 &&
         input.size(0) * pool.output.height * pool.output.width * pixel_chunks < kMost;
}

// For a plain pooling `reference` is undefined; the result then has no norms.
ConvolutionResult pooled(const Tensor& input, const Tensor& reference,
                         const std::optional<Tensor>& norm_input, const MaxPool& pool) {
  const OnDevice device(input);
  const int64_t images = input.size(0), channels = input.size(1);
  const Tensor read = readable_pixels(input);
  const Tensor output = at::empty({images, channels, pool.output.height, pool.output.width},
                                  input.options(), at::MemoryFormat::ChannelsLast);
  DeviationPoolParams p = {
      .input = read.const_data_ptr(),
      .reference = nullptr,
      .output = output.mutable_data_ptr(),
      .norms = nullptr,
      .norm_input = nullptr,
      .log2_norm_columns = 0,
      .norm_groups = 0,
      .images = static_cast<int>(images),
      .channels = static_cast<int>(channels),
      .groups = 0,
      .in_size = {static_cast<int>(input.size(2)), static_cast<int>(input.size(3))},
      .out_size = size2(pool.output),
      .kernel = size2(pool.kernel),
      .stride = size2(pool.stride),
      .padding = size2(pool.padding),
      .dilation = size2(pool.dilation)};
  Tensor of_reference, of_input, norms;
  if (reference.defined()) {
    of_reference = readable_pixels(reference);
    norms = at::empty(pixel_norms_shape(images, pool.output, channels),
                      input.options().dtype(at::kFloat), at::MemoryFormat::Contiguous);
    p.reference = of_reference.const_data_ptr();
    p.norms = norms.mutable_data_ptr<float>();
    p.groups = static_cast<int>(norms.size(3));
    const int64_t together = norm_input ? input.size(3) / norm_input->size(2) : 0;
    if (std::has_single_bit(static_cast<uint64_t>(together))) {
      of_input = norm_input->contiguous();
      p.norm_input = of_input.const_data_ptr<float>();
      p.log2_norm_columns = log2_of(together);
      p.norm_groups = static_cast<int>(of_input.size(3));
    }
  }
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

bool supports_deviations(const Tensor& input, const Tensor& reference, const std::optional<Tensor>&,
                         const MaxPool& pool) {
  const int64_t group_chunks = kLayerNormBlock * input.element_size() / kAlignment;
  return reference.numel() < kMost &&
         fits(input, pool, blocks_of(input.size(1), kLayerNormBlock) * group_chunks);
}

bool supports_plain(const Tensor& input, const MaxPool& pool, bool wants_output_norms) {
  // Of one pixel an image, torch may take channels-last memory for contiguous.
  return !wants_output_norms && input.suggest_memory_format() == at::MemoryFormat::ChannelsLast &&
         fits(input, pool, input.size(1) * input.element_size() / kAlignment);
}

ConvolutionResult run_plain(const Tensor& input, const MaxPool& pool, bool) {
  return pooled(input, /*reference=*/{}, /*norm_input=*/std::nullopt, pool);
}

const Backends<ReferenceBackend> of_deviations(at::kCUDA, Rank::kHopper,
                                               {.pool = {&supports_deviations, &pooled}});
const Backends<DenseBackend> plain(at::kCUDA, Rank::kHopper,
                                   {.pool = {&supports_plain, &run_plain}});

}  // namespace
}  // namespace spamm::cuda
