// Operands in host memory stream through the devices. The link between host and device decides the
// time: each byte crosses it once, and devices pass on to each other what they have read.
#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <deque>
#include <vector>

#include "checks.h"
#include "shards/for_each_part.h"
#include "shards/part.h"
#include "shards/plan.h"
#include "shards/spamm_devices.h"
#include "spamm/spamm.h"
#include "threshold.h"

namespace spamm::shards {
namespace {

constexpr int kBuffers = 3;                 // of stages of B, and of pieces for norms
constexpr int64_t kLeastRowBytes = 8192;    // shorter rows cross the link slower
constexpr int64_t kBytesPerTask = 1 << 20;  // with fewer, another thread does not pay

// A matrix in host memory. Its rows are contiguous.
struct HostMatrix {
  HostMatrix(const Tensor& x, const HostSizes& sizes)
      : rows(with_contiguous_rows(x)), is_pinned(sizes.is_pinned.value_or(rows.is_pinned())) {}

  int64_t row_bytes() const { return rows.size(1) * rows.element_size(); }

  Tensor rows;
  bool is_pinned;  // else a copy of it to a device would make the host wait
};

// The copies of one device from host memory. Memory that is not pinned goes through a ring of two
// pieces of pinned memory: the host fills one while the device copies the other.
class HostReader {
 public:
  // ring_bytes: of a piece of pinned memory, at least a row; 0 for no ring.
  HostReader(at::Device device, int64_t ring_bytes) : lane_(Lane::side(device, kReadLane)) {
    if (ring_bytes == 0) return;
    const auto options = at::TensorOptions(at::kByte).pinned_memory(!device.is_cpu());
    for (Piece& piece : ring_) piece.bytes = at::empty({ring_bytes}, options);
  }

  const Lane& lane() const { return lane_; }

  // Copies rows and columns of `from`, from this row and column on, to the whole of `to`.
  Mark read(const Tensor& to, const HostMatrix& from, int64_t row, int64_t column) {
    const RowBlock block = block_between(to, 0, 0, from.rows, row, column, to.size(0), to.size(1));
    if (block.rows > 0 && block.width > 0) {
      if (from.is_pinned)
        copy_blocks(lane_, lane_.device(), at::kCPU, {&block, 1});
      else
        copy_through_ring(block);
    }
    return lane_.mark();
  }

 private:
  struct Piece {
    Tensor bytes;
    Mark copied;  // when it may be filled again
  };

