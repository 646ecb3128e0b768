// The parameters of the kernel that orders images by their centres of mass.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace spamm::kernels::likeness {

// docs/experiments/networks.md: by rows into bands, in these by columns, every other band
// backwards.
struct OrderParams {
  const void* data;                                 // the first channel of images
  int64_t image_stride, row_stride, column_stride;  // in entries
  int rows, columns;
  int images, bands;
  double* numbers;            // workspace: kNumbersAnImage of each image
  int64_t *order, *places;    // image at a place, and place of an image
  void* ordered;              // the images in order, as dense as `data`; null: not wanted
  int64_t image_bytes = 0;    // of an image, all of it
  bool whole_chunks = false;  // whether addresses and image_bytes are multiples of 16 bytes
};

constexpr int kNumbersAnImage = 3;

template <class T>
cudaError_t launch_order(const OrderParams& p, int multiprocessors, cudaStream_t stream);

}  // namespace spamm::kernels::likeness
