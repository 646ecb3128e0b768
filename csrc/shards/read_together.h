// Reads several tensors of a device with one wait for the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "shards/lane.h"

namespace spamm::shards {

// Copies of the tensors on the CPU. They lie on one device. Types may differ, but no entry is
// longer than those of the tensors before. The copy is enqueued on the device's current stream, and
// what is enqueued there later does not delay it.
class ReadTogether {
 public:
  explicit ReadTogether(std::vector<at::Tensor> tensors);
  std::vector<at::Tensor> wait();

 private:
  std::vector<at::Tensor> tensors_;
  at::Tensor bytes_;  // of all, on the CPU
  Mark copied_;
};

}  // namespace spamm::shards
