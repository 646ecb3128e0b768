// One line for memory that a device does not have.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstdint>

namespace spamm::shards {

// Runs `work`, which takes memory of `device`, for buffers of so many bytes and what kernels need
// beside them. An OutOfMemoryError then names both.
template <class Work>
void naming_memory(at::Device device, int64_t bytes, const Work& work) {
  bool failed = false;
  try {
    work();
  } catch (const c10::OutOfMemoryError&) {
    failed = true;
  }
  TORCH_CHECK_WITH(OutOfMemoryError, !failed,
                   "a product of operands in host memory needs at least ", bytes, " bytes on ",
                   device);
}

}  // namespace spamm::shards
