// Ranges handed on to NVTX: those of ops and stages where SPAMM_TORCH_NVTX is 1, else none. ctest
// runs this file a second time with the variable set, since it is read when the library is loaded.
#include <torch/csrc/profiler/stubs/base.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "support.h"

namespace spamm::testing {
namespace {

using torch::profiler::impl::cudaStubs;
using torch::profiler::impl::ProfilerStubs;
using torch::profiler::impl::registerCUDAMethods;

// Stands for torch's way to NVTX, and remembers what is asked of it.
class Recorder final : public ProfilerStubs {
 public:
  Recorder() : before_(cudaStubs()) { registerCUDAMethods(this); }
  ~Recorder() override { registerCUDAMethods(const_cast<ProfilerStubs*>(before_)); }

  void record(c10::DeviceIndex*, torch::profiler::impl::ProfilerVoidEventStub*,
              int64_t*) const override {}
  float elapsed(const torch::profiler::impl::ProfilerVoidEventStub*,
                const torch::profiler::impl::ProfilerVoidEventStub*) const override {
    return 0;
  }
  void mark(const char*) const override {}
  void rangePush(const char* name) const override {
    names_.emplace_back(name);
    ++open_;
  }
  void rangePop() const override { --open_; }
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)>) const override {}
  void synchronize() const override {}

  int open() const { return open_; }
  bool has(std::string_view name) const {
    return std::find(names_.begin(), names_.end(), name) != names_.end();
  }
  const std::vector<std::string>& names() const { return names_; }

 private:
  const ProfilerStubs* before_;
  mutable std::vector<std::string> names_;
  mutable int open_ = 0;
};

bool is_asked_for() {
  const char* const set = std::getenv("SPAMM_TORCH_NVTX");
  return set != nullptr && std::string_view(set) == "1";
}

class Nvtx : public OnDevice {};
SPAMM_TEST_ON_DEVICES(Nvtx);

TEST_P(Nvtx, StagesHaveRanges) {
  const Tensor a = decaying(128, 128), x = at::rand({2, 32, 8, 8}, options());
  const Tensor weight = at::rand({64, 32, 3, 3}, options());
  const Recorder recorder;
  mm(a, a, {.knob = {.valid_ratio = 0.5}});
  EXPECT_EQ(recorder.has("spamm_torch::spamm"), is_asked_for());
  EXPECT_EQ(recorder.has("spamm_torch::find_tau"), is_asked_for());
  spamm::conv2d(x, weight, std::nullopt, {.knob = {.valid_ratio = 0.5}});
  for (const auto* const name :
       {"spamm_torch::conv2d", "spamm_torch::norm_map", "spamm_torch::multiply"}) {
    EXPECT_EQ(recorder.has(name), is_asked_for()) << name;
  }
  EXPECT_EQ(recorder.open(), 0);
  for (const std::string& name : recorder.names()) EXPECT_EQ(name.find("spamm_torch::"), 0) << name;
}

TEST_P(Nvtx, RangesEndWhereAnOpFails) {
  const Recorder recorder;
  EXPECT_ANY_THROW(mm(decaying(64, 32), decaying(64, 32), {.knob = {.valid_ratio = 0.5}}));
  EXPECT_EQ(recorder.open(), 0);
}

}  // namespace
}  // namespace spamm::testing
