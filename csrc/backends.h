// A registry for what some devices can do and others cannot, such as convolution without an im2col
// matrix. Each device's folder registers its backends when the library is loaded. Device-free code
// asks for the first backend that supports its arguments.
#pragma once

#include <c10/core/DeviceType.h>

#include <algorithm>
#include <vector>

namespace spamm {

// The order in which a device's backends are tried.
enum class Rank { kSpecial, kHopper, kPortable };

// The backends of one kind. `Backend` has a member supports(arguments...).
template <class Backend>
class Backends {
 public:
  // Define a static object of this class in the backend's file to register it.
  Backends(at::DeviceType device, Rank rank, const Backend& backend) {
    std::vector<Entry>& entries = all();
    const auto later = [&](const Entry& entry) { return entry.rank > rank; };
    entries.insert(std::find_if(entries.begin(), entries.end(), later), {device, rank, backend});
  }

  // The device's first backend that supports the arguments, or null.
  template <class... Arguments>
  static const Backend* find(at::DeviceType device, const Arguments&... arguments) {
    for (const Entry& entry : all()) {
      if (entry.device == device && entry.backend.supports(arguments...)) return &entry.backend;
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
