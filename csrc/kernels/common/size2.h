// Rows and columns as 32-bit numbers.
#pragma once

namespace spamm::kernels {

struct Size2 {
  int rows, columns;
};

}  // namespace spamm::kernels
