// The memory in which thread blocks that share the steps of a tile of float64 meet.
#pragma once

namespace spamm::kernels {

// Memory of one product for the segments of its tiles. With one segment nothing of it is used. A
// piece is what one warp computes of a tile.
struct SegmentMemory {
  int log2_segments;  // 0 or 1
  int pieces;
  unsigned* meetings;  // one for each piece. Follow next_tile, and begin as zeros
};

// The pieces of a tile with this edge.
constexpr int pieces_of_tile(int edge) { return edge / 16; }

}  // namespace spamm::kernels
