// The record of the library's build, for Python. It links no torch. The facts come from the
// compiler and from macros that setup.py defines.
#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace {

#if defined(__clang__)
constexpr const char* kCompiler = "Clang " __clang_version__;
#elif defined(__GNUC__)
constexpr const char* kCompiler = "GCC " __VERSION__;
#else
constexpr const char* kCompiler = "unknown";
#endif

py::dict build_info() {
  py::dict info;
  info["version"] = SPAMM_VERSION;
  info["torch"] = SPAMM_TORCH_VERSION;
  info["compiler"] = kCompiler;
  info["cxx_standard"] = __cplusplus;
  info["cxx_flags"] = SPAMM_CXX_FLAGS;
#ifdef SPAMM_CUDA_VERSION
  info["cuda"] = SPAMM_CUDA_VERSION;
  info["arch_list"] = py::str(SPAMM_CUDA_ARCH_LIST).attr("replace")(";", " ").attr("split")();
  info["nvcc_flags"] = SPAMM_NVCC_FLAGS;
#else
  info["cuda"] = py::none();
  info["arch_list"] = py::list();
  info["nvcc_flags"] = py::none();
#endif
  return info;
}

}  // namespace

PYBIND11_MODULE(_build_info, m) {
  m.doc() = "How the library of operators was built.";
  m.def("build_info", &build_info);
}
