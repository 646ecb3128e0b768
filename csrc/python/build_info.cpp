// The compiler's part of the record of the build, for Python. It links no torch.
#include <pybind11/pybind11.h>

namespace {

#if defined(__clang__)
constexpr const char* kCompiler = "Clang " __clang_version__;
#elif defined(__GNUC__)
constexpr const char* kCompiler = "GCC " __VERSION__;
#else
constexpr const char* kCompiler = "unknown";
#endif

}  // namespace

PYBIND11_MODULE(_build_info, m) {
  m.doc() = "What compiled the library of operators.";
  m.attr("compiler") = kCompiler;
  m.attr("cxx_standard") = __cplusplus;
}
