// Squares a matrix that decays away from its diagonal, with an error bound. Prints what share of
// the block products was computed, and the error that skipping the others made.
//
// Run: decay [DEVICE], as in "decay cuda". How to build it: CMakeLists.txt, beside this file.
#include <ATen/ATen.h>
#include <spamm/spamm.h>

#include <cstdio>

int main(int count, char** arguments) try {
  const int64_t size = 1024, block = 64;
  const double max_error = 1e-6;  // of norm(A) * norm(A)

  const at::Device device(count > 1 ? arguments[1] : "cpu");
  const at::Tensor i = at::arange(size, at::dtype(at::kDouble).device(device));
  const at::Tensor a = at::pow(0.9, (i.unsqueeze(1) - i).abs());

  // The three stages: norms of the blocks, a threshold from the error bound, the product.
  const at::Tensor norms = spamm::norm_map(a, {block, block});
  const at::Tensor tau = spamm::find_tau_for_error(norms, norms, max_error);
  const at::Tensor c = spamm::multiply(a, a, norms, norms, tau, {block, block, block});
  // The same in one call:
  const at::Tensor in_one = spamm::mm(a, a, {.knob = {.max_error = max_error}});

  const double error = ((c - a.mm(a)).norm() / a.norm().square()).item<double>();
  std::printf("valid ratio %.3f, error %.1e (at most %.1e)\n",
              spamm::valid_ratio(norms, norms, tau).item<double>(), error, max_error);
  return error <= max_error && c.equal(in_one) ? 0 : 1;
} catch (const c10::Error& error) {
  std::fprintf(stderr, "decay: %s\n", error.what_without_backtrace());
  return 1;
}
