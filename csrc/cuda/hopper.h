// Whether the Hopper kernels may run.
//
// Environment variable SPAMM_TORCH_FORCE_SM80: `1` disables them, so that tests can run the
// portable kernels on any chip. Read once per process.
#pragma once

#include <c10/util/Exception.h>
#include <cuda_runtime.h>

#include <cstdlib>
#include <string>

#include "cuda/heuristics.h"

namespace spamm::cuda {

#ifdef SPAMM_WITH_SM90A
constexpr bool kHasHopperKernels = true;
#else
constexpr bool kHasHopperKernels = false;
#endif

inline std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

inline bool force_sm80() {
  static const bool forced = [] {
    const std::string value = environment("SPAMM_TORCH_FORCE_SM80");
    TORCH_CHECK_VALUE(value.empty() || value == "0" || value == "1",
                      "SPAMM_TORCH_FORCE_SM80 must be 0 or 1; got ", value);
    return value == "1";
  }();
  return forced;
}

inline bool has_hopper_kernels(const cudaDeviceProp& chip) {
  return kHasHopperKernels && !force_sm80() &&
         runs_hopper_kernels(10 * chip.major + chip.minor, chip.sharedMemPerBlockOptin);
}

}  // namespace spamm::cuda
