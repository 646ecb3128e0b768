// Which kernel would run: asks the device's own table.
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
  if (device.is_cpu()) return cpu::backend_name(dtype, edges);
#ifdef SPAMM_WITH_CUDA
  if (device.is_cuda()) return cuda::backend_name(device, dtype, edges);
#else
  TORCH_CHECK(!device.is_cuda(),
              "this build of spamm_torch is for the CPU only; build it again where nvcc is found, "
              "for device ",
              device);
#endif
  TORCH_CHECK(false, "device must be a CPU or a CUDA device; got ", device);
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CompositeImplicitAutograd, m) {
  m.impl("backend_for", &backend_for_op);
}

}  // namespace spamm
