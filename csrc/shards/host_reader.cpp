#include "shards/host_reader.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

namespace spamm::shards {
namespace {

constexpr int64_t kBytesPerTask = 1 << 20;  // with fewer, another thread does not pay

// Copies rows from host memory to host memory. One core is slower than the link to a device.
void fill(const RowBlock& block) {
  const RowCopy& host = *Backends<RowCopy>::find(at::kCPU);
  const int64_t grain = std::max<int64_t>(1, kBytesPerTask / block.width);
  at::parallel_for(0, block.rows, grain, [&](int64_t first, int64_t last) {
    const RowBlock rows = rows_of(block, first, last - first);
    host.copy(at::kCPU, at::kCPU, {&rows, 1});
  });
}

}  // namespace

HostReader::HostReader(at::Device device, int64_t ring_bytes)
    : lane_(Lane::side(device, kReadLane)) {
  if (ring_bytes == 0) return;
  const auto options = at::TensorOptions(at::kByte).pinned_memory(!device.is_cpu());
  for (Piece& piece : ring_) piece.bytes = at::empty({ring_bytes}, options);
  thread_ = std::thread([this] { run_tasks(); });
}

void HostReader::stop() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

std::future<Mark> HostReader::read(const at::Tensor& to, const HostMatrix& from, int64_t row,
                                   int64_t column, std::vector<const Mark*> after) {
  const RowBlock block = block_between(to, 0, 0, from.rows, row, column, to.size(0), to.size(1));
  std::packaged_task<Mark()> task(
      [this, block, is_pinned = from.is_pinned, after = std::move(after)] {
        return copy(block, is_pinned, after);
      });
  std::future<Mark> result = task.get_future();
  if (!thread_.joinable()) {
    task();
    return result;
  }
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
  return result;
}

void HostReader::run_tasks() {
  while (true) {
    std::packaged_task<Mark()> task;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stops_ || !tasks_.empty(); });
      if (stops_) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

Mark HostReader::copy(const RowBlock& block, bool is_pinned,
                      const std::vector<const Mark*>& after) {
  for (const Mark* mark : after) lane_.wait_for(*mark);
  if (block.rows > 0 && block.width > 0) {
    if (is_pinned)
      copy_blocks(lane_, lane_.device(), at::kCPU, {&block, 1});
    else
      copy_through_ring(block);
  }
  return lane_.mark();
}

void HostReader::copy_through_ring(const RowBlock& block) {
  const int64_t rows_at_once = ring_[0].bytes.numel() / block.width;
  TORCH_CHECK(rows_at_once > 0, "a piece of pinned memory must hold a row of ", block.width,
              " bytes; got ", ring_[0].bytes.numel());
  for (int64_t row = 0; row < block.rows; row += rows_at_once) {
    RowBlock in = rows_of(block, row, std::min(rows_at_once, block.rows - row)), out = in;
    Piece& piece = ring_[turn_++ % ring_.size()];
    wait_on_host(piece.copied);
    in.to = piece.bytes.mutable_data_ptr(), in.to_stride = in.width;
    fill(in);
    out.from = in.to, out.from_stride = in.width;
    copy_blocks(lane_, lane_.device(), at::kCPU, {&out, 1});
    piece.copied = lane_.mark();
  }
}

}  // namespace spamm::shards
