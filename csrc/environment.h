// Settings from outside of a call: environment variables, which tests and comparisons set, and
// PyTorch's for float32 products on CUDA.
#pragma once

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <string>

namespace spamm {

inline std::string environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Tells whether a variable is 1. Refuses all but 0 and 1, which a test would set to no effect.
inline bool is_set(const char* name) {
  const std::string given = environment(name);
  TORCH_CHECK_VALUE(given.empty() || given == "0" || given == "1", name, " must be 0 or 1; got ",
                    given);
  return given == "1";
}

// Tells whether float32 may be rounded to TF32, by the rule of PyTorch's own matrix products.
// Another thread may change the setting at any time, so ask once per call and pass the answer on.
inline bool allow_tf32() {
  return !at::NoTF32Guard::should_disable_tf32() &&
         at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
             at::Float32Precision::TF32;
}

}  // namespace spamm
