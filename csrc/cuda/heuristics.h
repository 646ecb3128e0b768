// Which kernel and tile serve a product or a convolution: with the table of tiles.h, the one place
// that decides. Plain functions of plain numbers, so that they can be tested without a GPU.
//
// What can be chosen stands here. What only one kernel can do (takes_resident and strides_fit of
// the Hopper convolution), and how one kernel cuts its own grid, registers and turns, stands beside
// it.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "block.h"
#include "cuda/tiles.h"

namespace spamm::cuda {

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

// Whether the pass that computes the norms also clears the counter of tiles of this kernel's
// product, which then needs no launch for that.
inline bool norms_clear_counter(Kernel kernel) {
  return kernel == Kernel::kSm90F16 || kernel == Kernel::kSm90Bf16;
}

// Whether a kernel counts the tiles that its thread blocks have claimed.
inline bool claims_tiles(Kernel kernel) {
  switch (kernel) {
    case Kernel::kSm90F16:
    case Kernel::kSm90Bf16:
    case Kernel::kSm90F32x1:
    case Kernel::kSm90F32x3:
    case Kernel::kSm90F64:
      return true;
    default:
      return false;
  }
}

// ---- Tiles --------------------------------------------------------------------------------------

// The tile that is forced, where the kernel has it, else the large one where that pays.
template <class AnyKernel>
TileSize pick_tile(AnyKernel kernel, bool large_pays, std::optional<TileSize> forced) {
  const TileSize wanted = forced.value_or(large_pays ? TileSize::kLarge : TileSize::kSmall);
  return find_tile(kernel, wanted) == nullptr ? TileSize::kSmall : wanted;
}

// Whether a large tile, which reads each operand less often, leaves few multiprocessors idle: it
// pays from a number of areas of 128 x 128 of C for each of them on.
template <class AnyKernel>
bool large_tile_pays(AnyKernel kernel, int64_t batch, int64_t m, int64_t n, int multiprocessors) {
  const TileRow<AnyKernel>* large = find_tile(kernel, TileSize::kLarge);
  const int64_t areas = batch * blocks_of(m, 128) * blocks_of(n, 128);
  return large != nullptr && static_cast<double>(areas) >= large->pays_from * multiprocessors;
}

inline TileSize choose_tile(Kernel kernel, int64_t batch, int64_t m, int64_t n, int multiprocessors,
                            std::optional<TileSize> forced = std::nullopt) {
  return pick_tile(kernel, large_tile_pays(kernel, batch, m, n, multiprocessors), forced);
}

// How many tile rows a Hopper product walks together, so that they share columns of B in the L2
// cache. Measured: with 16 tile columns or less, a group of 8 is about one tile for each
// multiprocessor and 6% faster; with more, 16 is up to 1% faster.
inline int group_rows(int64_t tile_columns) { return tile_columns <= 16 ? 8 : 16; }

// ---- Convolutions -------------------------------------------------------------------------------

// With so many output channels or fewer, half of a tile of 128 of them is empty.
constexpr int64_t kNarrowOutput = 64;

// Without an im2col matrix. `hopper`: the kernels for it take the convolution.
inline ConvKernel choose_conv_kernel(c10::ScalarType dtype, bool allow_tf32, bool hopper) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return hopper ? ConvKernel::kSm90F16 : ConvKernel::kSm80F16;
    case c10::ScalarType::BFloat16:
      return hopper ? ConvKernel::kSm90Bf16 : ConvKernel::kSm80Bf16;
    case c10::ScalarType::Float:
      if (hopper) return allow_tf32 ? ConvKernel::kSm90Tf32 : ConvKernel::kSm90F32x3;
      return allow_tf32 ? ConvKernel::kSm80Tf32 : ConvKernel::kSm80F32;
    case c10::ScalarType::Double:
      TORCH_INTERNAL_ASSERT(!hopper, "Hopper has no convolution of float64");
      return ConvKernel::kSm80F64;
    default:
      TORCH_CHECK_TYPE(false, "no CUDA convolution for ", dtype);
  }
}

// For sm_80, of so many pixels and output channels of each group.
inline TileSize choose_conv_tile_sm80(ConvKernel kernel, int64_t groups, int64_t pixels,
                                      int64_t out_channels, int multiprocessors,
                                      std::optional<TileSize> forced = std::nullopt) {
  const bool pays = out_channels > kNarrowOutput &&
                    large_tile_pays(kernel, groups, pixels, out_channels, multiprocessors);
  return pick_tile(kernel, pays, forced);
}

// For Hopper, of so many boxes of 64 output pixels. Small tiles fill more of the chip for as many
// waves of large ones as the table says, or less. `narrow`: takes_resident() for half types.
inline TileSize choose_conv_tile_sm90(ConvKernel kernel, int64_t out_channels, int64_t boxes,
                                      bool narrow, int multiprocessors,
                                      std::optional<TileSize> forced = std::nullopt) {
  if (narrow && find_tile(kernel, TileSize::kNarrow) != nullptr) return TileSize::kNarrow;
  const TileRow<ConvKernel>* large = find_tile(kernel, TileSize::kLarge);
  if (large == nullptr) return TileSize::kSmall;
  const int64_t large_tiles =
      blocks_of(out_channels, large->config.rows) * blocks_of(boxes, large->config.columns / 64);
  return pick_tile(kernel, static_cast<double>(large_tiles) > large->pays_from * multiprocessors,
                   forced);
}

// Whether the thread blocks of Hopper's convolution claim their tiles from a counter. The launch
// that computes norms also sets it to zero; where there is none, saving a launch beats claiming,
// but for large tiles.
inline bool claims_conv_tiles(TileSize tile, bool computes_norms) {
  return computes_norms || tile == TileSize::kLarge;
}

// Whether float32 at full accuracy is worth splitting for Hopper's convolution: split parts come in
// blocks of 64 images x 64 channels, and half empty ones do not pay.
inline bool split_conv_pays(int64_t in_channels) { return in_channels >= 32; }

// Whether an explicit im2col matrix pays, for the kernel that would multiply it: three products of
// split parts are worth it, unless most of it is the padding of few channels to blocks.
inline bool im2col_matrix_pays(Kernel kernel, int64_t group_in_channels) {
  return kernel == Kernel::kSm90F32x3 && group_in_channels >= 32;
}

}  // namespace spamm::cuda
