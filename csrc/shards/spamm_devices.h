// A product of operands on one GPU or in host memory, computed on several GPUs.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "spamm.h"

namespace spamm::shards {

// The op spamm with `devices`. Nothing where the operands' own device is among them and alone takes
// less time; the bits would be the same. Else the result lies where the operands lie: in pinned
// memory for operands in host memory, and then complete on return. For operands on a GPU the host
// waits for it once, to read the plan. A threshold in the knob becomes a tau.
OptTensor spamm_on_devices(ProductArguments& product);

// The same for operands on one device, where the result will lie, once it is known that others pay.
// is_home_used: that device computes rows, too, and is the first of `devices`. These are of one
// kind, which may be the CPU. The arguments have been checked.
Tensor spamm_from_home(const ProductArguments& product, const std::vector<at::Device>& devices,
                       bool is_home_used);

// Sizes by which operands in host memory travel. An absent one is chosen.
struct HostSizes {
  std::optional<int64_t> stage_blocks;  // block columns of a stage
  int64_t panels = 1;                   // passes over B, at least
  int64_t piece_bytes = 64 << 20;       // of pinned memory; 0: as if the operands were pinned
};

// The op spamm with `devices` for operands on the CPU: (M, N) in pinned memory, with the bits that
// one of the devices computes for operands with contiguous rows. The arguments have been checked.
// Devices are of one kind; if that is the CPU, the result is not pinned. Returns once it is there.
//
// A is read once and B once for each panel of rows of A: one, unless A does not fit into the
// devices' memory. Where tau is searched for, B is read once more before, and A if there are
// several panels. OutOfMemoryError names the device and the bytes if the least panel does not fit.
Tensor spamm_from_host(ProductArguments given, const std::vector<at::Device>& devices,
                       const HostSizes& sizes = {});

}  // namespace spamm::shards