  void copy_through_ring(const RowBlock& block) {
    const int64_t rows_at_once = ring_[0].bytes.numel() / block.width;
    TORCH_INTERNAL_ASSERT(rows_at_once > 0);
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

  // Copies rows from host memory to host memory. One core is slower than the link to a device.
  static void fill(const RowBlock& block) {
    const int64_t grain = std::max<int64_t>(1, kBytesPerTask / block.width);
    at::parallel_for(0, block.rows, grain, [&](int64_t first, int64_t last) {
      const RowBlock rows = rows_of(block, first, last - first);
      Backends<RowCopy>::find(at::kCPU)->copy(at::kCPU, at::kCPU, {&rows, 1});
    });
  }

  Lane lane_;
  std::array<Piece, 2> ring_;
  int turn_ = 0;  // pieces filled so far
};

// Runs `work`, which takes memory for buffers of so many bytes and what kernels need beside them.
template <class Work>
void take_memory(at::Device device, int64_t bytes, const Work& work) {
  naming_memory(work, "a product of operands in host memory needs at least ", bytes, " bytes on ",
                device);
}

// Ends the use of all memory, the host's and the devices', before any of it is released.
struct Finish {
  ~Finish() {
    for (const Lane& lane : lanes) {
      try {
        lane.wait_on_host();
      } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch)
        // The device has failed, and the error that says so is on its way.
      }
    }
  }
  std::vector<Lane> lanes;
};

// ---- Norm maps ----------------------------------------------------------------------------------

// The norm map of rows [first, last) of `x`, in blocks of this many rows and columns. The rows come
// in pieces of about `piece_bytes`. Waits for the device.
Tensor norms_of_rows(const HostMatrix& x, std::array<int64_t, 2> block, at::Device device,
                     int64_t first, int64_t last, int64_t piece_bytes, int64_t ring_bytes) {
  const Lane compute = Lane::current(device);
  const auto on_device = compute.use();
  const int64_t edges = piece_bytes / std::max<int64_t>(1, x.row_bytes() * block[0]);
  const int64_t piece_rows = std::min(last - first, std::max<int64_t>(1, edges) * block[0]);
  const auto options = x.rows.options().device(device);
  std::array<Tensor, kBuffers> buffers;
  take_memory(device, kBuffers * piece_rows * x.row_bytes(), [&] {
    for (Tensor& buffer : buffers) buffer = at::empty({piece_rows, x.rows.size(1)}, options);
  });
  HostReader reader(device, ring_bytes);
  reader.lane().wait_for(compute);
  const Finish finish{{reader.lane(), compute}};
  std::array<Mark, kBuffers> computed;  // when each buffer may be overwritten
  std::vector<Tensor> maps = {norm_map(buffers[0].narrow(0, 0, 0), block)};  // there may be no rows
  for (int64_t row = first; row < last; row += piece_rows) {
    const size_t slot = maps.size() % kBuffers;
    const Tensor buffer = buffers[slot].narrow(0, 0, std::min(piece_rows, last - row));
    reader.lane().wait_for(computed[slot]);
    compute.wait_for(reader.read(buffer, x, row, 0));
    maps.push_back(norm_map(buffer, block));
    computed[slot] = compute.mark();
  }
  return at::cat(maps);
}

// The norm map of `x` on the first device, with the bits of norm_map there. Each device reads an
// equal share of the rows. Waits for the devices.
Tensor norm_map_from_host(const HostMatrix& x, std::array<int64_t, 2> block,
                          const std::vector<at::Device>& devices, int64_t piece_bytes,
                          int64_t ring_bytes) {
  const auto parts = static_cast<int64_t>(devices.size());
  const int64_t rows = x.rows.size(0), blocks = blocks_of(rows, block[0]);
  const auto row_of = [&](int64_t part) {
    return std::min(rows, blocks * part / parts * block[0]);
  };
  std::vector<Tensor> maps(parts);
  for_each_part(parts, current_streams(devices), [&](int64_t p) {
    maps[p] =
        norms_of_rows(x, block, devices[p], row_of(p), row_of(p + 1), piece_bytes, ring_bytes);
  });
  const auto on_first = Lane::current(devices[0]).use();
  return gather_rows(maps, {}, devices[0]);
}

// ---- The product --------------------------------------------------------------------------------

// What all parts share.
struct HostProduct {
  WholeProduct whole;
  HostMatrix a, b;
  Tensor c;                  // in host memory
  Tensor tau = {};           // 0-d, on the CPU
  OptTensor norm_a, norm_b;  // whole maps, on any device; computed if absent
  int64_t parts, ring_bytes;
};

// One device's part. It works on one panel after the other: some rows of A, which stay while all
// stages of B pass. It reads only its rows of a stage from the host and pulls the others from the
// other parts.
//
// A step is one stage of one panel; steps count on from panel to panel. For each step, every part
// calls read_stage, then every part pull_stage, then multiply_stage: each of them enqueues, and
// lanes wait for marks of those before.
class HostPart {
 public:
  struct Step {
    int64_t number, stage;
  };

  // most_rows: of a panel. Allocates all buffers; throws OutOfMemoryError before any copy.
  HostPart(const HostProduct& product, at::Device device, int64_t number, int64_t most_rows)
      : product_(product),
        number_(number),
        most_rows_(most_rows),
        lanes_(device, /*sends=*/true),
        reader_(device, product.ring_bytes) {
    const auto on_device = lanes_.own().use();
    const auto empty = [&](int64_t rows, int64_t columns) {
      const auto options = product.a.rows.options().device(device);
      return at::empty({rows, aligned(columns)}, options).narrow(1, 0, columns);
    };
    const WholeProduct& whole = product.whole;
    take_memory(device, buffer_bytes(), [&] {
      a_ = empty(most_rows, whole.k);
      for (Tensor& stage : stages_) stage = empty(whole.k, whole.columns(0));
      for (Tensor& c : c_) c = empty(most_rows, whole.columns(0));
      if (product.norm_a) whole_norm_a_ = product.norm_a->to(device);
      if (product.norm_b) whole_norm_b_ = product.norm_b->to(device);
    });
    lanes_.start();
    reader_.lane().wait_for(lanes_.own());
  }
  HostPart(const HostPart&) = delete;

  // Adds all lanes that this part uses.
  void add_lanes(std::vector<Lane>& lanes) const {
    lanes.push_back(reader_.lane());
    lanes.insert(lanes.end(), lanes_.all().begin(), lanes_.all().end());
  }

