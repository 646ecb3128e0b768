#include "shards/lane.h"

#include <map>
#include <mutex>
#include <utility>

namespace spamm::shards {

Lane Lane::side(at::Device device, int number) {
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

}  // namespace spamm::shards
