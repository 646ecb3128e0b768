// Tensor maps for TMA.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <type_traits>

namespace spamm::kernels::sm90 {

// The driver's tensor map encoder, found at run time so that nothing links libcuda; null if the
// driver has none.
inline auto find_tensor_map_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &found);
  const bool usable = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
  return usable ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function) : nullptr;
}

// A contiguous first dimension and kDims - 1 more, in bytes apart; boxes of up to 128 bytes by any
// number of lines, swizzled in 128 bytes or fewer; `every`: which entries along a dimension are
// taken.
template <class Element, int kDims>
cudaError_t encode_tensor_map(CUtensorMap& map, const void* data,
                              const std::array<uint64_t, kDims>& sizes,
                              const std::array<uint64_t, kDims - 1>& strides,
                              const std::array<uint32_t, kDims>& box,
                              const std::array<uint32_t, kDims>& every,
                              CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  static const auto encoder = find_tensor_map_encoder();
  if (encoder == nullptr) return cudaErrorCallRequiresNewerDriver;
  constexpr auto kType = std::is_same_v<Element, double>   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT64
                         : std::is_same_v<Element, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                           : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      encoder(&map, kType, kDims, const_cast<void*>(data), sizes.data(), strides.data(), box.data(),
              every.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
              CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace spamm::kernels::sm90