  // Rows of C from `row` on; may be none.
  void read_panel(int64_t row, int64_t rows) {
    row_ = row, rows_ = rows;
    // The last multiplies of both lanes are among the marks.
    for (const Mark& mark : multiplied_) reader_.lane().wait_for(mark);
    reader_.read(a_.narrow(0, 0, rows_), product_.a, row_, 0);
  }
  void end_panel() {
    lanes_.own().wait_for(reader_.lane());
    if (rows_ == 0) return;
    const auto on_lane = lanes_.own().use();
    const Block& block = product_.whole.block;
    if (whole_norm_a_.defined()) {
      norm_a_ = whole_norm_a_.narrow(0, row_ / block.m, blocks_of(rows_, block.m));
    } else {
      take_memory(device(), buffer_bytes(), [&] {
        norm_a_ = norm_map(a_.narrow(0, 0, rows_), {block.m, block.k});
      });
    }
    lanes_.multiply(1).wait_for(lanes_.own());
  }

  void read_stage(const Step& step, const std::deque<HostPart>& parts) {
    const auto slot = step.number % kBuffers;
    reader_.lane().wait_for(multiplied_[slot]);
    for (const HostPart& part : parts) {
      if (&part != this) reader_.lane().wait_for(part.pulled_[slot]);
    }
    read_[slot] = reader_.read(own_rows(stage_buffer(step)), product_.b, first_row(number_),
                               product_.whole.first_column(step.stage));
  }

  void pull_stage(const Step& step, const std::deque<HostPart>& parts) {
    if (rows_ == 0) return;
    const auto slot = step.number % kBuffers;
    const Tensor to = stage_buffer(step);
    lanes_.pull().wait_for(multiplied_[slot]);
    // From the next part first, so that not all parts read from one device.
    for (size_t i = 1; i < parts.size(); ++i) {
      const HostPart& part = parts[(number_ + i) % parts.size()];
      lanes_.pull().wait_for(part.read_[slot]);
      copy_rows(lanes_.pull(), part.own_rows(to), part.own_rows(part.stage_buffer(step)));
    }
    pulled_[slot] = lanes_.pull().mark();
  }

  void multiply_stage(const Step& step) {
    if (rows_ == 0) return;
    const auto slot = step.number % kBuffers;
    const auto turn = step.number % c_.size();
    const Lane& lane = lanes_.multiply(turn);
    const Tensor stage = stage_buffer(step);
    const Tensor c = c_[turn].narrow(0, 0, rows_).narrow(1, 0, stage.size(1));
    for (const Mark* mark : {&read_[slot], &pulled_[slot], &sent_[turn]}) lane.wait_for(*mark);
    {
      const auto on_lane = lane.use();
      take_memory(device(), buffer_bytes(), [&] {
        multiply_part(a_.narrow(0, 0, rows_), stage, norm_a_, norms_of_stage(step, stage),
                      product_.tau, product_.whole, c);
      });
    }
    multiplied_[slot] = lane.mark();
    lanes_.send().wait_for(multiplied_[slot]);
    const int64_t column = product_.whole.first_column(step.stage);
    copy_rows(lanes_.send(), product_.c.narrow(0, row_, rows_).narrow(1, column, stage.size(1)), c);
    sent_[turn] = lanes_.send().mark();
  }

 private:
  at::Device device() const { return lanes_.pull().device(); }

  int64_t buffer_bytes() const {
    const WholeProduct& whole = product_.whole;
    const int64_t columns = aligned(whole.columns(0));
    return (most_rows_ * aligned(whole.k) + kBuffers * whole.k * columns +
            2 * most_rows_ * columns) *
           product_.a.rows.element_size();
  }

  // The part reads the rows of B from first_row(number_) to first_row(number_ + 1).
  int64_t first_row(int64_t number) const {
    const int64_t edge = std::max(product_.whole.block.k, kRowAlignment);
    const int64_t edges = blocks_of(product_.whole.k, edge);
    return std::min(product_.whole.k, edges * number / product_.parts * edge);
  }
  Tensor own_rows(const Tensor& stage) const {
    return stage.narrow(0, first_row(number_), first_row(number_ + 1) - first_row(number_));
  }

  Tensor stage_buffer(const Step& step) const {
    return stages_[step.number % kBuffers].narrow(1, 0, product_.whole.columns(step.stage));
  }

  Tensor norms_of_stage(const Step& step, const Tensor& stage) const {
    const auto& [m, k, n] = product_.whole.block;
    if (!whole_norm_b_.defined()) return norm_map(stage, {k, n});
    return whole_norm_b_.narrow(1, step.stage * product_.whole.stage_blocks,
                                blocks_of(stage.size(1), n));
  }

