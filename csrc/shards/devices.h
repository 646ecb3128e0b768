// The devices over which an op spreads its work, and what lies beside them. Device-free.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <vector>

#include "backends.h"
#include "environment.h"

namespace spamm {

// The number of CUDA devices that torch finds. Its hooks count them: on a machine without one, the
// device guard counts a device once a function has been traced.
inline int64_t cuda_devices() { return at::detail::getCUDAHooks().getNumGPUs(); }

// Whether sharing pays where one device takes at most `ns` for the whole and `bytes` travel to
// others, at 375 bytes a ns (NVLink between two H200 or H100). It does so from `least_ns` on:
// below, the host takes longer to share the work than a device to do it. SPAMM_TORCH_ALL_DEVICES=1
// shares all the same, for tests.
inline bool pays_to_share(double ns, double least_ns, double bytes) {
  return is_set("SPAMM_TORCH_ALL_DEVICES") || (ns >= least_ns && ns > bytes / 375);
}

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

namespace shards {

// One tensor for each shard. `given` holds these, or one, which is copied to each other device of
// the shards. Gradients go back through the copies.
inline std::vector<at::Tensor> beside(at::TensorList shards, at::TensorList given,
                                      const char* name) {
  TORCH_CHECK_VALUE(given.size() == 1 || given.size() == shards.size(), name,
                    " must be one tensor, or one for each of the ", shards.size(), " shards; got ",
                    given.size());
  if (given.size() == shards.size() && given.size() != 1) return given.vec();
  std::vector<at::Tensor> copies = {given.front()}, result;
  for (const at::Tensor& shard : shards) {
    auto copy = std::ranges::find(copies, shard.device(), &at::Tensor::device);
    if (copy == copies.end())
      copy = copies.insert(copy, given.front().to(given.front().options().device(shard.device())));
    result.push_back(*copy);
  }
  return result;
}

}  // namespace shards
}  // namespace spamm
