// From run-time values to the instances of a template.
#pragma once

#include <type_traits>

namespace spamm::kernels {

// Calls `call` with the values as std::bool_constant, so that they can be template arguments.
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
