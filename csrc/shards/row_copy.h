// Copies of rows between devices, to be registered by backends.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <span>

#include "backends.h"
#include "shards/lane.h"

namespace spamm::shards {

// Rows of contiguous bytes. The strides are in bytes too.
struct RowBlock {
  void* to;
  const void* from;
  int64_t to_stride, from_stride, width, rows;
};

// Copies from one device for one stage, at most: what runs_of joins. Each takes the host as long
// as the link needs for megabytes, so that many small ones would leave the link idle.
constexpr size_t kMostCopies = 16;

struct RowCopy {
  // Copies blocks, all from one device to one other or the same. One of the two may be the CPU.
  // Runs on the current stream of the current device, which is a side lane if there are several
  // blocks: CUDA refuses batches of copies on its default stream.
  void (*copy)(at::Device to, at::Device from, std::span<const RowBlock> blocks);
  // Tells whether the current stream is being captured into a graph.
  bool (*is_capturing)();
};

// The matrix itself if its rows are contiguous and do not overlap, else a copy.
inline at::Tensor with_contiguous_rows(const at::Tensor& x) {
  const bool contiguous = x.size(1) <= 1 || x.stride(1) == 1;
  const bool apart = x.size(0) <= 1 || x.stride(0) >= x.size(1);
  return contiguous && apart ? x : x.contiguous();
}

// A copy of rows [row, row + rows) and columns [column, column + columns) of `from`, to the same
// place of `to`. Both have contiguous rows.
inline RowBlock block_between(const at::Tensor& to, int64_t to_row, int64_t to_column,
                              const at::Tensor& from, int64_t from_row, int64_t from_column,
                              int64_t rows, int64_t columns) {
  const int64_t size = to.element_size();
  const auto stride = [&](const at::Tensor& x) { return std::max(x.stride(0), x.size(1)) * size; };
  return {static_cast<char*>(to.mutable_data_ptr()) + to_row * stride(to) + to_column * size,
          static_cast<const char*>(from.const_data_ptr()) + from_row * stride(from) +
              from_column * size,
          stride(to),
          stride(from),
          columns * size,
          rows};
}

// Copies on `lane`, whose device is one of the two.
inline void copy_blocks(const Lane& lane, at::Device to, at::Device from,
                        std::span<const RowBlock> blocks) {
  if (blocks.empty()) return;
  const auto on_lane = lane.use();
  Backends<RowCopy>::find(lane.device().type())->copy(to, from, blocks);
}

// Copies a matrix to one of the same shape and type. The rows of both are contiguous.
inline void copy_rows(const Lane& lane, const at::Tensor& to, const at::Tensor& from) {
  if (to.numel() == 0) return;
  const RowBlock block = block_between(to, 0, 0, from, 0, 0, to.size(0), to.size(1));
  copy_blocks(lane, to.device(), from.device(), {&block, 1});
}

inline void refuse_capture(at::Device device) {
  const auto on_lane = Lane::current(device).use();
  TORCH_CHECK(!Backends<RowCopy>::find(device.type())->is_capturing(),
              "a product over several devices cannot be captured in a graph, because its plan is "
              "read on the host; got a stream of ",
              device, " that is being captured");
}

}  // namespace spamm::shards
