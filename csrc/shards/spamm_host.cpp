// Operands in host memory stream through the devices. The link between host and device decides the
// time: each byte crosses it once, and devices pass on to each other what they have read.
#include <c10/util/ScopeExit.h>

#include <array>
#include <deque>

#include "checks.h"
#include "shards/part.h"
#include "shards/plan.h"
#include "shards/spamm_devices.h"
#include "spamm/spamm.h"
#include "threshold.h"

namespace spamm::shards {
namespace {

constexpr int64_t kLeastRowBytes = 8192;  // shorter rows cross the link slower

// State that all parts share.
struct HostProduct {
  WholeProduct whole;
  // Operands and result are in host memory, and rows contiguous. Absent maps are computed. An
  // absent tau is searched for, and then on the CPU.
  ProductArguments given;
  int64_t parts;
  int64_t piece_entries;  // of pinned memory; 0 if the operands are pinned
};

// One device's part. It works on one panel after the other: some rows of A, which stay while all
// stages of B pass. It reads only its rows of a stage from the host and pulls the others from the
// other parts. Each call enqueues, and lanes wait for marks of those before.
class HostPart : public Part {
 public:
  HostPart(const HostProduct& product, at::Device device, int64_t number)
      : Part(product.whole, device, kReadLane), product_(product), number_(number) {}

  // Bytes of all buffers, for panels of at most so many rows.
  int64_t bytes(int64_t rows) const {
    return buffer_bytes() +
           rows * (aligned(whole_.k) + 2 * aligned(whole_.columns(0))) * whole_.entry_bytes;
  }
  void take_memory(int64_t rows) {
    const auto on_device = own().use();
    const auto options = product_.given.a.options();
    const auto empty = [&](int64_t columns) {
      return at::empty({rows, aligned(columns)}, options.device(device())).narrow(1, 0, columns);
    };
    a_ = empty(whole_.k);
    for (Tensor& c : c_) c = empty(whole_.columns(0));
    take_buffers(options);
    for (Tensor& piece : pieces_)
      piece = at::empty({product_.piece_entries}, options.pinned_memory(!device().is_cpu()));
    start();
  }

  void read_panel(int64_t row, int64_t rows) {
    row_ = row;
    side(kReadLane).wait_for(own());
    side(kReadLane).wait_for(side(kMultiplyLane));
    rows_.a = a_.narrow(0, 0, rows);
    read(rows_.a, product_.given.a.narrow(0, row, rows));
  }
  // The norms of the rows that have been read.
  Tensor norms_of_panel() const {
    const auto on_lane = own().use();
    own().wait_for(side(kReadLane));
    return norm_map(rows_.a, {whole_.block.m, whole_.block.k});
  }
  // Once all maps are known that are not computed where they are needed.
  void take_maps() {
    const auto on_lane = own().use();
    tau_ = *product_.given.knob.tau;
    if (product_.given.norm_a) norm_a_ = product_.given.norm_a->to(device());
    if (product_.given.norm_b) take_norms(product_.given.norm_b->to(device()));
  }
  void start_panel() {
    const int64_t rows = rows_.a.size(0), m = whole_.block.m;
    own().wait_for(side(kReadLane));
    if (rows == 0) return;
    rows_.norm_a =
        norm_a_.defined() ? norm_a_.narrow(0, row_ / m, blocks_of(rows, m)) : norms_of_panel();
    rows_.c = {c_[0].narrow(0, 0, rows), c_[1].narrow(0, 0, rows)};
    rows_.to = product_.given.out.narrow(0, row_, rows);
    side(kMultiplyLane).wait_for(own());
  }

