// Turns run-time values into template arguments.
#pragma once

#include <type_traits>

namespace spamm::kernels {

// Calls `call` with each value as a std::bool_constant.
template <class Call>
auto with_constants(const Call& call) {
  return call();
}

template <class Call, class... Others>
auto with_constants(const Call& call, bool value, Others... others) {
  const auto with_value = [&](auto constant) {
    return with_constants([&](auto... rest) { return call(constant, rest...); }, others...);
  };
  return value ? with_value(std::true_type{}) : with_value(std::false_type{});
}

}  // namespace spamm::kernels
