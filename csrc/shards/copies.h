// Copies of small tensors beside the shards that they are needed for. Device-free.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <vector>

namespace spamm::shards {

// A tensor and its copies on other devices, each of which is made once. Gradients go back through
// them.
class Copies {
 public:
  explicit Copies(const at::Tensor& original) : tensors_{original} {}

  const at::Tensor& original() const { return tensors_.front(); }

  at::Tensor on(at::Device device) {
    for (const at::Tensor& tensor : tensors_) {
      if (tensor.device() == device) return tensor;
    }
    tensors_.push_back(original().to(original().options().device(device)));
    return tensors_.back();
  }

 private:
  std::vector<at::Tensor> tensors_;
};

// One tensor for each shard. `given` holds these, or one that is copied to the shards' devices.
inline std::vector<at::Tensor> beside(at::TensorList shards, at::TensorList given,
                                      const char* name) {
  TORCH_CHECK_VALUE(given.size() == 1 || given.size() == shards.size(), name,
                    " must be one tensor, or one for each of the ", shards.size(), " shards; got ",
                    given.size());
  if (given.size() == shards.size() && given.size() != 1) return given.vec();
  Copies copies(given.front());
  std::vector<at::Tensor> result;
  for (const at::Tensor& shard : shards) result.push_back(copies.on(shard.device()));
  return result;
}

}  // namespace spamm::shards
