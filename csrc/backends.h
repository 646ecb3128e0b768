// What devices can do beyond the stages' ops: each device's folder registers its backends when the
// library is loaded, and what is above the devices asks for the first that takes its arguments.
#pragma once

#include <c10/core/DeviceType.h>

#include <algorithm>
#include <vector>

namespace spamm {

// The order in which a device's backends are asked.
enum class Rank { kSpecial, kHopper, kPortable };

// The backends of one kind. `Backend` has a member takes(arguments...).
template <class Backend>
class Backends {
 public:
  // For a static in the backend's own file.
  Backends(at::DeviceType device, Rank rank, const Backend& backend) {
    std::vector<Entry>& entries = all();
    const auto later = [&](const Entry& entry) { return entry.rank > rank; };
    entries.insert(std::find_if(entries.begin(), entries.end(), later), {device, rank, backend});
  }

  // The first backend of the device that takes the arguments, or null.
  template <class... Arguments>
  static const Backend* find(at::DeviceType device, const Arguments&... arguments) {
    for (const Entry& entry : all()) {
      if (entry.device == device && entry.backend.takes(arguments...)) return &entry.backend;
    }
    return nullptr;
  }

 private:
  struct Entry {
    at::DeviceType device;
    Rank rank;
    Backend backend;
  };

  static std::vector<Entry>& all() {
    static std::vector<Entry> entries;
    return entries;
  }
};

}  // namespace spamm
