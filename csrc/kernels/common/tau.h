// A threshold as kernels take it.
#pragma once

#include <cuda_runtime.h>

namespace spamm::kernels {

// In the norms' type: on the device (never read on the host) or passed by value.
template <class Norm>
struct Tau {
  const Norm* on_device;  // null: `on_host` holds
  Norm on_host;

  __device__ Norm value() const { return on_device ? *on_device : on_host; }
};

}  // namespace spamm::kernels
