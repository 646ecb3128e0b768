// The messages that the warps of a persistent Hopper kernel pass to each other in shared memory,
// with its barriers: lists of valid steps for the load warps, and a ring of stages for the
// warpgroups.
//
// Each kernel defines its own Tile, Step and Notice. A notice tells the warpgroups what they need
// to know about a stage besides its operands: the step's mask, and whether a tile or all work ends.
#pragma once

#include <cstdint>

#include "cutlass/arch/barrier.h"
#include "kernels/common/wgmma_sm90.cuh"

namespace spamm::kernels::sm90 {

using Barrier = cutlass::arch::ClusterTransactionBarrier;

// A position in a ring of kSlots slots that have a barrier each.
template <int kSlots>
struct RingPosition {
  int slot = 0;
  uint32_t phase = 0;

  __device__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// The wgmma descriptor of an operand block in the current stage of the ring.
template <Major kMajor, class Stage, int kStages>
class StagedDescriptor {
 public:
  __device__ explicit StagedDescriptor(const OperandBlock& in_first_stage)
      : value_(descriptor<kMajor>(in_first_stage)) {}

  __device__ uint64_t operator*() const { return value_; }
  __device__ void advance(bool to_first) {
    value_ = sm90::advance(value_, to_first ? 0u - (kStages - 1) * kStep : kStep);
  }

 private:
  static constexpr uint32_t kStep = sizeof(Stage) / kDescriptorUnit;
  uint64_t value_;
};

// Returns a stage to the load warps. Every multiplying warp arrives by itself: a warp without
// valid products runs ahead of the rest of its warpgroup, so one arrival cannot speak for four.
__device__ __forceinline__ void release(Barrier& empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) empty.arrive();
}

// kNamesTiles: every stage says which tile it belongs to, not only the last one of a tile.
template <class Tile_, class Step_, class Notice_, int kStages_, int kLists_, int kListCapacity_,
          bool kNamesTiles_ = false>
struct Ring {
  using Tile = Tile_;
  using Step = Step_;
  using Notice = Notice_;
  static constexpr int kStages = kStages_, kLists = kLists_, kListCapacity = kListCapacity_;
  static constexpr bool kNamesTiles = kNamesTiles_;

  // The valid steps of a tile, or a part of them if they do not fit.
  struct List {
    Tile tile;
    int count;
    bool ends_tile, ends_work;
    Step steps[kListCapacity];
  };

  List lists[kLists];
  Notice notices[kStages];
  Tile tiles[kStages];  // valid where the notice ends a tile, or everywhere with kNamesTiles
  alignas(8) Barrier full[kStages], empty[kStages];
  Barrier list_full[kLists], list_empty[kLists];

  // `loads`: threads that fill a stage and read a list. `releases`: arrivals that empty a stage.
  __device__ void initialize(int loads, int releases) {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(loads);
      empty[i].init(releases);
    }
    for (int i = 0; i < kLists; ++i) {
      list_full[i].init(32);  // all lanes of the warp that writes it
      list_empty[i].init(loads);
    }
  }
};

// Fills the stages; used by a thread that loads an operand. Several threads may fill the same
// stages; only the one with kAnnounces writes the notices.
template <class Ring, bool kAnnounces>
class StageWriter {
  using Notice = typename Ring::Notice;
  using Tile = typename Ring::Tile;

 public:
  __device__ explicit StageWriter(Ring& ring) : ring_(ring) {}

  // Waits until the next stage is empty. Then writes its notice, and tells its barrier to expect
  // `bytes` of operands from this thread.
  __device__ void announce(const Notice& notice, const Tile& tile, uint32_t bytes) {
    ring_.empty[at_.slot].wait(at_.phase ^ 1);
    if constexpr (kAnnounces) {
      ring_.notices[at_.slot] = notice;
      if (Ring::kNamesTiles || notice.ends_tile()) ring_.tiles[at_.slot] = tile;
    }
    ring_.full[at_.slot].arrive_and_expect_tx(bytes);
  }

  // Ends a tile by a stage without operands: no step was valid since the last stage.
  __device__ void end_tile(const Tile& tile) {
    announce(Notice::end_of_tile(), tile, 0);
    at_.advance();
  }

  __device__ void end_work() { announce(Notice::end_of_work(), {}, 0); }

 protected:
  __device__ Barrier& full() { return ring_.full[at_.slot]; }

  Ring& ring_;
  RingPosition<Ring::kStages> at_;
};

// Fills the kLists lists that start at `first`, in turn. All lanes of the warp call it together.
template <class Ring, int kLists>
class ListWriter {
  using Tile = typename Ring::Tile;
  using Step = typename Ring::Step;

 public:
  __device__ explicit ListWriter(Ring& ring, int first = 0) : ring_(ring), first_(first) {}

  // Waits until the next list has been read. A warp claims its next tile only after that, because
  // claims far ahead of the work unbalance the thread blocks.
  __device__ void wait_for_room() { ring_.list_empty[number()].wait(at_.phase ^ 1); }

  // Appends the valid ones of 32 steps, one from each lane.
  __device__ void append(const Tile& tile, const Step& step) {
    if (count_ > Ring::kListCapacity - 32) hand_over(tile);
    const bool any = step.is_valid();
    const uint32_t valid = __ballot_sync(~0u, any);
    const uint32_t before = valid & ((1u << (threadIdx.x % 32)) - 1);
    if (any) ring_.lists[number()].steps[count_ + __popc(before)] = step;
    count_ += __popc(valid);
  }

  // Room for one step more, which the lanes fill.
  __device__ Step& add(const Tile& tile) {
    if (count_ == Ring::kListCapacity) hand_over(tile);
    return ring_.lists[number()].steps[count_++];
  }

  // Lets the load warps read what the list has so far, which may be nothing.
  __device__ void hand_over(const Tile& tile) {
    publish(tile, false, false);
    wait_for_room();
  }

  __device__ void end_tile(const Tile& tile) { publish(tile, true, false); }
  __device__ void end_work() { publish({}, false, true); }

 private:
  __device__ int number() const { return first_ + at_.slot; }

  __device__ void publish(const Tile& tile, bool ends_tile, bool ends_work) {
    if (threadIdx.x % 32 == 0) {
      auto& list = ring_.lists[number()];
      list.tile = tile;
      list.count = count_;
      list.ends_tile = ends_tile;
      list.ends_work = ends_work;
    }
    ring_.list_full[number()].arrive();
    at_.advance();
    count_ = 0;
  }

  Ring& ring_;
  int first_;
  RingPosition<kLists> at_;
  int count_ = 0;
};

}  // namespace spamm::kernels::sm90
