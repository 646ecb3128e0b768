// The C++ type of a dtype of operands.
#pragma once

#include <c10/core/ScalarType.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace spamm::cuda {

// Calls run(Element{}) with the type of operands of `dtype`.
template <class Run>
void with_element(c10::ScalarType dtype, const Run& run) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return run(__half{});
    case c10::ScalarType::BFloat16:
      return run(__nv_bfloat16{});
    case c10::ScalarType::Float:
      return run(float{});
    default:
      return run(double{});
  }
}

}  // namespace spamm::cuda
