// The threshold as a kernel parameter.
#pragma once

#include <cuda_runtime.h>

namespace spamm::kernels {

// In the type of the norms. Either on the device, where the host never reads it, or by value.
template <class Norm>
struct Tau {
  const Norm* on_device;  // null: use `on_host`
  Norm on_host;

  __device__ Norm value() const { return on_device ? *on_device : on_host; }
};

}  // namespace spamm::kernels
