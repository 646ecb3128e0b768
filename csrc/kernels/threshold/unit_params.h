// The parameters of needed_units.
#pragma once

#include <cstdint>

#include "kernels/common/tau.h"

namespace spamm::kernels {

// largest_a: (parts, kb). norm_b: (kb, nb), in stages of `stage_blocks` columns.
template <class Norm>
struct UnitParams {
  const Norm *largest_a, *norm_b;
  Tau<Norm> tau;
  int64_t parts, kb, nb, stage_blocks, stages;
  bool* needed;  // (parts, kb, stages)
};

}  // namespace spamm::kernels
