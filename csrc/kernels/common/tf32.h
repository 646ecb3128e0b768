// A type that selects TF32 instructions in templates.
#pragma once

namespace spamm::kernels {

// A float32 number whose products have TF32's precision.
struct Tf32 {
  float value;
};

}  // namespace spamm::kernels
