// Small tensors on their way from several devices to one, and to the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "shards/lane.h"

namespace spamm::shards {

// Norm maps of other devices, one below the other, on `device`. They are contiguous and have one
// number of columns. ready: when each piece has been computed. The current streams of their devices
// wait for the copies, so that the pieces' memory may be used again.
at::Tensor gather_rows(at::TensorList pieces, std::span<const Mark> ready, at::Device device);

// Several tensors of a device, read with one wait for it: copies on the CPU. They lie on one
// device. Types may differ, but no entry is longer than those of the tensors before. The copy is
// enqueued on the device's current stream, and what is enqueued there later does not delay it.
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
