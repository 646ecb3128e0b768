// Environment variables that force a choice, for tests and comparisons.
#pragma once

#include <c10/util/Exception.h>

#include <optional>
#include <string>

#include "cuda/device.h"
#include "cuda/heuristics.h"
#include "cuda/tiles.h"

namespace spamm::cuda {

// SPAMM_TORCH_SEGMENTS: 1, 2 or 4 forces that number of segments in all
// convolutions and products that may have so many (heuristics.h: choose_conv_segments,
// choose_product_segments). Read in each call, so that one process can compare them: measured at 16
// ns with 37 variables in the environment, 0.2 us with 107.
inline std::optional<int> forced_segments() {
  const std::string value = environment("SPAMM_TORCH_SEGMENTS");
  if (value.empty()) return std::nullopt;
  TORCH_CHECK_VALUE(value == "1" || value == "2" || value == "4",
                    "SPAMM_TORCH_SEGMENTS must be 1, 2 or 4; got ", value);
  return value[0] - '0';
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
