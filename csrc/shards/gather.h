// Norm maps whose rows are computed on other devices than the one that needs them.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

#include "shards/lane.h"

namespace spamm::shards {

// The pieces, one below the other, on `device`. They are contiguous and have one number of columns.
// ready: when each piece has been computed. The current streams of their devices wait for the
// copies, so that the pieces' memory may be used again.
at::Tensor gather_rows(at::TensorList pieces, std::span<const Mark> ready, at::Device device);

}  // namespace spamm::shards
