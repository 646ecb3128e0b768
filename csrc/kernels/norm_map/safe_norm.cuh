// Norms beyond the range in which plain sums of squares are right: from entries scaled by the power
// of two of the largest one.
#pragma once

namespace spamm::kernels {

// Within these bounds neither overflow nor underflow has hurt a sum of 2^14 squares.
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

// The second sum, by way of the largest magnitude: NaN where there is one.
template <class Norm>
class ScaledNorm {
 public:
  __device__ explicit ScaledNorm(Norm largest)
      : largest_(largest),
        is_number_(isfinite(largest) && largest > 0),
        exponent_(is_number_ ? ilogb(largest) : 0) {}

  // Else there is nothing to add: the norm is zero, infinite or NaN.
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
