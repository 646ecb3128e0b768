#include "shards/read_together.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <utility>

namespace spamm::shards {

using at::Tensor;

ReadTogether::ReadTogether(std::vector<Tensor> tensors) : tensors_(std::move(tensors)) {
  std::vector<Tensor> bytes;
  for (const Tensor& x : tensors_) bytes.push_back(x.contiguous().view({-1}).view(at::kByte));
  if (bytes.empty()) return;
  const Tensor together = at::cat(bytes);
  const bool pins = !together.is_cpu();  // else the copy would wait for the device
  bytes_ = at::empty(together.sizes(), together.options().device(at::kCPU).pinned_memory(pins));
  bytes_.copy_(together, /*non_blocking=*/true);
  copied_ = Lane::current(together.device()).mark();
}

std::vector<Tensor> ReadTogether::wait() {
  wait_on_host(copied_);
  std::vector<Tensor> result;
  int64_t first = 0;
  for (const Tensor& x : tensors_) {
    const int64_t count = x.numel() * x.element_size();
    result.push_back(bytes_.narrow(0, first, count).view(x.scalar_type()).view(x.sizes()));
    first += count;
  }
  return result;
}

}  // namespace spamm::shards
