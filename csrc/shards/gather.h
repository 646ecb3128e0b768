// Norm maps whose rows are computed on several devices.
#pragma once

#include <ATen/core/Tensor.h>

namespace spamm::shards {

// The pieces, one below the other, on `device`. They are contiguous and have the same number of
// columns. The current streams of their devices and of `device` wait for each other.
at::Tensor gather_rows(at::TensorList pieces, at::Device device);

}  // namespace spamm::shards
