// Every CUDA op first makes the tensor's device current and refuses a device that is too old.
// Tells whether the Hopper kernels may run on it.
//
// Environment variable SPAMM_TORCH_FORCE_SM80: `1` disables these, so that tests can run the
// portable kernels on any chip. Read once per process.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <cuda_runtime.h>

#include "cuda/heuristics.h"
#include "environment.h"

namespace spamm::cuda {

// The device's properties. Refuses a device older than sm_80.
inline const cudaDeviceProp& check_device(at::Device device) {
  const int found = c10::cuda::device_count();
  TORCH_CHECK(found > 0 && device.index() < found, "no such CUDA device: ", device, "; found ",
              found, " CUDA devices");
  const cudaDeviceProp& properties = *at::cuda::getDeviceProperties(device.index());
  TORCH_CHECK(properties.major >= 8,
              "spamm_torch needs a GPU of compute capability 8.0 or newer; got ", properties.name,
              " (", properties.major, ".", properties.minor, ")");
  return properties;
}

// Makes the tensor's device the current one for the lifetime of this object.
class OnDevice {
 public:
  explicit OnDevice(const at::Tensor& tensor)
      : guard_(tensor.device()), properties_(check_device(tensor.device())) {}

  const cudaDeviceProp& properties() const { return properties_; }
  int multiprocessors() const { return properties_.multiProcessorCount; }
  cudaStream_t stream() const { return c10::cuda::getCurrentCUDAStream(); }

 private:
  c10::cuda::CUDAGuard guard_;
  const cudaDeviceProp& properties_;
};

// Tells whether the current stream is captured for a CUDA graph, so that the host must not wait.
inline bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

#ifdef SPAMM_WITH_SM90A
constexpr bool kHasHopperKernels = true;
#else
constexpr bool kHasHopperKernels = false;
#endif

inline bool force_sm80() {
  static const bool forced = is_set("SPAMM_TORCH_FORCE_SM80");
  return forced;
}

inline bool has_hopper_kernels(const cudaDeviceProp& chip) {
  return kHasHopperKernels && !force_sm80() &&
         runs_hopper_kernels(10 * chip.major + chip.minor, chip.sharedMemPerBlockOptin);
}

}  // namespace spamm::cuda
