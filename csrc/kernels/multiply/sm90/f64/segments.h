// The memory in which thread blocks that share the steps of a tile of float64 meet.
#pragma once

namespace spamm::kernels {

// Memory of one product for the segments of its tiles. With one segment nothing of it is used. A
// piece is what one warp computes of a tile.
struct SegmentMemory {
  int log2_segments;  // 0, 1 or 2
  int pieces;
  double* sums;  // of each piece and segment, in the order of a warp's registers
  int* arrived;  // for each piece: which segments are done. Follow next_tile, and begin as zeros
};

// The pieces of a tile with this edge.
constexpr int pieces_of_tile(int edge) { return edge / 16; }

}  // namespace spamm::kernels
