// The op order_images: one launch, nothing waits for the device.
#include <c10/cuda/CUDAException.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/device.h"
#include "kernels/likeness/params.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using kernels::likeness::kNumbersAnImage;
using kernels::likeness::launch_order;
using kernels::likeness::OrderParams;

auto launcher_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool:
    case at::kByte:
      return launch_order<uint8_t>;
    case at::kHalf:
      return launch_order<__half>;
    case at::kBFloat16:
      return launch_order<__nv_bfloat16>;
    case at::kFloat:
      return launch_order<float>;
    case at::kDouble:
      return launch_order<double>;
    default:
      TORCH_CHECK_TYPE(false, "images must be of bool, bytes, integers or floats; got ", dtype);
  }
}

constexpr int64_t kMostImages = 1024;

void check(const Tensor& images, int64_t bands) {
  constexpr int64_t kMostPixels = std::numeric_limits<int32_t>::max();
  TORCH_CHECK(images.dim() == 4 && images.size(1) > 0 && images.size(2) > 0 && images.size(3) > 0,
              "images must be a batch of shape (N, C, H, W) with C, H, W >= 1; got shape ",
              images.sizes());
  TORCH_CHECK(images.size(0) <= kMostImages && images.size(2) <= kMostPixels &&
                  images.size(3) <= kMostPixels,
              "images must be at most ", kMostImages, " of sides below 2^31; got shape ",
              images.sizes());
  TORCH_CHECK_VALUE(bands >= 1 && bands <= kMostImages, "bands must be from 1 to ", kMostImages,
                    "; got ", bands);
}

struct Order {
  Tensor order, places;
};

// Copies the images into `ordered`, if that is defined: both have the same strides, and no gaps
// between or within images.
Order find_order(const Tensor& images, int64_t bands, const Tensor& ordered,
                 const OnDevice& device) {
  constexpr uintptr_t kChunk = 16;
  const auto launch = launcher_of(images.scalar_type());
  const int64_t count = images.size(0);
  const Tensor order = at::empty({count}, images.options().dtype(at::kLong));
  const Tensor places = at::empty_like(order);
  if (count == 0) return {order, places};
  const Tensor numbers = at::empty({kNumbersAnImage, count}, images.options().dtype(at::kDouble));
  OrderParams p = {.data = images.const_data_ptr(),
                   .image_stride = images.stride(0),
                   .row_stride = images.stride(2),
                   .column_stride = images.stride(3),
                   .rows = static_cast<int>(images.size(2)),
                   .columns = static_cast<int>(images.size(3)),
                   .images = static_cast<int>(count),
                   .bands = static_cast<int>(bands),
                   .numbers = numbers.mutable_data_ptr<double>(),
                   .order = order.mutable_data_ptr<int64_t>(),
                   .places = places.mutable_data_ptr<int64_t>(),
                   .ordered = nullptr};
  if (ordered.defined()) {
    p.ordered = ordered.mutable_data_ptr();
    p.image_bytes = images.numel() / count * images.element_size();
    const auto addresses =
        reinterpret_cast<uintptr_t>(p.data) | reinterpret_cast<uintptr_t>(p.ordered);
    p.whole_chunks = (addresses | static_cast<uintptr_t>(p.image_bytes)) % kChunk == 0;
  }
  C10_CUDA_CHECK(launch(p, device.multiprocessors(), device.stream()));
  return {order, places};
}

// Whether each image is one piece of memory, and the next one follows it.
bool are_pieces(const Tensor& images) {
  return images.is_non_overlapping_and_dense() &&
         (images.size(0) <= 1 || images.stride(0) == images.numel() / images.size(0));
}

std::tuple<Tensor, Tensor, Tensor> order_images(const Tensor& images, int64_t bands, bool copies) {
  check(images, bands);
  const OnDevice device(images);
  // Signed integers are rare. Only the first channel counts.
  const at::ScalarType dtype = images.scalar_type();
  const bool is_rare =
      c10::isIntegralType(dtype, /*includeBool=*/false) && c10::isSignedType(dtype);
  const Tensor pixels = is_rare ? images.narrow(1, 0, 1).to(at::kDouble) : images;
  if (!copies) {
    const auto [order, places] = find_order(pixels, bands, Tensor(), device);
    return {at::empty({0}, images.options()), order, places};
  }
  Tensor ordered = at::empty_like(images);
  const bool in_kernel = !is_rare && are_pieces(images) && ordered.strides() == images.strides();
  const auto [order, places] = find_order(pixels, bands, in_kernel ? ordered : Tensor(), device);
  if (!in_kernel) at::index_select_out(ordered, images, 0, order);
  return {ordered, order, places};
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) { m.impl("order_images", &order_images); }

}  // namespace spamm::cuda
