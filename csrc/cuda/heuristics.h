// Which kernel and tile serve a product: the one place that decides. Plain functions of plain
// numbers, so that they can be tested without a GPU.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>

#include "checks.h"

namespace spamm::cuda {

enum class Kernel { kWgmmaF16, kWgmmaBf16, kMmaF16, kMmaBf16, kMmaTf32, kSimtF32, kDmmaF64 };

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

// `hopper`: the two functions above are true, and the library holds these kernels. float32 goes
// through tensor cores only where PyTorch's setting allows their TF32.
inline Kernel choose_kernel(c10::ScalarType dtype, bool allow_tf32, bool hopper) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return hopper ? Kernel::kWgmmaF16 : Kernel::kMmaF16;
    case c10::ScalarType::BFloat16:
      return hopper ? Kernel::kWgmmaBf16 : Kernel::kMmaBf16;
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
    case Kernel::kWgmmaF16:
      return "sm90-wgmma-f16";
    case Kernel::kWgmmaBf16:
      return "sm90-wgmma-bf16";
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

// Large tiles read each operand less often. On Hopper (128 x 256 against 128 x 64) they always pay,
// but where a single wave of small tiles makes all of C; elsewhere (128 x 128 against 64 x 64) once
// every multiprocessor has one.
inline Tile choose_tile(Kernel kernel, int64_t batch, int64_t m, int64_t n, int multiprocessors) {
  const auto tiles = [&](int64_t rows, int64_t columns) {
    return batch * blocks_of(m, rows) * blocks_of(n, columns);
  };
  const bool hopper = kernel == Kernel::kWgmmaF16 || kernel == Kernel::kWgmmaBf16;
  const bool large = hopper ? tiles(128, 64) > multiprocessors : tiles(128, 128) >= multiprocessors;
  return large ? Tile::kLarge : Tile::kSmall;
}

}  // namespace spamm::cuda
