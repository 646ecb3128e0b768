// Environment variable SPAMM_TORCH_SEGMENTS: 1, 2 or 4 forces that number of segments in all
// convolutions and products that may have so many (heuristics.h: choose_conv_segments,
// choose_product_segments). Read in each call, so that one process can compare them: measured at 16
// ns with 37 variables in the environment, 0.2 us with 107.
#pragma once

#include <c10/util/Exception.h>

#include <optional>
#include <string>

#include "cuda/hopper.h"

namespace spamm::cuda {

inline std::optional<int> forced_segments() {
  const std::string value = environment("SPAMM_TORCH_SEGMENTS");
  if (value.empty()) return std::nullopt;
  TORCH_CHECK_VALUE(value == "1" || value == "2" || value == "4",
                    "SPAMM_TORCH_SEGMENTS must be 1, 2 or 4; got ", value);
  return value[0] - '0';
}

}  // namespace spamm::cuda
