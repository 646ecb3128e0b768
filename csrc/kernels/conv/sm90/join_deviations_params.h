// The parameters of the kernel that concatenates deviations along their channels.
#pragma once

#include "kernels/common/divisor.h"
#include "kernels/common/size2.h"

namespace spamm::kernels::conv::sm90 {

constexpr int kMostJoined = 4;

// Channels-last images, whose channels are a multiple of 16 bytes.
struct JoinSource {
  const void* data;
  int first, channels;  // of the output's channels
};

struct JoinParams {
  JoinSource parts[kMostJoined];
  int count;
  void* output;  // channels-last
  float* norms;  // (images, rows, columns, groups of 64 channels)
  int images, channels, groups;
  Size2 size;
  Divisor by_lanes;  // threads of a pixel; set by the launch
};
template <class Element>
cudaError_t launch_join_deviations(JoinParams params, cudaStream_t stream);

}  // namespace spamm::kernels::conv::sm90
