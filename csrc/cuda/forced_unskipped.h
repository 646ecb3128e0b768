// Environment variable SPAMM_TORCH_UNSKIPPED, for tests and comparisons: whether the convolution
// kernel where nothing is skipped (kernels/conv/sm90/unskipped.cuh) runs wherever it can. `0`:
// never; `1`: always; a tile such as `128x192w` or `128x192p`: always, in this tile, and clusters
// share weights or pixels. Read in each call, so that one process can compare them.
#pragma once

#include <c10/util/Exception.h>

#include <optional>
#include <string>

#include "cuda/heuristics.h"
#include "cuda/hopper.h"

namespace spamm::cuda {

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
