// Copies of rows between devices, to be registered by backends.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "backends.h"
#include "shards/lane.h"

namespace spamm::shards {

struct RowCopy {
  // Copies a matrix to one of the same shape and type. Each row of both is contiguous. Either may
  // lie on any device or on the CPU. Runs on the current stream of the current device.
  void (*copy)(const at::Tensor& to, const at::Tensor& from);
  // Whether the current stream is being captured into a graph.
  bool (*is_capturing)();

  bool supports() const { return true; }
};

// The matrix itself if its rows are contiguous, else a copy.
inline at::Tensor with_contiguous_rows(const at::Tensor& x) {
  return x.size(1) <= 1 || x.stride(1) == 1 ? x : x.contiguous();
}

inline void refuse_capture(at::Device device) {
  const RowCopy* const copies = Backends<RowCopy>::find(device.type());
  const auto on_lane = Lane::current(device).use();
  TORCH_CHECK(copies == nullptr || !copies->is_capturing(),
              "a product over several devices cannot be captured in a graph, because its plan is "
              "read on the host; got a stream of ",
              device, " that is being captured");
}

// Copies on `lane`, whose device is that of `to` or of `from`.
inline void copy_rows(const Lane& lane, const at::Tensor& to, const at::Tensor& from) {
  if (to.numel() == 0) return;
  if (lane.device().is_cpu()) {
    to.copy_(from);
    return;
  }
  const auto on_lane = lane.use();
  Backends<RowCopy>::find(lane.device().type())->copy(to, from);
}

}  // namespace spamm::shards
