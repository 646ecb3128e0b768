// From tensors to kernels' parameters: matrices, pictures, in place if possible, and thresholds.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

#include "cuda/norm_map/norm_map.h"
#include "kernels/common/parameters.h"
#include "kernels/multiply/params.h"
#include "threshold.h"

namespace spamm::cuda {

// A matrix as a batch of one.
inline at::Tensor as_batch(const at::Tensor& x) { return x.dim() == 3 ? x : x.unsqueeze(0); }

// Tells whether kernels can read x with dimension `contiguous` as the contiguous one: the address
// and all other strides are multiples of `alignment` bytes. `leading`: the other dimension.
inline bool reads_along(const Matrices& x, int64_t contiguous, int64_t leading,
                        int64_t alignment = kAlignment) {
  const auto aligned = [&](int64_t stride) { return stride * x.element_size() % alignment == 0; };
  return (x.size(contiguous) <= 1 || x.stride(contiguous) == 1) && aligned(step(x, leading)) &&
         aligned(step(x, 0)) && reinterpret_cast<uintptr_t>(x.data()) % alignment == 0;
}

// An aligned row-major copy of x (batch, rows, columns); a broadcast batch is copied once.
inline at::Tensor aligned_copy(const at::Tensor& x) {
  const at::Tensor source = step(x, 0) == 0 ? x.narrow(0, 0, 1) : x;
  const int64_t unit = kAlignment / x.element_size();
  const int64_t leading = (x.size(2) + unit - 1) / unit * unit;
  const at::Tensor copy = at::empty({source.size(0), x.size(1), leading}, x.options());
  return copy.narrow(2, 0, x.size(2)).copy_(source).expand(x.sizes());
}

// x itself if the multiply kernels can read it, else an aligned copy: of a slice that starts off
// the 16-byte grid, for example, or of a matrix with two strides above 1.
inline at::Tensor readable(const at::Tensor& x, int64_t alignment = kAlignment) {
  const bool in_place =
      x.numel() == 0 || reads_along(x, 2, 1, alignment) || reads_along(x, 1, 2, alignment);
  return in_place ? x : aligned_copy(as_batch(x));
}

// `x` is a result of readable() and must outlive the launch. `k_dim` is its dimension along K.
inline kernels::Operand operand(const Matrices& x, int64_t k_dim, int64_t alignment = kAlignment) {
  const auto reads = [&](int64_t dim) { return reads_along(x, dim, 3 - dim, alignment); };
  const int64_t contiguous = reads(2) && (x.size(2) > 1 || !reads(1)) ? 2 : 1;
  const bool by_entry = !reads_along(x, contiguous, 3 - contiguous);
  return {x.data(), step(x, 0), step(x, contiguous == 2 ? 1 : 2), contiguous == k_dim, by_entry};
}

// x (images, channels, rows, columns) in channels-last memory. The address is a multiple of 16
// bytes, channels are a multiple of `unit`. x itself if possible, else a copy with zeros appended.
inline at::Tensor readable_pixels(const at::Tensor& x, int64_t unit) {
  const int64_t rest = x.size(1) % unit;
  const at::Tensor padded = rest ? at::constant_pad_nd(x, {0, 0, 0, 0, 0, unit - rest}) : x;
  const at::Tensor pixels = padded.contiguous(at::MemoryFormat::ChannelsLast);
  const bool aligned = reinterpret_cast<uintptr_t>(pixels.const_data_ptr()) % kAlignment == 0;
  return aligned ? pixels : pixels.clone();
}

// The same, where the channels of a pixel are a multiple of 16 bytes.
inline at::Tensor readable_pixels(const at::Tensor& x) {
  return readable_pixels(x, kAlignment / x.element_size());
}

// So many bytes on x's device.
inline at::Tensor bytes_beside(const at::Tensor& x, int64_t bytes) {
  return at::empty({bytes}, x.options().dtype(at::kByte));
}

// A threshold: a tensor in the norms' type on the GPU, which converts it so that the host never
// waits for it, or else a number, which kernels get by value. It outlives their launch.
struct Threshold {
  at::Tensor on_device = {};
  double number = 0;

  Threshold() = default;
  explicit Threshold(double number) : number(number) {}
  Threshold(const at::Tensor& tau, at::ScalarType norm_type) {
    if (tau.is_cpu()) {
      number = host_scalar(tau);
    } else {
      on_device = tau.to(norm_type);
    }
  }

  template <class Norm>
  kernels::Tau<Norm> argument() const {
    if (on_device.defined()) return {on_device.const_data_ptr<Norm>(), Norm{}};
    return {nullptr, static_cast<Norm>(number)};
  }
};

}  // namespace spamm::cuda
