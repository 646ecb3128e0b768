// The activations that a convolution applies to its sums. Plain: device code includes it too.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>

namespace spamm {

enum class Activation : int { kNone, kRelu, kRelu6, kHardswish, kSilu, kLeakyRelu };

// Facts of each, in the order of the enumeration.
struct ActivationFacts {
  Activation activation;
  const char* name;
  bool needs_argument;  // its gradient: what it is applied to, not only its output
  bool vectorises;      // on CPUs; else ATen computes it
  const char* onednn;   // oneDNN's name; null where its kernel turns NaN into 0, or does not serve
};
inline constexpr std::array<ActivationFacts, 6> kActivations = {{
    {Activation::kNone, "none", false, true, nullptr},
    {Activation::kRelu, "relu", false, true, nullptr},
    {Activation::kRelu6, "relu6", false, true, nullptr},
    {Activation::kHardswish, "hardswish", true, true, "hardswish"},
    {Activation::kSilu, "silu", true, false, "swish"},
    {Activation::kLeakyRelu, "leaky_relu", false, true, nullptr},
}};
inline constexpr bool are_in_order() {
  for (size_t i = 0; i < kActivations.size(); ++i) {
    if (static_cast<size_t>(kActivations[i].activation) != i) return false;
  }
  return true;
}
static_assert(are_in_order());

inline const ActivationFacts& facts_of(Activation activation) {
  return kActivations[static_cast<size_t>(activation)];
}

// The activation of this name, or nothing.
inline std::optional<Activation> find_activation(std::string_view name) {
  for (const ActivationFacts& facts : kActivations) {
    if (name == facts.name) return facts.activation;
  }
  return std::nullopt;
}

}  // namespace spamm
