// PyTorch's setting for float32 products on CUDA.
#pragma once

#include <ATen/Context.h>

namespace spamm {

// Whether float32 may be rounded to TF32, by the rule of PyTorch's own matrix products. Another
// thread may change the setting at any time, so ask once per call and pass the answer on.
inline bool allow_tf32() {
  return !at::NoTF32Guard::should_disable_tf32() &&
         at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
             at::Float32Precision::TF32;
}

}  // namespace spamm
