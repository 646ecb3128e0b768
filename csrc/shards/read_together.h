// Reads several tensors of a device with one wait for the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace spamm::shards {

// Copies of the tensors on the CPU. They lie on one device. Types may differ, but no entry is
// longer than those of the tensors before.
std::vector<at::Tensor> read_together(const std::vector<at::Tensor>& tensors);

}  // namespace spamm::shards
