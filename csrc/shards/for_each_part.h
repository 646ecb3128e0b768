// Runs the host's work for each part of a product, for several devices at once.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace spamm::shards {

// Calls run(part) for each part, each on a thread of its own with these current streams. To enqueue
// the work of a part takes the host a millisecond, about as long as the device needs for it. The
// caller's thread takes the first part. Throws what the first failed part threw, after all have
// ended. `run` is an op's implementation: below autograd.
template <class Run>
void for_each_part(int64_t parts, const std::vector<c10::Stream>& streams, const Run& run) {
  std::vector<std::exception_ptr> errors(parts);
  const auto run_part = [&](int64_t part) {
    try {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      const c10::MultiStreamGuard current(streams);
      run(part);
    } catch (...) {
      errors[part] = std::current_exception();
    }
  };
  std::vector<std::jthread> threads;
  for (int64_t part = 1; part < parts; ++part) threads.emplace_back(run_part, part);
  run_part(0);
  threads.clear();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace spamm::shards
