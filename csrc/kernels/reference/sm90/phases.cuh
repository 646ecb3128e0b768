// The output of a convolution in phases, put in its places: channels [row][column][C] of a pixel
// are those of 2 x 2 pixels. 64 channels of the convolution are channels of one such pixel, or,
// with C = 32, all of two neighbouring columns. Each phase of so many is an image of its own, whose
// pixels lie apart in memory.
#pragma once

#include <cuda.h>

#include "kernels/common/tensor_map_sm90.h"
#include "kernels/common/wgmma_sm90.cuh"
#include "kernels/reference/params.h"

namespace spamm::kernels::reference {

struct Phases {
  int channels, width, in_row;  // of a pixel; channels of a phase; phases in a row of 2 x 2 pixels

  __host__ __device__ explicit Phases(const DeviationParams& p)
      : channels(p.phase_channels),
        width(channels > kernels::sm90::kBlock ? channels : kernels::sm90::kBlock),
        in_row(2 * channels / width) {}

  __host__ __device__ int count() const { return 2 * in_row; }
};

// The map that stores 64 channels of the convolution, from `channel` on; `channel` becomes that in
// the map.
__device__ __forceinline__ const CUtensorMap* map_of_phase(const DeviationParams& p, int& channel) {
  if (p.phase_channels == 0) return &p.map_output;
  const Phases phases(p);
  const int phase = channel / phases.width;
  channel -= phase * phases.width;
  return phase == 0 ? &p.map_output : &p.map_phases[phase - 1];
}

// The place of a pixel's norm of 64 channels, from `channel` on, in (images, rows, columns,
// groups). In phases of 32 channels a norm is that of two neighbouring columns.
__device__ __forceinline__ int64_t place_of_norm(const DeviationParams& p, int image, int row,
                                                 int column, int channel) {
  constexpr int kBlock = kernels::sm90::kBlock;
  int rows = p.shape.output.rows, columns = p.shape.output.columns;
  int groups = (p.shape.out_channels - 1) / kBlock + 1;
  if (p.phase_channels > 0) {
    const Phases phases(p);
    const int phase = channel / phases.width;
    channel -= phase * phases.width;
    row = 2 * row + phase / phases.in_row;
    column = phases.in_row * column + phase % phases.in_row;
    rows *= 2;
    columns *= phases.in_row;
    groups = phases.width / kBlock;
  }
  const int64_t pixel = (static_cast<int64_t>(image) * rows + row) * columns + column;
  return pixel * groups + channel / kBlock;
}

// Encodes the maps of all phases.
template <class Element>
cudaError_t encode_phases(DeviationParams& p) {
  const Phases phases(p);
  const Extent& output = p.shape.output;
  const uint64_t pixel = phases.channels * sizeof(Element), line = 2 * pixel * output.columns;
  for (int phase = 0; phase < phases.count(); ++phase) {
    const uint64_t before = phase / phases.in_row * line + phase % phases.in_row * pixel;
    const cudaError_t error = kernels::sm90::encode_tensor_map<Element, 4>(
        phase == 0 ? p.map_output : p.map_phases[phase - 1],
        static_cast<uint8_t*>(p.output) + before,
        {static_cast<uint64_t>(phases.width), static_cast<uint64_t>(output.columns),
         static_cast<uint64_t>(output.rows), static_cast<uint64_t>(output.images)},
        {2 * pixel, 2 * line, 2 * line * output.rows},
        {kernels::sm90::kLineBytes / sizeof(Element), 1u << p.box.columns, 1u << p.box.rows,
         1u << p.box.images},
        {1, 1, 1, 1});
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace spamm::kernels::reference
