// A stage of a product as torch's profilers show it.
#pragma once

#include <ATen/record_function.h>

namespace spamm {

constexpr const char* kNormMapStage = "spamm_torch::norm_map";
constexpr const char* kMultiplyStage = "spamm_torch::multiply";

// From construction to destruction. Ops that are dispatched have ranges from torch; this is for
// stages that are called directly. Without a profiler it costs a look at a variable of the thread.
class StageRange {
 public:
  // `stage` has the name of the op that does it alone.
  explicit StageRange(const char* stage) : record_(at::RecordScope::USER_SCOPE) {
    if (record_.isActive()) record_.before(stage);
  }

 private:
  at::RecordFunction record_;
};

}  // namespace spamm
