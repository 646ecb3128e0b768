// Norms whose plain sums of squares overflow or underflow: the entries are scaled by the power of
// two of the largest one.
#pragma once

namespace spamm::kernels {

// A sum of up to 2^14 squares between these bounds has suffered neither overflow nor underflow.
template <class Norm>
struct SafeSum;
template <>
struct SafeSum<float> {
  static constexpr float kLeast = 0x1p-90f, kMost = 0x1p127f;
};
template <>
struct SafeSum<double> {
  static constexpr double kLeast = 0x1p-960, kMost = 0x1p1023;
};

template <class Norm>
__device__ bool is_safe(Norm sum) {
  return sum >= SafeSum<Norm>::kLeast && sum <= SafeSum<Norm>::kMost;
}

// The scaled sum and its norm. `largest` is the largest magnitude, or NaN if an entry is NaN.
template <class Norm>
class ScaledNorm {
 public:
  __device__ explicit ScaledNorm(Norm largest)
      : largest_(largest),
        is_number_(isfinite(largest) && largest > 0),
        exponent_(is_number_ ? ilogb(largest) : 0) {}

  // If false, nothing needs to be added: the norm is zero, infinite or NaN.
  __device__ bool is_number() const { return is_number_; }

  __device__ Norm add(Norm sum, Norm entry) const {
    const Norm scaled = scalbn(entry, -exponent_);
    return fma(scaled, scaled, sum);
  }

  __device__ Norm norm(Norm sum) const {
    return is_number_ ? scalbn(sqrt(sum), exponent_) : largest_;
  }

 private:
  Norm largest_;
  bool is_number_;
  int exponent_;
};

}  // namespace spamm::kernels
