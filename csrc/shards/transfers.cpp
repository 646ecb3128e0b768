#include "shards/transfers.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "shards/row_copy.h"

namespace spamm::shards {

using at::Tensor;

Tensor gather_rows(at::TensorList pieces, std::span<const Mark> ready, at::Device device) {
  const Lane current = Lane::current(device);
  const bool in_place = std::all_of(pieces.begin(), pieces.end(),
                                    [&](const Tensor& x) { return x.device() == device; });
  if (in_place) {
    for (const Mark& mark : ready) current.wait_for(mark);
    return at::cat(pieces);
  }
  int64_t rows = 0;
  for (const Tensor& piece : pieces) rows += piece.size(0);
  const Tensor whole = at::empty({rows, pieces[0].size(1)}, pieces[0].options().device(device));
  // Not on the current stream: CUDA's default stream waits for both devices before such a copy.
  const Lane lane = Lane::side(device, kPullLane);
  lane.wait_for(current);
  for (const Mark& mark : ready) lane.wait_for(mark);
  int64_t row = 0;
  for (const Tensor& piece : pieces) {
    copy_rows(lane, whole.narrow(0, row, piece.size(0)), piece);
    row += piece.size(0);
  }
  const Mark copied = lane.mark();
  current.wait_for(copied);
  for (const Tensor& piece : pieces) {
    if (piece.device() != device) Lane::current(piece.device()).wait_for(copied);
  }
  return whole;
}

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