  const HostProduct& product_;
  int64_t number_, most_rows_;
  Lanes lanes_;
  Tensor a_, norm_a_, whole_norm_a_, whole_norm_b_;
  std::array<Tensor, kBuffers> stages_;
  std::array<Tensor, 2> c_;                                // one for each lane that multiplies
  int64_t row_ = 0, rows_ = 0;                             // of the panel
  std::array<Mark, kBuffers> read_, pulled_, multiplied_;  // of the stage in each buffer
  std::array<Mark, 2> sent_;
  HostReader reader_;
};

// Panels are cut between groups of kCutRows rows.
int64_t groups_of(const WholeProduct& whole) { return blocks_of(whole.m, kCutRows); }

// Computes the product in so many panels: equal shares of the rows of C, one for each part in each
// panel.
void run(const HostProduct& product, const std::vector<at::Device>& devices, int64_t panels) {
  const auto first_row = [&](int64_t piece) {
    const int64_t group = groups_of(product.whole) * piece / (panels * product.parts);
    return std::min(product.whole.m, group * kCutRows);
  };
  int64_t most_rows = 0;
  for (int64_t piece = 0; piece < panels * product.parts; ++piece) {
    most_rows = std::max(most_rows, first_row(piece + 1) - first_row(piece));
  }
  std::deque<HostPart> parts;
  Finish finish;
  for (int64_t p = 0; p < product.parts; ++p) {
    parts.emplace_back(product, devices[p], p, most_rows).add_lanes(finish.lanes);
  }
  // Where the host copies, it does so for all devices at once.
  const auto streams = current_streams(devices);
  const auto read = [&](const auto& part) {
    if (product.ring_bytes > 0) return for_each_part(product.parts, streams, part);
    for (int64_t p = 0; p < product.parts; ++p) part(p);
  };
  for (int64_t panel = 0, number = 0; panel < panels; ++panel) {
    read([&](int64_t p) {
      const int64_t piece = panel * product.parts + p, row = first_row(piece);
      parts[p].read_panel(row, first_row(piece + 1) - row);
    });
    for (HostPart& part : parts) part.end_panel();
    for (int64_t stage = 0; stage < product.whole.stages(); ++stage) {
      const HostPart::Step step = {number++, stage};
      read([&](int64_t p) { parts[p].read_stage(step, parts); });
      for (HostPart& part : parts) part.pull_stage(step, parts);
      for (HostPart& part : parts) part.multiply_stage(step);
    }
  }
  for (const Lane& lane : finish.lanes) lane.wait_on_host();  // throws where the guard would not
}

}  // namespace

Tensor spamm_from_host(const ProductArguments& given, const std::vector<at::Device>& devices,
                       const HostSizes& sizes) {
  const Tensor &a = given.a, &b = given.b;
  const Block block = check_block(given.block);
  for (const at::Device device : devices) refuse_capture(device);
  HostProduct product = {
      .whole = {a, a.size(0), b, block},
      .a = {a, sizes},
      .b = {b, sizes},
      .c = at::empty({a.size(0), b.size(1)}, a.options().pinned_memory(!devices[0].is_cpu())),
      .norm_a = given.norm_a,
      .norm_b = given.norm_b,
      .parts = static_cast<int64_t>(devices.size()),
      .ring_bytes = 0};
  WholeProduct& whole = product.whole;
  const int64_t least_blocks = blocks_of(kLeastRowBytes, whole.entry_bytes * block.n);
  whole.stage_blocks = sizes.stage_blocks.value_or(std::max(least_blocks, whole.stage_blocks));
  if (product.c.numel() == 0) return product.c;
  if (!product.a.is_pinned || !product.b.is_pinned) {
    product.ring_bytes =
        std::max({sizes.piece_bytes, product.a.row_bytes(), product.b.row_bytes()});
  }
  if (given.knob.tau) {
    product.tau = *given.knob.tau;
  } else {
    const auto map_of = [&](const OptTensor& map, const HostMatrix& x,
                            std::array<int64_t, 2> edges) {
      return map ? map->to(devices[0])
                 : norm_map_from_host(x, edges, devices, sizes.piece_bytes, product.ring_bytes);
    };
    const auto on_first = Lane::current(devices[0]).use();
    product.norm_a = map_of(given.norm_a, product.a, {block.m, block.k});
    product.norm_b = map_of(given.norm_b, product.b, {block.k, block.n});
    product.tau = threshold_from_knob(*product.norm_a, *product.norm_b, given.knob).cpu();
  }
  for (int64_t panels = sizes.panels;; panels *= 2) {
    try {
      run(product, devices, panels);
      return product.c;
    } catch (const c10::OutOfMemoryError&) {
      if (panels * product.parts >= groups_of(whole)) throw;
    }
  }
}

}  // namespace spamm::shards
