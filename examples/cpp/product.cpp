#include <ATen/ATen.h>
#include <spamm/spamm.h>

#include <cstdio>

int main() {
  const at::Tensor i = at::arange(1024, at::kDouble);
  const at::Tensor a = at::pow(0.9, (i.unsqueeze(1) - i).abs());
  const at::Tensor c = spamm::mm(a, a, {.knob = {.max_error = 1e-6}});
  const double error = ((c - a.mm(a)).norm() / a.norm().square()).item<double>();
  std::printf("error %.1e of norm(a) * norm(a), at most 1e-06\n", error);
  return error <= 1e-6 ? 0 : 1;
}
