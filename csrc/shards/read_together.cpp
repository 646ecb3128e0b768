#include "shards/read_together.h"

#include <ATen/ops/cat.h>

namespace spamm::shards {

std::vector<at::Tensor> read_together(const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) return {};
  std::vector<at::Tensor> bytes;
  for (const at::Tensor& x : tensors) bytes.push_back(x.contiguous().view({-1}).view(at::kByte));
  const at::Tensor read = at::cat(bytes).cpu();
  std::vector<at::Tensor> result;
  int64_t first = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t count = bytes[i].numel();
    const at::Tensor own = read.narrow(0, first, count);
    result.push_back(own.view(tensors[i].scalar_type()).view(tensors[i].sizes()));
    first += count;
  }
  return result;
}

}  // namespace spamm::shards
