// How many thread blocks share the staircases of two norm maps.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>

#include "kernels/threshold/count_bins.cuh"

namespace spamm::cuda {

// Refuses maps with more staircases than `most_blocks` thread blocks can count in 32 bits each.
template <int kLaneRows, class Norm>
void check_staircases(const kernels::NormMaps<Norm>& maps, int64_t most_blocks, const char* op) {
  TORCH_CHECK(kernels::staircases<kLaneRows>(maps) <= kernels::kMostStaircases * most_blocks,
              "norm maps are too large for ", op, "; got ", maps.batch, " x ", maps.mb, " x ",
              maps.kb, " x ", maps.nb);
}

// The thread blocks that have work, at most `most`.
inline int64_t blocks_for(int64_t staircases, int64_t most) {
  return std::min((staircases - 1) / kernels::kSelectRun + 1, most);
}

}  // namespace spamm::cuda
