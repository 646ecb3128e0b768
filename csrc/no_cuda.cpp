// In a build without CUDA, every stage refuses CUDA tensors with a one-line error.
#ifndef SPAMM_WITH_CUDA
#include <torch/library.h>

namespace spamm {
namespace {

void no_cuda(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK(
      false, op.schema().name(),
      ": this build of spamm_torch is for the CPU only; build it again where nvcc is found; "
      "got a CUDA tensor");
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) {
  for (const char* name : {"norm_map", "find_tau", "product_histogram", "valid_counts",
                           "error_bound", "spamm", "spamm_with_norms", "spamm_into", "multiply",
                           "multiply_part", "bsr_plan", "bsr_find_tau", "bsr_error_bound"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&no_cuda>());
  }
}

}  // namespace spamm
#endif
