// Hopper's concatenation of deviations: turns tensors into kernel parameters.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <vector>

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

const Backends<ReferenceBackend> registered(at::kCUDA, Rank::kHopper, {.join = {&supports, &run}});

}  // namespace
}  // namespace spamm::cuda
