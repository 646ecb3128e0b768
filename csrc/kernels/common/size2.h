// Rows and columns, in 32 bits, as kernels use them.
#pragma once

namespace spamm::kernels {

struct Size2 {
  int rows, columns;
};

}  // namespace spamm::kernels
