// A registry for what some devices can do and others cannot, such as convolution without an im2col
// matrix. Each device's folder registers its backends when the library is loaded. Device-free code
// asks for the first backend that supports its arguments.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "block.h"

namespace spamm {

// The order in which a device's backends are tried.
enum class Rank { kSpecial, kHopper, kPortable };

// A function that a backend may have, and whether it serves some arguments.
template <class Signature>
struct Way;
template <class Result, class... Arguments>
struct Way<Result(Arguments...)> {
  bool (*supports)(Arguments...) = nullptr;
  Result (*run)(Arguments...) = nullptr;
};

// The backends of one kind. Some of the members of `Backend` are ways.
template <class Backend>
class Backends {
 public:
  // Define a static object of this class in the backend's file to register it.
  Backends(at::DeviceType device, Rank rank, const Backend& backend) {
    std::vector<Entry>& entries = all();
    const auto later = [&](const Entry& entry) { return entry.rank > rank; };
    entries.insert(std::find_if(entries.begin(), entries.end(), later), {device, rank, backend});
  }

  // The device's first backend, or null.
  static const Backend* find(at::DeviceType device) {
    return first(device, [](const Backend&) { return true; });
  }

  // The device's first backend whose way supports the arguments, or null.
  template <class Result, class... Arguments>
  static const Backend* find(at::DeviceType device, Way<Result(Arguments...)> Backend::*way,
                             std::type_identity_t<Arguments>... arguments) {
    return first(device, [&](const Backend& backend) {
      const auto supports = (backend.*way).supports;
      return supports != nullptr && supports(arguments...);
    });
  }

  // The result of that backend, or nothing.
  template <class Result, class... Arguments>
  static std::optional<Result> run(at::DeviceType device, Way<Result(Arguments...)> Backend::*way,
                                   std::type_identity_t<Arguments>... arguments) {
    const Backend* const found = find(device, way, arguments...);
    if (found == nullptr) return std::nullopt;
    return (found->*way).run(arguments...);
  }

 private:
  struct Entry {
    at::DeviceType device;
    Rank rank;
    Backend backend;
  };

  template <class Test>
  static const Backend* first(at::DeviceType device, const Test& test) {
    for (const Entry& entry : all()) {
      if (entry.device == device && test(entry.backend)) return &entry.backend;
    }
    return nullptr;
  }

  static std::vector<Entry>& all() {
    static std::vector<Entry> entries;
    return entries;
  }
};

// The names of a device's multiply kernels, as the op backend_for reports them.
struct NamedKernels {
  std::string (*name)(at::Device device, at::ScalarType dtype, const Block& block);
};

}  // namespace spamm
