// PyTorch's setting for float32 products on CUDA.
#pragma once

namespace spamm {

// Whether float32 may be rounded to TF32, as PyTorch's own matrix products decide it. Another
// thread may change the setting at any time: ask once in each call and pass the answer on.
bool allow_tf32();

}  // namespace spamm
