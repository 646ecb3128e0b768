// What a kernel finds for the host, which waits for it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>

#include <cstdint>

namespace spamm::cuda {

// A T in pinned memory, which the kernel writes itself: a copy behind it would take longer.
template <class T>
class HostResult {
 public:
  HostResult()
      : memory_(at::empty({int64_t{sizeof(T)}},
                          at::TensorOptions().dtype(at::kByte).pinned_memory(true))) {}

  T* on_device() const { return static_cast<T*>(memory_.mutable_data_ptr()); }

  // What the kernels of the stream have left.
  const T& wait(cudaStream_t stream) const {
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    return *on_device();
  }

 private:
  at::Tensor memory_;
};

}  // namespace spamm::cuda
