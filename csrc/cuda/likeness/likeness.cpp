// The op likeness_order: two launches, nothing waits for the device.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/library.h>

#include <limits>
#include <tuple>

#include "cuda/device.h"
#include "cuda/likeness/launch.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using namespace kernels::likeness;

auto launcher_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool:
      return launch_image_centres<bool>;
    case at::kByte:
      return launch_image_centres<uint8_t>;
    case at::kChar:
      return launch_image_centres<int8_t>;
    case at::kShort:
      return launch_image_centres<int16_t>;
    case at::kInt:
      return launch_image_centres<int32_t>;
    case at::kLong:
      return launch_image_centres<int64_t>;
    case at::kHalf:
      return launch_image_centres<__half>;
    case at::kBFloat16:
      return launch_image_centres<__nv_bfloat16>;
    case at::kFloat:
      return launch_image_centres<float>;
    case at::kDouble:
      return launch_image_centres<double>;
    default:
      TORCH_CHECK_TYPE(false, "images must be of bool, bytes, integers or floats; got ", dtype);
  }
}

std::tuple<Tensor, Tensor> likeness_order(const Tensor& images, int64_t bands) {
  constexpr int64_t kMostPixels = std::numeric_limits<int32_t>::max();
  const OnDevice device(images);
  TORCH_CHECK(images.dim() == 4 && images.size(1) > 0 && images.size(2) > 0 && images.size(3) > 0,
              "images must be a batch of shape (N, C, H, W) with C, H, W >= 1; got shape ",
              images.sizes());
  const int64_t count = images.size(0);
  TORCH_CHECK(
      count <= kMostImages && images.size(2) <= kMostPixels && images.size(3) <= kMostPixels,
      "images must be at most ", kMostImages, " of sides below 2^31; got shape ", images.sizes());
  TORCH_CHECK_VALUE(bands >= 1 && bands <= kMostImages, "bands must be from 1 to ", kMostImages,
                    "; got ", bands);
  const auto launch_centres = launcher_of(images.scalar_type());
  const Tensor order = at::empty({count}, images.options().dtype(at::kLong));
  const Tensor places = at::empty_like(order);
  if (count == 0) return {order, places};
  const Tensor centres = at::empty({2, count}, images.options().dtype(at::kDouble));
  C10_CUDA_CHECK(launch_centres({.data = images.const_data_ptr(),
                                 .image_stride = images.stride(0),
                                 .row_stride = images.stride(2),
                                 .column_stride = images.stride(3),
                                 .rows = static_cast<int>(images.size(2)),
                                 .columns = static_cast<int>(images.size(3)),
                                 .centres = centres.mutable_data_ptr<double>(),
                                 .images = static_cast<int>(count)},
                                device.stream()));
  C10_CUDA_CHECK(launch_image_order({.centres = centres.const_data_ptr<double>(),
                                     .images = static_cast<int>(count),
                                     .bands = static_cast<int>(bands),
                                     .order = order.mutable_data_ptr<int64_t>(),
                                     .places = places.mutable_data_ptr<int64_t>()},
                                    device.stream()));
  return {order, places};
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) { m.impl("likeness_order", &likeness_order); }

}  // namespace spamm::cuda
