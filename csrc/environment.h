// Environment variables, which tests and comparisons set.
#pragma once

#include <c10/util/Exception.h>

#include <cstdlib>
#include <string>

namespace spamm {

inline std::string environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Whether a variable is 1. Refuses what is not 0 or 1: a test that sets it would else pass without
// what it is for.
inline bool is_set(const char* name) {
  const std::string given = environment(name);
  TORCH_CHECK_VALUE(given.empty() || given == "0" || given == "1", name, " must be 0 or 1; got ",
                    given);
  return given == "1";
}

}  // namespace spamm
