// Norm maps of matrices in host memory.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <deque>

#include "block.h"
#include "checks.h"
#include "shards/host_reader.h"
#include "shards/transfers.h"
#include "spamm/spamm.h"

namespace spamm::shards {
namespace {

using at::Tensor;

// The norms of some rows, on one device. While the norms of one piece of the rows are computed, the
// next ones come.
class Norms {
 public:
  Norms(const HostMatrix& x, std::array<int64_t, 2> block, at::Device device, int64_t first,
        int64_t last, int64_t piece_bytes, int64_t ring_bytes)
      : x_(x),
        block_(block),
        first_(first),
        rows_(last - first),
        compute_(Lane::current(device)),
        reader_(device, ring_bytes) {
    const int64_t columns = x.rows.size(1), row_bytes = columns * x.rows.element_size();
    const int64_t edges = piece_bytes / std::max<int64_t>(1, row_bytes * block[0]);
    piece_rows_ = std::min(rows_, std::max<int64_t>(1, edges) * block[0]);
    const auto on_device = compute_.use();
    naming_memory(device, kBuffers * piece_rows_ * row_bytes, [&] {
      const auto options = at::TensorOptions(device).dtype(x.rows.scalar_type());
      for (Tensor& buffer : buffers_) buffer = at::empty({piece_rows_, columns}, options);
    });
    reader_.lane().wait_for(compute_);
  }
  ~Norms() {
    reader_.stop();
    try {
      reader_.lane().wait_on_host();
      compute_.wait_on_host();
    } catch (const c10::Error&) {
      // The device has failed, and the error that says so is on its way.
    }
  }
  Norms(const Norms&) = delete;

  int64_t pieces() const { return rows_ == 0 ? 0 : blocks_of(rows_, piece_rows_); }

  void read(int64_t piece) {
    if (piece >= pieces()) return;
    const int slot = static_cast<int>(piece % kBuffers);
    reading_[slot] =
        reader_.read(buffer_of(piece), x_, first_ + piece * piece_rows_, 0, {&computed_[slot]});
  }

  void compute(int64_t piece) {
    if (piece >= pieces()) return;
    const int slot = static_cast<int>(piece % kBuffers);
    compute_.wait_for(reading_[slot].get());
    const auto on_lane = compute_.use();
    maps_.push_back(norm_map(buffer_of(piece), block_));
    computed_[slot] = compute_.mark();
  }

  // The norms of all rows, on the device's current stream.
  Tensor map() const {
    const auto on_device = compute_.use();
    if (!maps_.empty()) return at::cat(maps_);
    return at::empty({0, blocks_of(x_.rows.size(1), block_[1])},
                     buffers_[0].options().dtype(norm_dtype(x_.rows.scalar_type())));
  }

  Mark computed() const { return compute_.mark(); }

  static constexpr int kBuffers = 3;

 private:
  Tensor buffer_of(int64_t piece) const {
    return buffers_[piece % kBuffers].narrow(0, 0,
                                             std::min(piece_rows_, rows_ - piece * piece_rows_));
  }

  const HostMatrix& x_;
  std::array<int64_t, 2> block_;
  int64_t first_, rows_, piece_rows_;
  Lane compute_;  // the current stream
  std::array<Tensor, kBuffers> buffers_;
  std::array<std::future<Mark>, kBuffers> reading_;
  std::array<Mark, kBuffers> computed_;  // when each buffer may be overwritten
  std::vector<Tensor> maps_;
  HostReader reader_;
};

}  // namespace

Tensor norm_map_from_host(const HostMatrix& x, std::array<int64_t, 2> block,
                          const std::vector<at::Device>& devices, int64_t piece_bytes,
                          int64_t ring_bytes) {
  const auto parts = static_cast<int64_t>(devices.size());
  const int64_t rows = x.rows.size(0), blocks = blocks_of(rows, block[0]);
  const auto row_of = [&](int64_t part) {
    return std::min(rows, blocks * part / parts * block[0]);
  };
  std::deque<Norms> norms;
  int64_t pieces = 0;
  for (int64_t p = 0; p < parts; ++p) {
    norms.emplace_back(x, block, devices[p], row_of(p), row_of(p + 1), piece_bytes, ring_bytes);
    pieces = std::max(pieces, norms.back().pieces());
  }
  for (int64_t piece = 0; piece < Norms::kBuffers; ++piece) {
    for (Norms& part : norms) part.read(piece);
  }
  for (int64_t piece = 0; piece < pieces; ++piece) {
    for (Norms& part : norms) part.compute(piece);
    for (Norms& part : norms) part.read(piece + Norms::kBuffers);
  }
  std::vector<Tensor> maps;
  std::vector<Mark> ready;
  for (const Norms& part : norms) {
    maps.push_back(part.map());
    ready.push_back(part.computed());
  }
  const auto on_first = Lane::current(devices[0]).use();
  return gather_rows(maps, ready, devices[0]);
}

}  // namespace spamm::shards
