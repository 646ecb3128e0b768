// Starts kernels, which may overlap the previous kernel of their stream (overlap.cuh).
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <type_traits>
#include <utility>

namespace spamm::kernels {

// The driver's answers for each kernel and device, kept because asking takes a microsecond. Several
// threads may use it at the same time.
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

// Allows `kernel` this many bytes of dynamic shared memory on the current device, and prefers the
// largest possible shared memory of a multiprocessor, so that thread blocks of other kernels fit
// beside it. A kernel's calls ask for the same number.
inline cudaError_t allow_shared_memory(const void* kernel, int bytes) {
  static PerKernel<int> known;
  int allowed = 0;
  return known.find(kernel, allowed, [&](int& most) {
    most = bytes;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared);
  });
}

// Sets `waits` to whether the current device runs code of `kernel` that contains the waits of
// overlap.cuh. The compute capability does not answer this: a chip above 9.0 may run PTX of
// compute_80, in which the waits are empty.
inline cudaError_t find_waits(const void* kernel, bool& waits) {
  static PerKernel<bool> known;
  return known.find(kernel, waits, [&](bool& found) {
    cudaFuncAttributes code{};
    const cudaError_t error = cudaFuncGetAttributes(&code, kernel);
    found = code.ptxVersion >= 90;
    return error;
  });
}

// An attribute of a launch, or none.
using Attribute = std::optional<cudaLaunchAttribute>;

inline Attribute overlapping(bool overlaps) {
  if (!overlaps) return {};
  return {{.id = cudaLaunchAttributeProgrammaticStreamSerialization,
           .val = {.programmaticStreamSerializationAllowed = 1}}};
}

// For thread blocks that meet (Meeting): all of them have to run at the same time. The launch fails
// if the device has no room for that.
inline Attribute meeting(bool meets = true) {
  return {{.id = cudaLaunchAttributeCooperative, .val = {.cooperative = meets}}};
}

// In clusters of so many thread blocks; 0: in none.
inline Attribute in_clusters(unsigned size) {
  if (size == 0) return {};
  return {{.id = cudaLaunchAttributeClusterDimension, .val = {.clusterDim = {size, 1, 1}}}};
}

// Launches on `stream`. With `overlap_previous` the kernel may start before the previous kernel of
// the stream ends, provided that its code contains the wait.
template <class... Params>
cudaError_t launch_with(const Attribute& more, void (*kernel)(Params...), dim3 grid, int threads,
                        size_t shared_bytes, bool overlap_previous, cudaStream_t stream,
                        const std::type_identity_t<Params>&... params) {
  bool overlaps = false;
  if (overlap_previous) {
    const cudaError_t error = find_waits(reinterpret_cast<const void*>(kernel), overlaps);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  for (const Attribute& attribute : {more, overlapping(overlaps)}) {
    if (attribute) attributes[count++] = *attribute;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

template <class... Params>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, int threads, int shared_bytes,
                   bool overlap_previous, cudaStream_t stream,
                   const std::type_identity_t<Params>&... params) {
  return launch_with({}, kernel, grid, threads, shared_bytes, overlap_previous, stream, params...);
}

// Calls `call` with each value as a std::bool_constant: run-time values as template arguments.
template <class Call>
auto with_constants(const Call& call) {
  return call();
}

template <class Call, class... Others>
auto with_constants(const Call& call, bool value, Others... others) {
  const auto with_value = [&](auto constant) {
    return with_constants([&](auto... rest) { return call(constant, rest...); }, others...);
  };
  return value ? with_value(std::true_type{}) : with_value(std::false_type{});
}

}  // namespace spamm::kernels
