// Copies from host memory to a device, and norm maps of matrices there.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "shards/lane.h"
#include "shards/row_copy.h"

namespace spamm::shards {

// A matrix in host memory. Its rows are contiguous.
struct HostMatrix {
  at::Tensor rows;
  bool is_pinned;  // else a copy of it to a device would make the host wait
};

// The copies of one device from host memory, in the order in which they are asked for.
//
// Memory that is not pinned goes through a ring of two pieces of pinned memory, which a thread of
// the reader fills while the device copies. Without such memory there is no ring and no thread.
class HostReader {
 public:
  // ring_bytes: of a piece of pinned memory; 0 for no ring. Holds at least one row of each copy.
  HostReader(at::Device device, int64_t ring_bytes);
  // Drops the copies that have not begun and ends the thread. Copies that are enqueued go on: the
  // lane must be waited for before the ring and the host memory may be used again.
  ~HostReader() { stop(); }
  HostReader(const HostReader&) = delete;

  const Lane& lane() const { return lane_; }

  // Copies rows and columns of `from`, from this row and column on, to the whole of `to`. The copy
  // begins on the device after the marks, which must live until the result is there. The result is
  // the mark after the copy, or the error. It is there once the copy is enqueued.
  std::future<Mark> read(const at::Tensor& to, const HostMatrix& from, int64_t row, int64_t column,
                         std::vector<const Mark*> after);
  void stop();

 private:
  struct Piece {
    at::Tensor bytes;
    Mark copied;  // when it may be filled again
  };

  void run_tasks();
  Mark copy(const RowBlock& block, bool is_pinned, const std::vector<const Mark*>& after);
  void copy_through_ring(const RowBlock& block);

  Lane lane_;
  std::array<Piece, 2> ring_;
  int turn_ = 0;  // pieces filled so far

  std::mutex mutex_;  // of the members below
  std::condition_variable changed_;
  std::deque<std::packaged_task<Mark()>> tasks_;
  bool stops_ = false;
  std::thread thread_;  // the last member, because it uses the others
};

// The norm map of `x` in blocks of this many rows and columns, on the first device, with the bits
// of norm_map there. Each device reads an equal share of the rows, in pieces of about
// `piece_bytes`. Waits for the devices.
at::Tensor norm_map_from_host(const HostMatrix& x, std::array<int64_t, 2> block,
                              const std::vector<at::Device>& devices, int64_t piece_bytes,
                              int64_t ring_bytes);

// Runs `work`, which takes memory of `device`, for buffers of so many bytes and what kernels need
// beside them. An OutOfMemoryError then names both.
template <class Work>
void naming_memory(at::Device device, int64_t bytes, const Work& work) {
  bool failed = false;
  try {
    work();
  } catch (const c10::OutOfMemoryError&) {
    failed = true;
  }
  TORCH_CHECK_WITH(OutOfMemoryError, !failed,
                   "a product of operands in host memory needs at least ", bytes, " bytes on ",
                   device);
}

}  // namespace spamm::shards
