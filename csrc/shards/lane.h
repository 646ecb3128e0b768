// Streams of several devices and copies on them, without naming the kind of device, and threads
// that enqueue work. On the CPU, which has no streams, work runs when it is enqueued, and waiting
// does nothing.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/core/thread_pool.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <latch>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "backends.h"

namespace spamm::shards {

// The numbers of a device's side lanes.
constexpr int kMultiplyLane = 0, kPullLane = 1, kSendLane = 2, kReadLane = 3;

// A point in a lane's work. The CPU has none.
using Mark = std::optional<c10::Event>;

// The host goes on once the work before the mark is done.
inline void wait_on_host(const Mark& mark) {
  if (mark) mark->synchronize();
}

// One stream of one device.
class Lane {
 public:
  // The device's current stream.
  static Lane current(at::Device device) { return Lane(guard_of(device).getStream(device)); }
  // A stream beside the current one. The same number gives the same stream, because memory is
  // cached for each stream that has used it.
  static Lane side(at::Device device, int number) {
    if (device.is_cpu()) return current(device);
    static std::mutex mutex;
    static std::map<std::pair<at::DeviceIndex, int>, c10::Stream> streams;
    const std::lock_guard lock(mutex);
    const std::pair key(device.index(), number);
    auto found = streams.find(key);
    if (found == streams.end()) {
      found = streams.emplace(key, guard_of(device).getStreamFromGlobalPool(device)).first;
    }
    return Lane(found->second);
  }

  at::Device device() const { return stream_.device(); }
  c10::Stream stream() const { return stream_; }

  // Makes this stream and its device current for the lifetime of the result.
  [[nodiscard]] c10::StreamGuard use() const { return c10::StreamGuard(stream_); }

  // After everything that has been enqueued so far.
  Mark mark() const {
    if (device().is_cpu()) return std::nullopt;
    Mark mark(std::in_place, device().type());
    mark->record(stream_);
    return mark;
  }

  // Lets what is enqueued from now on start after `mark`.
  void wait_for(const Mark& mark) const {
    if (mark && !device().is_cpu()) mark->block(stream_);
  }
  void wait_for(const Lane& other) const {
    if (other.stream_ != stream_) wait_for(other.mark());
  }

  // The host goes on once all work that has been enqueued so far is done.
  void wait_on_host() const {
    if (!device().is_cpu()) stream_.synchronize();
  }

 private:
  explicit Lane(c10::Stream stream) : stream_(stream) {}

  static c10::impl::VirtualGuardImpl guard_of(at::Device device) {
    return c10::impl::VirtualGuardImpl(device.type());
  }

  c10::Stream stream_;
};

// ---- Copies of rows -----------------------------------------------------------------------------

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

// ---- Threads ------------------------------------------------------------------------------------

// The number of CUDA devices that torch finds. Its hooks count them: on a machine without one, the
// device guard counts a device once a function has been traced.
inline int64_t cuda_devices() { return at::detail::getCUDAHooks().getNumGPUs(); }

// Threads that stay, because a thread's first call of CUDA takes milliseconds. Never destroyed:
// CUDA may be gone before them. A task waits for no other task, so that a few threads suffice.
inline c10::ThreadPool& part_threads() {
  static auto* const threads =
      new c10::ThreadPool(std::max(1, static_cast<int>(cuda_devices()) - 1));
  return *threads;
}

// Calls run(part) for each part, on a thread of its own with the caller's streams of these devices.
// To enqueue a part's work takes the host about as long as the device needs for it. The caller's
// thread takes the first part. Throws what the first failed part threw, after all have ended. `run`
// is an op's implementation: below autograd.
template <class Run>
void for_each_part(int64_t parts, const std::vector<at::Device>& devices, const Run& run) {
  std::vector<c10::Stream> streams;
  for (const at::Device device : devices) streams.push_back(Lane::current(device).stream());
  std::vector<std::exception_ptr> errors(parts);
  std::latch others(std::max<int64_t>(0, parts - 1));
  const auto run_part = [&](int64_t part) {
    try {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      const c10::MultiStreamGuard current(streams);
      at::init_num_threads();  // threads stay, and OpenMP keeps a number for each of them
      run(part);
    } catch (...) {
      errors[part] = std::current_exception();
    }
  };
  for (int64_t part = 1; part < parts; ++part) {
    part_threads().run([&, part] {
      run_part(part);
      others.count_down();
    });
  }
  if (parts > 0) run_part(0);
  others.wait();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace spamm::shards
