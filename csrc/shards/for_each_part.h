// Runs the host's work for each part of a product, for several devices at once.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/thread_pool.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <latch>
#include <vector>

#include "shards/devices.h"
#include "shards/lane.h"

namespace spamm::shards {

// The current streams of the caller's thread.
inline std::vector<c10::Stream> current_streams(const std::vector<at::Device>& devices) {
  std::vector<c10::Stream> streams;
  for (const at::Device device : devices) streams.push_back(Lane::current(device).stream());
  return streams;
}

// Threads that stay, because a thread's first call of CUDA takes milliseconds. Never destroyed:
// CUDA may be gone before them. A task waits for no other task, so that a few threads suffice.
inline c10::ThreadPool& part_threads() {
  static auto* const threads =
      new c10::ThreadPool(std::max(1, static_cast<int>(cuda_devices()) - 1));
  return *threads;
}

// Calls run(part) for each part, on a thread of its own with these current streams. To enqueue a
// part's work takes the host about as long as the device needs for it. The caller's thread takes
// the first part. Throws what the first failed part threw, after all have ended. `run` is an op's
// implementation: below autograd.
template <class Run>
void for_each_part(int64_t parts, const std::vector<c10::Stream>& streams, const Run& run) {
  std::vector<std::exception_ptr> errors(parts);
  std::latch others(std::max<int64_t>(0, parts - 1));
  const auto run_part = [&](int64_t part) {
    try {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      const c10::MultiStreamGuard current(streams);
      at::init_num_threads();  // threads stay, and OpenMP keeps a number for each of them
      run(part);
    } catch (...) {
      errors[part] = std::current_exception();
    }
  };
  for (int64_t part = 1; part < parts; ++part) {
    part_threads().run([&, part] {
      run_part(part);
      others.count_down();
    });
  }
  if (parts > 0) run_part(0);
  others.wait();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace spamm::shards
