#include "shards/gather.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "shards/lane.h"
#include "shards/row_copy.h"

namespace spamm::shards {

at::Tensor gather_rows(at::TensorList pieces, std::span<const Mark> ready, at::Device device) {
  const Lane current = Lane::current(device);
  const bool in_place = std::all_of(pieces.begin(), pieces.end(),
                                    [&](const at::Tensor& x) { return x.device() == device; });
  if (in_place) {
    for (const Mark& mark : ready) current.wait_for(mark);
    return at::cat(pieces);
  }
  int64_t rows = 0;
  for (const at::Tensor& piece : pieces) rows += piece.size(0);
  const at::Tensor whole = at::empty({rows, pieces[0].size(1)}, pieces[0].options().device(device));
  // Not on the current stream: CUDA's default stream waits for both devices before such a copy.
  const Lane lane = Lane::side(device, kPullLane);
  lane.wait_for(current);
  for (const Mark& mark : ready) lane.wait_for(mark);
  int64_t row = 0;
  for (const at::Tensor& piece : pieces) {
    copy_rows(lane, whole.narrow(0, row, piece.size(0)), piece);
    row += piece.size(0);
  }
  const Mark copied = lane.mark();
  current.wait_for(copied);
  for (const at::Tensor& piece : pieces) {
    if (piece.device() != device) Lane::current(piece.device()).wait_for(copied);
  }
  return whole;
}

}  // namespace spamm::shards
