// Norms of the blocks of an im2col matrix, computed as in norm_map.cuh from lines gathered from the
// input. Each kernel position reads its pixels again, mostly from the L2 cache.
#pragma once

#include "kernels/conv/sm80/params.h"
#include "kernels/norm_map/norm_map.cuh"

namespace spamm::kernels {

// The first pixel of a pixel block, in the output.
struct BlockOrigin {
  int image, row, column;

  // A number past the last block gives an origin outside the output.
  __device__ BlockOrigin(const Im2colMatrix& m, int number) {
    int line, image_block, row_block, column_block;
    m.by_block_columns(line, column_block, number);
    m.by_block_rows(image_block, row_block, line);
    image = image_block << m.log2_images;
    row = row_block << m.log2_rows;
    column = column_block << m.log2_columns;
  }
};

// One row of the matrix: an output pixel, and the input pixel at its window's first kernel
// position.
struct alignas(16) Im2colRow {
  int input_pixel;   // index in the input; may lie outside, like row and column
  int row, column;   // in the input
  int output_pixel;  // index in the output, -1 if outside

  __device__ static Im2colRow at(const Im2colMatrix& m, const BlockOrigin& block, int index) {
    const int column = block.column + (index & ((1 << m.log2_columns) - 1));
    const int row = block.row + (index >> m.log2_columns & ((1 << m.log2_rows) - 1));
    const int image = block.image + (index >> (m.log2_columns + m.log2_rows));
    constexpr int kOutside = -(1 << 30);  // no window reaches so far
    if (image >= m.images || row >= m.output.rows || column >= m.output.columns) {
      return {0, kOutside, kOutside, -1};
    }
    return of_pixel(m, image, row, column);
  }

  // The row of an output pixel that exists.
  __device__ static Im2colRow of_pixel(const Im2colMatrix& m, int image, int row, int column) {
    const int y = row * m.stride.rows - m.padding.rows;
    const int x = column * m.stride.columns - m.padding.columns;
    return {(image * m.input.rows + y) * m.input.columns + x, y, x,
            (image * m.output.rows + row) * m.output.columns + column};
  }
};

// The distance of a kernel position from the window's first one.
struct WindowStep {
  int rows, columns, pixels;

  __device__ WindowStep(const Im2colMatrix& m, int kernel_position) {
    int kernel_row, kernel_column;
    m.by_kernel_columns(kernel_row, kernel_column, kernel_position);
    rows = kernel_row * m.dilation.rows;
    columns = kernel_column * m.dilation.columns;
    pixels = rows * m.input.columns + columns;
  }

  __device__ bool is_inside(const Im2colMatrix& m, int row, int column) const {
    return static_cast<unsigned>(row + rows) < static_cast<unsigned>(m.input.rows) &&
           static_cast<unsigned>(column + columns) < static_cast<unsigned>(m.input.columns);
  }
};

// One block of the matrix as a sequence of chunks, with the interface of NormBlock.
template <class Element_>
class Im2colBlock {
 public:
  using Element = Element_;
  using Norm = NormOf<Element>;
  static constexpr int kEntries = Chunk<Element>::kEntries;
  static constexpr int kLog2Entries = kEntries == 8 ? 3 : kEntries == 4 ? 2 : 1;

  // A block that does not exist holds zeros.
  __device__ Im2colBlock(const Im2colNormsParams<Norm>& p, bool exists, int group, int block,
                         int kernel_position, int channel)
      : p_(p),
        origin_(p.matrix, block),
        step_(p.matrix, kernel_position),
        first_channel_(group * p.matrix.channels + channel),
        channels_left_(exists ? p.matrix.channels - channel : 0) {}

  __device__ int chunks() const {
    return 1 << (p_.matrix.log2_block() + p_.log2_block_k - kLog2Entries);
  }

  __device__ bool has_vectors() const { return true; }

  __device__ Chunk<Element> gather(int index) const {
    const Im2colMatrix& m = p_.matrix;
    const int log2_line_chunks = p_.log2_block_k - kLog2Entries;
    const int channel = (index & ((1 << log2_line_chunks) - 1)) << kLog2Entries;
    const auto pixel = Im2colRow::at(m, origin_, index >> log2_line_chunks);
    if (channel >= channels_left_ || !step_.is_inside(m, pixel.row, pixel.column)) return {};
    const int64_t number = pixel.input_pixel + step_.pixels;
    const auto* from = static_cast<const Element*>(m.data) + number * (m.groups * m.channels) +
                       first_channel_ + channel;
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    return {words.x, words.y, words.z, words.w};
  }

  template <int kLoads>
  __device__ void load_vectors(int first, int step, Chunk<Element> (&chunks)[kLoads]) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) chunks[i] = gather(first + i * step);
  }

  template <int kLoads>
  __device__ void load(int first, int step, Chunk<Element> (&chunks)[kLoads]) const {
    load_vectors(first, step, chunks);
  }

 private:
  const Im2colNormsParams<Norm>& p_;
  BlockOrigin origin_;
  WindowStep step_;
  int first_channel_, channels_left_;
};

template <class Element>
__global__ void __launch_bounds__(kNormThreads, 2)
    im2col_norms(const __grid_constant__ Im2colNormsParams<NormOf<Element>> p) {
  const Im2colMatrix& m = p.matrix;
  const NormGroup group(norm_threads<Element>(m.log2_block() + p.log2_block_k));
  // 32 bits for fast division, as in NormPlace.
  const uint32_t number = blockIdx.x * (kNormThreads / group.threads) + group.index;
  const uint32_t depth_blocks = m.position_depth >> p.log2_block_k;
  const uint32_t depth = m.positions * depth_blocks, blocks = m.block_count();
  const uint32_t line = number / depth, k = number - line * depth;
  const uint32_t of_group = line / blocks, block_number = line - of_group * blocks;
  const uint32_t kernel_position = k / depth_blocks,
                 depth_block = k - kernel_position * depth_blocks;
  const bool exists = of_group < static_cast<uint32_t>(m.groups);

  const Im2colBlock<Element> block(p, exists, of_group, block_number, kernel_position,
                                   depth_block << p.log2_block_k);
  NormOf<Element> sum = 0;
  bool nonzero = false;
  sum_squares(block, group.thread, group.threads, sum, nonzero);
  const NormOf<Element> norm = norm_of_shares(block, group, exists, sum, nonzero);
  if (exists && group.thread == 0) p.norms[number] = norm;
}

}  // namespace spamm::kernels
