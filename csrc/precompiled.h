// Compiled once a build and read before every host file: torch's headers take most of their time.
// Each file still includes what it uses.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/library.h>
