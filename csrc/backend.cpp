// The op backend_for: the name of the kernel that multiply would run.
#include "backend.h"

#include <c10/core/Device.h>
#include <torch/library.h>

#include "checks.h"
#include "spamm/spamm.h"

namespace spamm {
namespace {

std::string backend_for_op(at::Device device, at::ScalarType dtype, IntArrayRef block) {
  check_operand_dtype(dtype, "dtype");
  const Block edges = check_block(block);
  const auto* kernels = Backends<NamedKernels>::find(device.type());
  TORCH_CHECK(kernels != nullptr || !device.is_cuda(),
              "this build of spamm_torch is for the CPU only; build it again where nvcc is found, "
              "for device ",
              device);
  TORCH_CHECK(kernels != nullptr, "device must be a CPU or a CUDA device; got ", device);
  return kernels->name(device, dtype, edges);
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CompositeImplicitAutograd, m) {
  m.impl("backend_for", &backend_for_op);
}

}  // namespace spamm
