// Reads PyTorch's float32 precision of CUDA matrix products.
#include "tf32_setting.h"

#include <ATen/Context.h>

namespace spamm {

bool allow_tf32() {
  return !at::NoTF32Guard::should_disable_tf32() &&
         at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
             at::Float32Precision::TF32;
}

}  // namespace spamm
