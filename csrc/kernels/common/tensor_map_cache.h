// Tensor maps that a thread has encoded. The driver takes a microsecond for one, and a network asks
// for the same maps in every pass, because torch's allocator gives it the same memory again.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <memory>

namespace spamm::kernels::sm90 {

// All arguments of an encoding. Nothing else goes into a map, so one that is kept stays right
// whatever becomes of the memory: an address belongs to one device at a time.
using TensorMapKey = std::array<uint64_t, 13>;

template <int kDims>
TensorMapKey tensor_map_key(CUtensorMapDataType type, const void* data,
                            const std::array<uint64_t, kDims>& sizes,
                            const std::array<uint64_t, kDims - 1>& strides,
                            const std::array<uint32_t, kDims>& box,
                            const std::array<uint32_t, kDims>& every) {
  static_assert(kDims <= 4);
  TensorMapKey key{reinterpret_cast<uintptr_t>(data), uint64_t{kDims} << 32 | type};
  for (int d = 0; d < kDims; ++d) {
    key[2 + d] = sizes[d];
    key[6 + d] = uint64_t{box[d]} << 32 | every[d];
    if (d > 0) key[9 + d] = strides[d - 1];
  }
  return key;
}

struct KeptTensorMap {
  TensorMapKey key;  // all zero: none
  CUtensorMap map;
};

// Where this thread keeps the map of `key`. Another one may lie there.
inline KeptTensorMap& kept_tensor_map(const TensorMapKey& key) {
  constexpr int kLog2Kept = 10;  // four times what ResNet-50 needs, 256 KiB
  thread_local const auto kept = std::make_unique<KeptTensorMap[]>(size_t{1} << kLog2Kept);
  uint64_t hash = 0;
  for (const uint64_t word : key) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15;
    hash ^= hash >> 32;
  }
  return kept[(hash * 0x9e3779b97f4a7c15) >> (64 - kLog2Kept)];
}

}  // namespace spamm::kernels::sm90
