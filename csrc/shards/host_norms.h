// Norm maps of matrices in host memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

#include "shards/host_reader.h"

namespace spamm::shards {

// The norm map of `x` in blocks of this many rows and columns, on the first device, with the bits
// of norm_map there. Each device reads an equal share of the rows, in pieces of about
// `piece_bytes`. Waits for the devices.
at::Tensor norm_map_from_host(const HostMatrix& x, std::array<int64_t, 2> block,
                              const std::vector<at::Device>& devices, int64_t piece_bytes,
                              int64_t ring_bytes);

}  // namespace spamm::shards
