// PyTorch's setting for float32 products on CUDA.
#pragma once

namespace spamm {

// Whether float32 may be rounded to TF32, by the rule of PyTorch's own matrix products. Another
// thread may change the setting at any time, so ask once per call and pass the answer on.
bool allow_tf32();

}  // namespace spamm
