// Environment variable SPAMM_TORCH_TILE: `small` or `large` forces that tile in all products and
// convolutions whose kernel has it. scripts/bench.py times either, and scripts/sanitize.py runs
// both. Read once per process.
#pragma once

#include <c10/util/Exception.h>

#include <optional>
#include <string>

#include "cuda/hopper.h"
#include "cuda/tiles.h"

namespace spamm::cuda {

inline std::optional<TileSize> forced_tile() {
  static const std::optional<TileSize> forced = []() -> std::optional<TileSize> {
    const std::string value = environment("SPAMM_TORCH_TILE");
    TORCH_CHECK_VALUE(value.empty() || value == "small" || value == "large",
                      "SPAMM_TORCH_TILE must be small or large; got ", value);
    if (value.empty()) return std::nullopt;
    return value == "small" ? TileSize::kSmall : TileSize::kLarge;
  }();
  return forced;
}

}  // namespace spamm::cuda
