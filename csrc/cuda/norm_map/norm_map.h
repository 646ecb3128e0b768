// Norm maps on CUDA: the order in which the kernels read a batch of matrices, where norms go, and
// the launches of kernels that compute norms alone.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <array>
#include <cstdint>

#include "block.h"
#include "kernels/conv/sm80/params.h"
#include "kernels/norm_map/params.h"

namespace at {
class Tensor;
}

namespace spamm::cuda {

// Calls run(Element{}) with the type of operands of `dtype`.
template <class Run>
void with_element(c10::ScalarType dtype, const Run& run) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return run(__half{});
    case c10::ScalarType::BFloat16:
      return run(__nv_bfloat16{});
    case c10::ScalarType::Float:
      return run(float{});
    default:
      return run(double{});
  }
}

// Matrices as numbers. No torch header: files that nvcc compiles would take several times as long.

constexpr int64_t kAlignment = 16;

// A batch of matrices, or a matrix as a batch of one: address, sizes and strides (in elements) of
// (batch, rows, columns). Plain numbers, because a view takes the host as long as a call through
// the dispatcher. The tensor must outlive them.
class Matrices {
 public:
  template <class Tensor>
  requires requires(const Tensor& x) { x.const_data_ptr(); }
  Matrices(const Tensor& x)  // NOLINT: a tensor serves wherever matrices do
      : data_(x.const_data_ptr()), element_size_(static_cast<int64_t>(x.element_size())) {
    const int64_t missing = 3 - x.dim();
    for (int64_t dim = missing; dim < 3; ++dim) {
      sizes_[dim] = x.size(dim - missing), strides_[dim] = x.stride(dim - missing);
    }
  }

  const void* data() const { return data_; }
  int64_t element_size() const { return element_size_; }
  int64_t size(int64_t dim) const { return sizes_[dim]; }
  int64_t stride(int64_t dim) const { return strides_[dim]; }
  int64_t numel() const { return sizes_[0] * sizes_[1] * sizes_[2]; }
  Matrices first() const {  // of the batch
    Matrices result = *this;
    result.sizes_[0] = 1;
    return result;
  }

 private:
  const void* data_;
  int64_t element_size_;
  std::array<int64_t, 3> sizes_ = {1, 1, 1}, strides_ = {0, 0, 0};
};

// The stride of a dimension; 0 if its size is at most 1.
inline int64_t step(const Matrices& x, int64_t dim) { return x.size(dim) > 1 ? x.stride(dim) : 0; }

class OnDevice;

// The norm kernels read along lines, which have the shorter stride. Whether the lines are rows. The
// sizes do not matter: a part of one row has the norms of the whole.
inline bool lines_are_rows(const Matrices& x) { return x.stride(2) <= x.stride(1); }

// The place of norms: the address and the strides of a map (batch, block rows, block columns).
struct MapMemory {
  void* norms = nullptr;  // null: nowhere
  std::array<int64_t, 3> strides = {};

  MapMemory() = default;
  MapMemory(void* norms, int64_t rows, int64_t columns)
      : norms(norms), strides{rows * columns, columns, 1} {}
};

template <class Norm>
kernels::NormMapParams<Norm> norm_map_params(const Matrices& x, int64_t block_rows,
                                             int64_t block_columns, const MapMemory& map) {
  const bool by_rows = lines_are_rows(x);
  const int64_t line = by_rows ? 1 : 2, entry = by_rows ? 2 : 1;
  kernels::NormMapParams<Norm> p{};
  p.data = x.data();
  p.batch = x.size(0), p.lines = x.size(line), p.length = x.size(entry);
  p.batch_stride = x.stride(0), p.line_stride = x.stride(line), p.entry_stride = x.stride(entry);
  p.log2_block_lines = log2_of(by_rows ? block_rows : block_columns);
  p.log2_block_length = log2_of(by_rows ? block_columns : block_rows);
  p.norms = static_cast<Norm*>(map.norms);
  p.norm_batch_stride = map.strides[0];
  p.norm_line_stride = map.strides[line], p.norm_entry_stride = map.strides[entry];

  const auto aligned = [&](int64_t size, int64_t stride) {
    return size == 1 || stride * x.element_size() % kAlignment == 0;
  };
  p.vector = p.entry_stride == 1 && aligned(p.lines, p.line_stride) &&
             aligned(p.batch, p.batch_stride) &&
             reinterpret_cast<uintptr_t>(p.data) % kAlignment == 0;
  return p;
}

// A norm map to compute: of `matrices`, in blocks of block_rows x block_columns.
struct MapJob {
  Matrices matrices;
  int64_t block_rows, block_columns;
  MapMemory map = {};  // of the norms' type
  // The copies of the matrices that the pass makes, see NormMapParams.
  void* copy = nullptr;
  int64_t copy_batch_stride = 0, copy_line_stride = 0;

  int64_t norms() const {
    return matrices.size(0) * blocks_of(matrices.size(1), block_rows) *
           blocks_of(matrices.size(2), block_columns);
  }
};

// The one that writes a contiguous map to `norms`.
inline MapJob job_for(const Matrices& x, int64_t block_rows, int64_t block_columns, void* norms) {
  const MapMemory map(norms, blocks_of(x.size(1), block_rows), blocks_of(x.size(2), block_columns));
  return {x, block_rows, block_columns, map};
}

// Refuses a map of more norms than the kernel counts; `name` and `shape` are those of the matrix.
void check_blocks(int64_t norms, const char* name, c10::IntArrayRef shape);

// Computes one or two maps of matrices of `dtype` in one launch; empty ones are left out. `zeroed`,
// if not null, is an int in device memory that the launch sets to 0. Returns whether there was one.
bool write_norm_maps(c10::ArrayRef<MapJob> jobs, c10::ScalarType dtype, int* zeroed,
                     int multiprocessors, cudaStream_t stream);

// Computes the op norm_map of a matrix or a batch (3-d) into `map`, which is contiguous and has the
// map's shape and dtype.
void norm_map_into(const at::Tensor& a, int64_t rows, int64_t columns, const at::Tensor& map,
                   const OnDevice& device);

// The norm pass for an im2col matrix that is not in memory. `dtype` is an operand type whose norms
// are of type Norm. There are 1 to 2^31 - 1 norms. `stream` is the current stream.
template <class Norm>
void launch_im2col_norms(const kernels::Im2colNormsParams<Norm>& params, c10::ScalarType dtype,
                         cudaStream_t stream);

// A batch of square matrices whose rows are contiguous.
struct SquareMatrices {
  void* data;
  int64_t batch, batch_stride, leading;  // leading: the stride of a row
  int64_t size;
};

// Makes `c` symmetric: mirrors what lies above the diagonal. Computes the norm map in blocks of
// 2^log2_block (32 or 64) into `norms`, (batch, blocks, blocks), unless that is null.
void launch_complete_symmetric(const SquareMatrices& c, c10::ScalarType dtype, int log2_block,
                               void* norms, cudaStream_t stream);

}  // namespace spamm::cuda
