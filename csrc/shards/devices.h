// The devices over which a product spreads its work. Device-free.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <vector>

#include "backends.h"

namespace spamm {

// The number of CUDA devices that torch finds. Its hooks count them: on a machine without one, the
// device guard counts a device once a function has been traced.
inline int64_t cuda_devices() { return at::detail::getCUDAHooks().getNumGPUs(); }

// The devices with these numbers, in their order. There must be at least one. Each must be a CUDA
// device of this machine, and none may come twice.
inline std::vector<at::Device> check_devices(at::IntArrayRef devices) {
  TORCH_CHECK_VALUE(!devices.empty(), "devices must name at least one CUDA device; got none");
  for (auto device = devices.begin(); device != devices.end(); ++device) {
    TORCH_CHECK_VALUE(std::find(devices.begin(), device, *device) == device,
                      "devices must be distinct; got ", devices);
  }
  TORCH_CHECK(Backends<NamedKernels>::find(at::kCUDA) != nullptr,
              "devices must be CUDA devices, and this build of spamm_torch is for the CPU only "
              "(build it again where nvcc is found); got ",
              devices);
  const int64_t found = cuda_devices();
  std::vector<at::Device> result;
  for (const int64_t device : devices) {
    TORCH_CHECK_VALUE(found > 0, "devices must be CUDA devices, and this machine has none; got ",
                      device);
    TORCH_CHECK_VALUE(device >= 0 && device < found, "devices must be less than ", found,
                      ", the number of CUDA devices of this machine, and not negative; got ",
                      device);
    result.emplace_back(at::kCUDA, static_cast<at::DeviceIndex>(device));
  }
  return result;
}

}  // namespace spamm
