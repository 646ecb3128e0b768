// Keeps what the driver says of a kernel, because asking takes a microsecond.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>

namespace spamm::kernels {

// A value for each kernel and device. Several threads may use it at the same time.
template <class Value>
class PerKernel {
 public:
  // Sets `value` to what is known of `kernel` on the current device. `ask(value)` finds it out the
  // first time; its error is returned.
  template <class Ask>
  cudaError_t find(const void* kernel, Value& value, const Ask& ask) {
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    const std::pair key(kernel, device);
    {
      const std::shared_lock reading(mutex_);
      if (const auto found = known_.find(key); found != known_.end()) {
        value = found->second;
        return cudaSuccess;
      }
    }
    if (const cudaError_t error = ask(value); error != cudaSuccess) return error;
    const std::unique_lock writing(mutex_);
    known_.emplace(key, value);
    return cudaSuccess;
  }

 private:
  std::shared_mutex mutex_;
  std::map<std::pair<const void*, int>, Value> known_;
};

}  // namespace spamm::kernels
