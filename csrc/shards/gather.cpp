#include "shards/gather.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "shards/lane.h"
#include "shards/row_copy.h"

namespace spamm::shards {

at::Tensor gather_rows(at::TensorList pieces, std::span<const Mark> ready, at::Device device) {
  const Lane lane = Lane::current(device);
  for (const Mark& mark : ready) lane.wait_for(mark);
  const bool in_place = std::all_of(pieces.begin(), pieces.end(),
                                    [&](const at::Tensor& x) { return x.device() == device; });
  if (in_place) return at::cat(pieces);
  int64_t rows = 0;
  for (const at::Tensor& piece : pieces) rows += piece.size(0);
  const at::Tensor whole = at::empty({rows, pieces[0].size(1)}, pieces[0].options().device(device));
  int64_t row = 0;
  for (const at::Tensor& piece : pieces) {
    copy_rows(lane, whole.narrow(0, row, piece.size(0)), piece);
    row += piece.size(0);
  }
  const Mark copied = lane.mark();
  for (const at::Tensor& piece : pieces) {
    if (piece.device() != device) Lane::current(piece.device()).wait_for(copied);
  }
  return whole;
}

}  // namespace spamm::shards
