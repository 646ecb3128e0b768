// Bad input: the type of the error, and one line that says what was expected and what came.
#include <c10/util/Exception.h>

#include <functional>

#include "support.h"

namespace spamm::testing {
namespace {

// The message of the error that a call raises; a failure where that is not an `Error`.
template <class Error>
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    EXPECT_NE(dynamic_cast<const Error*>(&error), nullptr) << error.what_without_backtrace();
    return error.what_without_backtrace();
  }
  ADD_FAILURE() << "no error";
  return "";
}

void expect_line(const std::string& message, const std::vector<std::string>& parts) {
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  for (const auto& part : parts) EXPECT_NE(message.find(part), std::string::npos) << message;
}

class Errors : public ::testing::Test {
 protected:
  Tensor a = at::ones({64, 64}), b = at::ones({64, 64});
  Knob knob = Knob{.threshold = 0.5};
};

TEST_F(Errors, ExactlyOneKnob) {
  expect_line(error_of<c10::ValueError>([&] { mm(a, b, {.knob = Knob{}}); }),
              {"exactly one", "got none"});
  Knob two = Knob{.valid_ratio = 0.5};
  two.max_error = 0.1;
  expect_line(error_of<c10::ValueError>([&] { mm(a, b, {.knob = two}); }),
              {"exactly one", "got valid_ratio and max_error"});
}

TEST_F(Errors, ATauIsATensorOrANumber) {
  Knob two = Knob{.tau = at::ones({})};
  two.threshold = 1;
  expect_line(error_of<c10::ValueError>([&] { mm(a, b, {.knob = two}); }),
              {"exactly one", "got tau and threshold"});
}

TEST_F(Errors, DtypesAndShapes) {
  expect_line(error_of<c10::TypeError>([&] { mm(a, b.to(at::kDouble), {.knob = knob}); }),
              {"one dtype", "float32", "float64"});
  expect_line(error_of<c10::Error>([&] { bmm(a, b, {.knob = knob}); }), {"3-d", "[64, 64]"});
  expect_line(
      error_of<c10::Error>([&] { linear(a, b.narrow(1, 0, 9), std::nullopt, {.knob = knob}); }),
      {"in_features", "[64, 9]"});
}

TEST_F(Errors, Shards) {
  const Tensor images = at::ones({100, 4, 5, 5}), weight = at::ones({8, 4, 3, 3});
  const auto with = [&](const std::vector<Tensor>& shards) {
    return error_of<c10::ValueError>([&] { conv2d_shards(shards, weight, {}, {.knob = knob}); });
  };
  expect_line(with({}), {"input_shards", "got none"});
  expect_line(with({images.narrow(0, 0, 50), images.narrow(0, 50, 50)}),
              {"whole pixel blocks", "multiple of 64", "got 50"});
}

TEST_F(Errors, DevicesAreDistinct) {
  const Tensor images = at::ones({100, 4, 5, 5}), weight = at::ones({8, 4, 3, 3});
  const auto with = [&](IntArrayRef devices) {
    return error_of<c10::ValueError>([&] {
      spamm::conv2d(images, weight, std::nullopt, {.knob = knob, .devices = DimVector(devices)});
    });
  };
  expect_line(with({}), {"devices", "got none"});
  expect_line(with({1, 1}), {"devices", "distinct", "got [1, 1]"});
}

}  // namespace
}  // namespace spamm::testing
