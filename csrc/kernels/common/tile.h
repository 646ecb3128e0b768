// What heuristics.h says to the files that hold the kernels, which are spared its headers.
#pragma once

namespace spamm::cuda {

// Which of a kernel's two tiles: the shapes stand with their instances, in multiply/instances/*.cu.
enum class Tile { kSmall, kLarge };

}  // namespace spamm::cuda
