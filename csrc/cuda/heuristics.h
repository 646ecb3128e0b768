// Which kernel and tile serve a product: the one place that decides. Plain functions of plain
// numbers, so that they can be tested without a GPU.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "block.h"
#include "kernels/common/tile.h"

namespace spamm::cuda {

enum class Kernel {
  kSm90F16,
  kSm90Bf16,
  kSm90F32x1,
  kSm90F32x3,
  kSm90F64,
  kSm80F16,
  kSm80Bf16,
  kSm80Tf32,
  kSm80F32,
  kSm80F64
};

// Whether a chip runs the kernels for Hopper: they are built for sm_90a, which is compute
// capability 9.0 (90) and no other, and a thread block takes all the shared memory it has.
inline bool runs_hopper_kernels(int compute_capability, int64_t shared_bytes_per_block) {
  return compute_capability == 90 && shared_bytes_per_block >= 227 * 1024;
}

// Whether tensor maps, whose coordinates are 32 bits wide, describe the operands of a product.
inline bool tensor_maps_take(int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kLongest = (int64_t{1} << 31) - 256;  // tiles may stick out
  return k > 0 && std::max({m, n, k}) <= kLongest;
}

// In how many split parts a kernel takes float32 operands; 0 if it takes them as they are.
inline int split_parts_of(Kernel kernel) {
  return kernel == Kernel::kSm90F32x1 ? 1 : kernel == Kernel::kSm90F32x3 ? 2 : 0;
}

// `batch` products of (m x k) times (k x n). Operands hold one matrix where the batch shares it.
struct ProductSize {
  int64_t batch_a, batch_b, batch, m, n, k;
};

// Whether split parts, which are padded to blocks of 64 x 64, take several times the memory of
// float32 operands and result. Little memory does not count.
inline bool split_wastes_memory(const ProductSize& size, int split_parts) {
  constexpr double kMostTimes = 4, kLittle = 1 << 20;
  const auto entries = [](int64_t batch, int64_t rows, int64_t columns) {
    return static_cast<double>(batch) * static_cast<double>(rows) * static_cast<double>(columns);
  };
  const auto split_bytes = [&](int64_t batch, int64_t rows, int64_t columns) {
    constexpr double kBlockBytes = 64 * 64 * 2;  // of a half type
    return split_parts * kBlockBytes * entries(batch, blocks_of(rows, 64), blocks_of(columns, 64));
  };
  const double split =
      split_bytes(size.batch_a, size.m, size.k) + split_bytes(size.batch_b, size.k, size.n);
  const double plain =
      sizeof(float) * (entries(size.batch_a, size.m, size.k) +
                       entries(size.batch_b, size.k, size.n) + entries(size.batch, size.m, size.n));
  return split > kLittle && split > kMostTimes * plain;
}

// `hopper`: the chip and the sizes allow it, as the first two functions say, and the library holds
// these kernels. float32 is rounded to TF32's digits only where PyTorch's setting allows it.
// Hopper's tensor cores serve it by one product of split parts then, and else by three, where the
// parts' memory is worth it. Blocks of 32 would share these parts' scales with their neighbours.
// `size` is absent where a kernel is asked for before a product's size is known.
inline Kernel choose_kernel(c10::ScalarType dtype, const Block& block, bool allow_tf32, bool hopper,
                            const std::optional<ProductSize>& size = std::nullopt) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return hopper ? Kernel::kSm90F16 : Kernel::kSm80F16;
    case c10::ScalarType::BFloat16:
      return hopper ? Kernel::kSm90Bf16 : Kernel::kSm80Bf16;
    case c10::ScalarType::Float:
      if (hopper && std::min({block.m, block.k, block.n}) >= 64) {
        const Kernel split = allow_tf32 ? Kernel::kSm90F32x1 : Kernel::kSm90F32x3;
        if (!size || !split_wastes_memory(*size, split_parts_of(split))) return split;
      }
      return allow_tf32 ? Kernel::kSm80Tf32 : Kernel::kSm80F32;
    case c10::ScalarType::Double:
      return hopper ? Kernel::kSm90F64 : Kernel::kSm80F64;
    default:
      TORCH_CHECK_TYPE(false, "no CUDA kernel for ", dtype, " operands");
  }
}

inline const char* kernel_name(Kernel kernel) {
  switch (kernel) {
    case Kernel::kSm90F16:
      return "sm90-wgmma-f16";
    case Kernel::kSm90Bf16:
      return "sm90-wgmma-bf16";
    case Kernel::kSm90F32x1:
      return "sm90-wgmma-f32x1";
    case Kernel::kSm90F32x3:
      return "sm90-wgmma-f32x3";
    case Kernel::kSm90F64:
      return "sm90-dmma-f64";
    case Kernel::kSm80F16:
      return "sm80-mma-f16";
    case Kernel::kSm80Bf16:
      return "sm80-mma-bf16";
    case Kernel::kSm80Tf32:
      return "sm80-mma-tf32";
    case Kernel::kSm80F32:
      return "sm80-simt-f32";
    case Kernel::kSm80F64:
      return "sm80-dmma-f64";
  }
  TORCH_INTERNAL_ASSERT(false, "unnamed kernel ", static_cast<int>(kernel));
}

// From how many 128 x 128 tiles of C for each multiprocessor on the large tile pays: it reads each
// operand less often, but leaves multiprocessors idle where C is small. scripts/tune.py measures
// these numbers.
inline double large_tile_from(Kernel kernel) {
  switch (kernel) {
    case Kernel::kSm90F16:
    case Kernel::kSm90Bf16:
    case Kernel::kSm90F32x1:
      return 0.5;  // beyond one wave of small tiles, which are half as large
    case Kernel::kSm90F32x3:
      return 1.25;  // below that cublasSgemm may cut K, and only the small tile is as accurate
    case Kernel::kSm90F64:
      return 1.5;  // between, most of a second wave of large tiles would be idle
    default:
      return 1;
  }
}

inline Tile choose_tile(Kernel kernel, int64_t batch, int64_t m, int64_t n, int multiprocessors) {
  const int64_t tiles = batch * blocks_of(m, 128) * blocks_of(n, 128);
  return static_cast<double>(tiles) >= large_tile_from(kernel) * multiprocessors ? Tile::kLarge
                                                                                 : Tile::kSmall;
}

// The same for a convolution without im2col, of so many boxes of 64 output pixels: 128 output
// channels x 128 or 256 pixels. Small tiles fill more of the chip for two waves or less.
inline Tile choose_conv_tile(int64_t out_channels, int64_t boxes, int multiprocessors) {
  const int64_t large_tiles = blocks_of(out_channels, 128) * blocks_of(boxes, 4);
  return large_tiles > 2 * multiprocessors ? Tile::kLarge : Tile::kSmall;
}

}  // namespace spamm::cuda
