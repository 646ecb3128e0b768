// The parameters of the kernels that order images by their centres of mass.
#pragma once

#include <cstdint>

namespace spamm::kernels::likeness {

constexpr int kMostImages = 1024;  // that one thread block orders

// The first channel of images; strides in entries.
struct CentreParams {
  const void* data;
  int64_t image_stride, row_stride, column_stride;
  int rows, columns;
  double* centres;  // rows, then columns, of all images
  int images;
};

// docs/experiments/likeness.md: by rows into bands, in these by columns, every other band
// backwards.
struct OrderParams {
  const double* centres;
  int images, bands;
  int64_t *order, *places;  // image at a place, and place of an image
};

}  // namespace spamm::kernels::likeness
