// Streams of several devices, without naming the kind of device. On the CPU, which has no streams,
// work runs when it is enqueued, and waiting does nothing.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

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

  // What is enqueued from now on starts after `mark`.
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

// The lanes of one device's part of a product. Two multiply in turns, so that one stage starts
// while the last tiles of the other are computed. One of the two is the device's current stream.
class Lanes {
 public:
  // Without `sends` there is no lane to send.
  Lanes(at::Device device, bool sends)
      : lanes_{Lane::current(device), Lane::side(device, kMultiplyLane),
               Lane::side(device, kPullLane)} {
    if (sends) lanes_.push_back(Lane::side(device, kSendLane));
  }

  const Lane& own() const { return lanes_[0]; }
  const Lane& multiply(int64_t turn) const { return lanes_[turn % 2]; }
  const Lane& pull() const { return lanes_[2]; }
  const Lane& send() const { return lanes_.back(); }
  std::span<const Lane> all() const { return lanes_; }

  // What is enqueued from now on starts after what the current stream has.
  void start() const {
    for (const Lane& lane : lanes_) lane.wait_for(own());
  }

  // Ends the use of all memory: the current stream waits for every lane, and these streams of other
  // devices for the copies from and to them.
  void end(std::span<const Lane> others) const noexcept {
    try {
      for (const Lane& lane : lanes_) own().wait_for(lane);
      for (const Lane& other : others) {
        for (const Lane& lane : all().subspan(2)) other.wait_for(lane);
      }
    } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch)
      // The device has failed, and the error that says so is on its way.
    }
  }

 private:
  std::vector<Lane> lanes_;
};

}  // namespace spamm::shards
