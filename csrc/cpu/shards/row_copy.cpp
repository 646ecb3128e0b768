// Copies of rows in the CPU's memory.
#include <cstring>

#include "shards/lane.h"

namespace spamm::cpu {
namespace {

void copy(at::Device, at::Device, std::span<const shards::RowBlock> blocks) {
  for (const shards::RowBlock& block : blocks) {
    for (int64_t row = 0; row < block.rows; ++row) {
      std::memcpy(static_cast<char*>(block.to) + row * block.to_stride,
                  static_cast<const char*>(block.from) + row * block.from_stride,
                  static_cast<size_t>(block.width));
    }
  }
}

const Backends<shards::RowCopy> copies(at::kCPU, Rank::kPortable, {&copy, [] { return false; }});

}  // namespace
}  // namespace spamm::cpu
