// Which kernel and tile serve a product: the one place that decides. Plain functions of plain
// numbers, so that they can be tested without a GPU.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstdint>

namespace spamm::cuda {

enum class Kernel { kMmaF16, kMmaBf16, kMmaTf32, kSimtF32, kDmmaF64 };

// float32 goes through tensor cores only where PyTorch's setting allows their TF32.
inline Kernel choose_kernel(c10::ScalarType dtype, bool allow_tf32) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return Kernel::kMmaF16;
    case c10::ScalarType::BFloat16:
      return Kernel::kMmaBf16;
    case c10::ScalarType::Float:
      return allow_tf32 ? Kernel::kMmaTf32 : Kernel::kSimtF32;
    case c10::ScalarType::Double:
      return Kernel::kDmmaF64;
    default:
      TORCH_CHECK_TYPE(false, "no CUDA kernel for ", dtype, " operands");
  }
}

inline const char* kernel_name(Kernel kernel) {
  switch (kernel) {
    case Kernel::kMmaF16:
      return "sm80-mma-f16";
    case Kernel::kMmaBf16:
      return "sm80-mma-bf16";
    case Kernel::kMmaTf32:
      return "sm80-mma-tf32";
    case Kernel::kSimtF32:
      return "sm80-simt-f32";
    case Kernel::kDmmaF64:
      return "sm80-dmma-f64";
  }
  TORCH_INTERNAL_ASSERT(false, "unnamed kernel ", static_cast<int>(kernel));
}

// Which of a kernel's two tiles: the shapes stand with their instances, in multiply_*.cu.
enum class Tile { kSmall, kLarge };

// Large tiles read each operand less often; they pay once every multiprocessor has one.
inline Tile choose_tile(int64_t batch, int64_t m, int64_t n, int multiprocessors) {
  const int64_t large_tiles = batch * ((m + 127) / 128) * ((n + 127) / 128);
  return large_tiles >= multiprocessors ? Tile::kLarge : Tile::kSmall;
}

}  // namespace spamm::cuda
