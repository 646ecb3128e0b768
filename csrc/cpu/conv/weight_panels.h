// The weight of a convolution, packed for the microkernel. A panel holds some output channels as
// [kernel position][input channel][output channel], in VNNI layout for matrix instructions.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "conv/shape.h"
#include "cpu/common/machine.h"
#include "cpu/multiply/microkernel.h"
#include "cpu/multiply/panels.h"

namespace spamm::cpu {

// Tells whether all elements are finite.
template <class P>
SPAMM_CPU_CLONES static bool all_finite(const P* first, int64_t count) {
  int64_t others = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto x = widen(first[i]);
    others += !(x - x == 0);
  }
  return others == 0;
}

struct PanelPlace {
  int64_t group, panel, kernel_position;
};

// Some rows of it.
template <class P>
struct PanelRows {
  const P* first;
  bool finite;  // then padding times these rows is zero; else it may be NaN
};

// T: type of the weight. P: type of the panels.
template <class T, class P>
class WeightPanels {
 public:
  // `depth`: input channels of a group in the panels. Those beyond the group's own are zero.
  WeightPanels(const at::Tensor& weight, const ConvShape& shape, int64_t width, int64_t depth)
      : weight_(weight.const_data_ptr<T>()),
        strides_(weight.strides()),
        shape_(shape),
        width_(width),
        depth_(depth),
        panels_(blocks_of(shape.group_out_channels(), width)) {}

  int64_t width() const { return width_; }
  int64_t depth() const { return depth_; }

  // Packs everything ahead. Pays unless each panel is used once.
  void pack_all() {
    const int64_t positions = shape_.kernel_positions();
    const int64_t count = shape_.groups * panels_ * positions;
    packed_ = with_large_pages(
        at::empty({count * depth_ * width_ * static_cast<int64_t>(sizeof(P))}, at::kByte));
    finite_.resize(count);
    P* const first = static_cast<P*>(packed_.mutable_data_ptr());
    at::parallel_for(0, count, 1, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        const PanelPlace place{i / positions / panels_, i / positions % panels_, i % positions};
        finite_[i] = pack(place, 0, depth_, first + i * depth_ * width_);
      }
    });
  }

  bool is_packed() const { return packed_.defined(); }

  // The rows from input channel `channel` on, of panels that are packed ahead.
  PanelRows<P> rows(const PanelPlace& place, int64_t channel) const {
    const int64_t i =
        (place.group * panels_ + place.panel) * shape_.kernel_positions() + place.kernel_position;
    return {static_cast<const P*>(packed_.const_data_ptr()) + (i * depth_ + channel) * width_,
            static_cast<bool>(finite_[i])};
  }

  // Packs `channels` input channels from `channel` on, which is even for matrix instructions, into
  // as many rows. Returns whether they are finite.
  bool pack(const PanelPlace& place, int64_t channel, int64_t channels, P* target) const {
    const auto [group, panel, kernel_position] = place;
    const View<T> whole{weight_ +
                            (group * shape_.group_out_channels() + panel * width_) * strides_[0] +
                            kernel_position / shape_.kernel.width * strides_[2] +
                            kernel_position % shape_.kernel.width * strides_[3],
                        strides_[1], strides_[0], shape_.group_in_channels(),
                        std::min(width_, shape_.group_out_channels() - panel * width_)};
    const View<T> block = whole.block(channel, 0, channels, whole.columns);
    if constexpr (Microkernel<P>::kVnni) {
      copy_vnni(block, target, width_);
    } else {
      copy_rows(block, target, width_, width_);
    }
    return all_finite(target, channels * width_);
  }

 private:
  const T* weight_;
  at::IntArrayRef strides_;
  const ConvShape& shape_;
  int64_t width_, depth_, panels_;
  at::Tensor packed_;
  std::vector<char> finite_;  // for each panel and kernel position
};

// A thread's packed panels at one kernel position, packed when they are first needed. Its memory is
// small enough to stay in cache.
template <class T, class P>
class PanelsOnDemand {
 public:
  // `count` neighbouring panels; `block`: input channels that are packed at a time.
  PanelsOnDemand(const WeightPanels<T, P>& panels, int64_t count, int64_t block)
      : panels_(panels),
        block_(block),
        blocks_(blocks_of(panels.depth(), block)),
        buffer_(
            at::empty({count * panels.depth() * panels.width() * static_cast<int64_t>(sizeof(P))},
                      at::kByte)),
        first_(static_cast<P*>(buffer_.mutable_data_ptr())),
        states_(count * blocks_) {}

  void forget() { std::fill(states_.begin(), states_.end(), State::kMissing); }

  // `blocks` blocks of rows from block `first` on, of the panel at `place`, which is number `i`
  // here.
  PanelRows<P> rows(const PanelPlace& place, int64_t i, int64_t first, int64_t blocks) {
    P* const target = first_ + i * panels_.depth() * panels_.width();
    bool finite = true;
    for (int64_t b = first; b < first + blocks; ++b) {
      State& state = states_[i * blocks_ + b];
      if (state == State::kMissing) {
        const int64_t channel = b * block_;
        const int64_t channels = std::min(block_, panels_.depth() - channel);
        state = panels_.pack(place, channel, channels, target + channel * panels_.width())
                    ? State::kFinite
                    : State::kNotFinite;
      }
      finite &= state == State::kFinite;
    }
    return {target + first * block_ * panels_.width(), finite};
  }

 private:
  enum class State : char { kMissing, kFinite, kNotFinite };

  const WeightPanels<T, P>& panels_;
  int64_t block_, blocks_;
  at::Tensor buffer_;
  P* first_;
  std::vector<State> states_;
};

}  // namespace spamm::cpu
