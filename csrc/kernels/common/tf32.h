// The type of float32 numbers that are multiplied with TF32's precision.
#pragma once

namespace spamm::kernels {

// float32 as the instructions for TF32 take it.
struct Tf32 {
  float value;
};

}  // namespace spamm::kernels
