// The activations that a convolution applies to its sums. Plain: device code includes it too.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>

namespace spamm {

enum class Activation : int { kNone, kRelu, kRelu6, kHardswish, kSilu, kLeakyRelu };

inline constexpr std::array<const char*, 6> kActivationNames = {"none",      "relu", "relu6",
                                                                "hardswish", "silu", "leaky_relu"};

// The slope of leaky_relu below zero, PyTorch's default.
inline constexpr double kLeakySlope = 0.01;

inline const char* name_of(Activation activation) {
  return kActivationNames[static_cast<size_t>(activation)];
}

// The activation of this name, or nothing.
inline std::optional<Activation> find_activation(std::string_view name) {
  for (size_t i = 0; i < kActivationNames.size(); ++i) {
    if (name == kActivationNames[i]) return static_cast<Activation>(i);
  }
  return std::nullopt;
}

}  // namespace spamm
