// Every CUDA op first makes the tensor's device current and refuses a device that is too old.
// Tells whether the Hopper kernels may run on it.
//
// Environment variable SPAMM_TORCH_FORCE_SM80: `1` disables these, so that tests can run the
// portable kernels on any chip. Read once per process.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <cuda_runtime.h>

#include <optional>
#include <string>

#include "cuda/heuristics.h"
#include "cuda/tiles.h"
#include "environment.h"

namespace spamm::cuda {

// The device's properties. Refuses a device older than sm_80.
inline const cudaDeviceProp& check_device(at::Device device) {
  const int found = c10::cuda::device_count();
  TORCH_CHECK(found > 0 && device.index() < found, "no such CUDA device: ", device, "; found ",
              found, " CUDA devices");
  const cudaDeviceProp& properties = *at::cuda::getDeviceProperties(device.index());
  TORCH_CHECK(properties.major >= 8,
              "spamm_torch needs a GPU of compute capability 8.0 or newer; got ", properties.name,
              " (", properties.major, ".", properties.minor, ")");
  return properties;
}

// Makes the tensor's device the current one for the lifetime of this object.
class OnDevice {
 public:
  explicit OnDevice(const at::Tensor& tensor)
      : guard_(tensor.device()), properties_(check_device(tensor.device())) {
    // The driver encodes tensor maps in the thread's context. A thread has none before its first
    // call of the runtime, which the guard does not make where the device is the current one.
    static thread_local const cudaError_t bound = cudaSetDevice(tensor.get_device());
    C10_CUDA_CHECK(bound);
  }

  const cudaDeviceProp& properties() const { return properties_; }
  int multiprocessors() const { return properties_.multiProcessorCount; }
  cudaStream_t stream() const { return c10::cuda::getCurrentCUDAStream(); }

 private:
  c10::cuda::CUDAGuard guard_;
  const cudaDeviceProp& properties_;
};

// Tells whether the current stream is captured for a CUDA graph, so that the host must not wait.
inline bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

inline bool has_hopper_kernels([[maybe_unused]] const cudaDeviceProp& chip) {
#ifdef SPAMM_WITH_SM90A
  static const bool forces_sm80 = is_set("SPAMM_TORCH_FORCE_SM80");
  return !forces_sm80 &&
         runs_hopper_kernels(10 * chip.major + chip.minor, chip.sharedMemPerBlockOptin);
#else
  return false;
#endif
}

// ---- Forced choices, for tests and comparisons --------------------------------------------------

// SPAMM_TORCH_SEGMENTS: a power of two up to 32 forces that number of segments in all products that
// may have some, and up to four in convolutions (heuristics.h: choose_product_segments,
// choose_conv_segments). Read in each call, so that one process can compare them: measured at 16
// ns with 37 variables in the environment, 0.2 us with 107.
inline std::optional<int> forced_segments() {
  const std::string value = environment("SPAMM_TORCH_SEGMENTS");
  if (value.empty()) return std::nullopt;
  for (int number = 1; number <= kMostProductSegments; number *= 2) {
    if (value == std::to_string(number)) return number;
  }
  TORCH_CHECK_VALUE(false, "SPAMM_TORCH_SEGMENTS must be 1, 2, 4, 8, 16 or 32; got ", value);
}

// SPAMM_TORCH_TILE: `small`, `large`, `medium` or `square` forces that tile in all products and
// convolutions whose kernel has it; the small one elsewhere. scripts/bench.py times either, and
// scripts/sanitize.py runs both. Read once per process.
inline std::optional<TileSize> forced_tile() {
  static const std::optional<TileSize> forced = []() -> std::optional<TileSize> {
    const std::string value = environment("SPAMM_TORCH_TILE");
    if (value.empty()) return std::nullopt;
    if (value == "small") return TileSize::kSmall;
    if (value == "large") return TileSize::kLarge;
    if (value == "medium") return TileSize::kMedium;
    if (value == "square") return TileSize::kSquare;
    TORCH_CHECK_VALUE(false, "SPAMM_TORCH_TILE must be small, large, medium or square; got ",
                      value);
  }();
  return forced;
}

// SPAMM_TORCH_UNSKIPPED, for tests and comparisons: whether the convolution
// kernel where nothing is skipped (kernels/conv/sm90/unskipped.cuh) runs wherever it can. `0`:
// never; `1`: always; a tile such as `128x192w` or `128x192p`: always, in this tile, and clusters
// share weights or pixels. Read in each call, so that one process can compare them.
struct ForcedUnskipped {
  bool runs;
  std::optional<UnskippedChoice> choice;
};

inline std::optional<ForcedUnskipped> forced_unskipped() {
  const std::string value = environment("SPAMM_TORCH_UNSKIPPED");
  if (value.empty()) return std::nullopt;
  if (value == "0" || value == "1") return ForcedUnskipped{value == "1", std::nullopt};
  for (const UnskippedTile& tile : kUnskippedTiles) {
    const std::string name = std::to_string(tile.channels) + "x" + std::to_string(tile.pixels);
    for (const bool shares_weights : {true, false}) {
      if (value != name + (shares_weights ? "w" : "p")) continue;
      return ForcedUnskipped{true, UnskippedChoice{tile, shares_weights}};
    }
  }
  TORCH_CHECK_VALUE(
      false, "SPAMM_TORCH_UNSKIPPED must be 0, 1 or a tile such as 128x192w or 128x192p; got ",
      value);
}

}  // namespace spamm::cuda
