// Takes the place of ATen's header of this name in a build for ThreadSanitizer (make tsan): a
// thread of its own for each part of a parallel loop. ThreadSanitizer sees what orders these
// threads, but not the barriers of OpenMP's library, which is not built for it: there it reports
// races that are none. The loops are cut as ATen cuts them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

#define INTRA_OP_PARALLEL

namespace at::internal {

template <typename F>
void invoke_parallel(int64_t begin, int64_t end, int64_t grain_size, const F& f) {
  int64_t parts = get_num_threads();
  if (grain_size > 0) parts = std::min(parts, divup(end - begin, grain_size));
  const int64_t length = divup(end - begin, parts);
  std::vector<std::exception_ptr> errors(parts);
  std::vector<std::thread> threads;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t from = begin + part * length;
    if (from >= end) break;
    threads.emplace_back([&, part, from] {
      try {
        ThreadIdGuard guard(static_cast<int>(part));
        f(from, std::min(end, from + length));
      } catch (...) {
        errors[part] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace at::internal