  // In each turn, one stage of one panel, every part calls read_stage before another reads from it.
  void read_stage(int64_t turn, int64_t stage, const std::deque<HostPart>& parts) {
    side(kReadLane).wait_for(multiplied_[slot(turn)]);
    for (const HostPart& part : parts) {
      if (&part != this) side(kReadLane).wait_for(part.pulled_[slot(turn)]);
    }
    const Tensor to = buffer(turn, stage);
    read(own_rows(to),
         own_rows(product_.given.b.narrow(1, whole_.first_column(stage), to.size(1))));
    read_[slot(turn)] = side(kReadLane).mark();
  }
  // The norms of the stage's rows that have been read.
  Tensor norms_of_stage(int64_t turn, int64_t stage) {
    const auto on_lane = own().use();
    own().wait_for(read_[slot(turn)]);
    const Tensor norms = norm_map(own_rows(buffer(turn, stage)), {whole_.block.k, whole_.block.n});
    multiplied_[slot(turn)] = own().mark();
    return norms;
  }
  void pull_and_multiply(int64_t turn, int64_t stage, const std::deque<HostPart>& parts) {
    if (rows_.a.size(0) == 0) return;
    const Lane& lane = side(kPullLane);
    lane.wait_for(multiplied_[slot(turn)]);
    // From the next part first, so that not all parts read from one device.
    for (size_t i = 1; i < parts.size(); ++i) {
      const HostPart& part = parts[(number_ + i) % parts.size()];
      lane.wait_for(part.read_[slot(turn)]);
      copy_rows(lane, part.own_rows(buffer(turn, stage)), part.own_rows(part.buffer(turn, stage)));
    }
    pulled_[slot(turn)] = lane.mark();
    lane.wait_for(read_[slot(turn)]);
    multiply(turn, stage);
  }

 private:
  // Memory that is not pinned goes through two pieces of pinned memory: the host, which would wait
  // for a copy of it to a device, fills one while the device copies the other.
  void read(const Tensor& to, const Tensor& from) {
    if (product_.piece_entries == 0 || from.is_pinned() || from.numel() == 0)
      return copy_rows(side(kReadLane), to, from);
    const int64_t at_once = product_.piece_entries / from.size(1);
    for (int64_t first = 0; first < from.size(0); first += at_once, ++filled_) {
      const Tensor next = from.slice(0, first, first + at_once);
      Mark& copied = copied_[filled_ % pieces_.size()];
      wait_on_host(copied);
      const Tensor& entries = pieces_[filled_ % pieces_.size()];
      const Tensor piece = entries.narrow(0, 0, next.numel()).view(next.sizes());
      piece.copy_(next);  // with all cores: one is slower than the link
      copy_rows(side(kReadLane), to.slice(0, first, first + at_once), piece);
      copied = side(kReadLane).mark();
    }
  }

  // The rows of B, or of a stage of it, that the part reads.
  Tensor own_rows(const Tensor& b) const {
    const auto first_row = [&](int64_t number) {
      return equal_cut(whole_.k, kCutRows, number, product_.parts);
    };
    return b.slice(0, first_row(number_), first_row(number_ + 1));
  }

