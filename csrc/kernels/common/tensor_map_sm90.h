// Encodes tensor maps for TMA.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <type_traits>

#include "kernels/common/numeric.cuh"

namespace spamm::kernels::sm90 {

// One of the driver's tensor map encoders, or null if the driver has none. Looked up at run time,
// so that the library does not link libcuda.
template <class Encoder>
Encoder find_encoder(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
  const bool usable = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
  return usable ? reinterpret_cast<Encoder>(function) : nullptr;
}

// TMA rounds entries of type Tf32 to nearest as it loads them.
template <class Element>
constexpr CUtensorMapDataType map_type() {
  if constexpr (std::is_same_v<Element, __half>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if constexpr (std::is_same_v<Element, float>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  if constexpr (std::is_same_v<Element, Tf32>) return CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  if constexpr (std::is_same_v<Element, double>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT64;
}

// Maps a tensor of kDims dimensions. The first is contiguous; `strides` are those of the others, in
// bytes. A box is swizzled in 128 bytes, unless it is longer in the first dimension.
// `every` are element strides: every = 2 along a dimension loads each second entry.
template <class Element, int kDims>
cudaError_t encode_tensor_map(CUtensorMap& map, const void* data,
                              const std::array<uint64_t, kDims>& sizes,
                              const std::array<uint64_t, kDims - 1>& strides,
                              const std::array<uint32_t, kDims>& box,
                              const std::array<uint32_t, kDims>& every) {
  static const auto encoder =
      find_encoder<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  if (encoder == nullptr) return cudaErrorCallRequiresNewerDriver;
  const auto swizzle =
      box[0] * sizeof(Element) > 128 ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B;
  const CUresult result =
      encoder(&map, map_type<Element>(), kDims, const_cast<void*>(data), sizes.data(),
              strides.data(), box.data(), every.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
              CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Maps channels-last images for loads of consecutive output pixels of a convolution (im2col). Sizes
// and strides are those of channels, columns, rows and images. A load brings 128 bytes of channels
// of `pixels` output pixels, `every` columns and rows apart, in 128-byte swizzle. Its coordinates
// are those of the first pixel's window, its offsets those of the kernel position. `first` and
// `past` say how far windows start from the image's first and last pixel, as (columns, rows).
template <class Element>
cudaError_t encode_im2col_map(CUtensorMap& map, const void* data,
                              const std::array<uint64_t, 4>& sizes,
                              const std::array<uint64_t, 3>& strides,
                              const std::array<int, 2>& first, const std::array<int, 2>& past,
                              uint32_t pixels, const std::array<uint32_t, 2>& every) {
  static const auto encoder =
      find_encoder<decltype(&cuTensorMapEncodeIm2col)>("cuTensorMapEncodeIm2col");
  if (encoder == nullptr) return cudaErrorCallRequiresNewerDriver;
  const uint32_t element_strides[4] = {1, every[0], every[1], 1};
  const CUresult result =
      encoder(&map, map_type<Element>(), 4, const_cast<void*>(data), sizes.data(), strides.data(),
              first.data(), past.data(), 128 / sizeof(Element), pixels, element_strides,
              CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
              CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace spamm::kernels::sm90
