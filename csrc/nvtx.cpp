// NVTX ranges of the library's ops and stages, for Nsight Systems: where SPAMM_TORCH_NVTX is 1 when
// the library is loaded. Elsewhere nothing is registered, and nothing is asked in any call.
#include <ATen/record_function.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <cstdlib>
#include <memory>
#include <string_view>

namespace spamm {
namespace {

using torch::profiler::impl::cudaStubs;  // torch's way to NVTX; not enabled without CUDA

// That a range was opened, and so is to be closed.
struct Opened : at::ObserverContext {};

std::unique_ptr<at::ObserverContext> open(const at::RecordFunction& record) {
  const std::string_view name = record.name();
  if (!name.starts_with("spamm_torch::") || !cudaStubs()->enabled()) return nullptr;
  cudaStubs()->rangePush(record.name());
  return std::make_unique<Opened>();
}

void close(const at::RecordFunction&, at::ObserverContext* opened) {
  if (opened != nullptr) cudaStubs()->rangePop();
}

bool hand_on_where_asked() {
  const char* const set = std::getenv("SPAMM_TORCH_NVTX");
  if (set == nullptr || std::string_view(set) != "1") return false;
  at::addGlobalCallback(at::RecordFunctionCallback(&open, &close)
                            .scopes({at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE}));
  return true;
}

const bool hands_on = hand_on_where_asked();

}  // namespace
}  // namespace spamm