  const HostProduct& product_;
  int64_t number_, row_ = 0;  // the panel's first row
  std::array<Tensor, 2> c_;
  Tensor a_, norm_a_;                         // for a panel, but norm_a_ of all rows
  std::array<Mark, kBuffers> read_, pulled_;  // of the stage in each buffer
  std::array<Tensor, 2> pieces_;              // of pinned memory
  std::array<Mark, 2> copied_;                // when each may be filled again
  size_t filled_ = 0;                         // pieces so far
};

// Computes the product in so many panels: equal shares of the rows of C, one for each part in each
// panel. A search reads the operands for their norms before; rows of A stay if there is one panel.
void run(HostProduct& product, const std::vector<at::Device>& devices, int64_t panels) {
  const int64_t count = product.parts, pieces = panels * count, m = product.whole.m;
  const auto first_row = [&](int64_t piece) { return equal_cut(m, kCutRows, piece, pieces); };
  const int64_t most_rows = std::min(m, blocks_of(blocks_of(m, kCutRows), pieces) * kCutRows);
  std::deque<HostPart> parts;
  // Ends the use of all memory, the host's and the devices', before any of it is released.
  const auto finish = c10::make_scope_exit([&] {
    for (const HostPart& part : parts) quietly([&] { part.finish(); });
  });
  for (int64_t p = 0; p < count; ++p) parts.emplace_back(product, devices[p], p);
  const auto each = [&](const auto& work) {
    for (HostPart& part : parts) {
      naming_memory([&] { work(part); }, "a product of operands in host memory needs at least ",
                    part.bytes(most_rows), " bytes on ", part.device());
    }
  };
  each([&](HostPart& part) { part.take_memory(most_rows); });
  // The host copies, where it does, for all devices at once.
  const auto read = [&](const auto& part) {
    if (product.piece_entries > 0) return for_each_part(count, devices, part);
    for (int64_t p = 0; p < count; ++p) part(p);
  };
  int64_t turn = 0, in_place = -1;  // the panel whose rows the parts have
  const auto read_panel = [&](int64_t panel) {
    if (std::exchange(in_place, panel) == panel) return;
    read([&](int64_t p) {
      const int64_t piece = panel * count + p, row = first_row(piece);
      parts[p].read_panel(row, first_row(piece + 1) - row);
    });
  };
  // Calls work(stage) for each, when all parts have read their rows of it.
  const auto for_each_stage = [&](const auto& work) {
    for (int64_t stage = 0; stage < product.whole.stages(); ++stage, ++turn) {
      read([&](int64_t p) { parts[p].read_stage(turn, stage, parts); });
      work(stage);
    }
  };
  const auto gathered = [&](const std::vector<Tensor>& maps) {
    std::vector<Mark> ready;
    ready.reserve(parts.size());
    for (const HostPart& part : parts) ready.push_back(part.own().mark());
    return gather_rows(maps, ready, devices[0]);
  };
  OptTensor &norm_a = product.given.norm_a, &norm_b = product.given.norm_b;
  Knob& knob = product.given.knob;
  if (!knob.tau) {
    std::vector<Tensor> maps;
    for (int64_t panel = 0; !norm_a && panel < panels; ++panel) {
      read_panel(panel);
      each([&](HostPart& part) { maps.push_back(part.norms_of_panel()); });
    }
    if (!norm_a) norm_a = gathered(std::exchange(maps, {}));
    if (!norm_b) {
      std::vector<Tensor> stages;
      for_each_stage([&](int64_t stage) {
        each([&](HostPart& part) { maps.push_back(part.norms_of_stage(turn, stage)); });
        stages.push_back(gathered(std::exchange(maps, {})));
      });
      norm_b = at::cat(stages, 1);
    }
    const auto on_first = Lane::current(devices[0]).use();
    knob.tau = threshold_from_knob(norm_a->to(devices[0]), norm_b->to(devices[0]), knob).cpu();
  }
  each([](HostPart& part) { part.take_maps(); });
  for (int64_t panel = 0; panel < panels; ++panel) {
    read_panel(panel);
    each([](HostPart& part) { part.start_panel(); });
    for_each_stage([&](int64_t stage) {
      each([&](HostPart& part) { part.pull_and_multiply(turn, stage, parts); });
    });
  }
  for (const HostPart& part : parts) part.finish();  // throws where `finish` does not
}

}  // namespace

Tensor spamm_from_host(ProductArguments given, const std::vector<at::Device>& devices,
                       const HostSizes& sizes) {
  for (const at::Device device : devices) refuse_capture(device);
  const Tensor a = given.a = with_contiguous_rows(given.a);
  const Tensor b = given.b = with_contiguous_rows(given.b);
  const Tensor c = given.out =
      at::empty({a.size(0), b.size(1)}, a.options().pinned_memory(!devices[0].is_cpu()));
  if (c.numel() == 0) return c;
  WholeProduct whole(a, a.size(0), b, check_block(given.block));
  const int64_t least_blocks = blocks_of(kLeastRowBytes, whole.entry_bytes * whole.block.n);
  whole.stage_blocks = sizes.stage_blocks.value_or(std::max(least_blocks, whole.stage_blocks));
  const bool is_pinned = sizes.piece_bytes == 0 || (a.is_pinned() && b.is_pinned());
  const int64_t piece = std::max({sizes.piece_bytes / whole.entry_bytes, whole.k, whole.n});
  HostProduct product = {whole, std::move(given), std::ssize(devices), is_pinned ? 0 : piece};
  for (int64_t panels = sizes.panels;; panels *= 2) {
    try {
      run(product, devices, panels);
      return c;
    } catch (const c10::OutOfMemoryError&) {
      if (panels * product.parts * kCutRows >= whole.m) throw;
    }
  }
}

}  // namespace spamm::shards
