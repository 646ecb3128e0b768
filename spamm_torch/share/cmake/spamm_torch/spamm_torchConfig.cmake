# The CMake package of spamm_torch, for LibTorch programs:
#   find_package(spamm_torch CONFIG REQUIRED)
#   target_link_libraries(program PRIVATE spamm_torch::spamm_torch)
# CMAKE_PREFIX_PATH is what spamm_torch.cmake_prefix_path() says. The target brings the header, the
# library, and the LibTorch of the installed torch. torch's own CMake package is not used: for a torch
# with CUDA it asks for a CUDA toolkit, which a program that links spamm_torch does not need.
if(TARGET spamm_torch::spamm_torch)
  return()
endif()

get_filename_component(_spamm_package "${CMAKE_CURRENT_LIST_DIR}/../../.." REALPATH)
foreach(_spamm_file libspamm_torch.so _built.json)
  if(NOT EXISTS "${_spamm_package}/${_spamm_file}")
    set(${CMAKE_FIND_PACKAGE_NAME}_FOUND FALSE)
    set(${CMAKE_FIND_PACKAGE_NAME}_NOT_FOUND_MESSAGE
      "spamm_torch is not built: ${_spamm_package}/${_spamm_file} is missing; run `make build`")
    return()
  endif()
endforeach()

# An installed package has its header inside and torch beside it; a library built in place has its
# header in csrc/include, and _built.json says where its torch is.
set(_spamm_include "${_spamm_package}/include")
if(NOT EXISTS "${_spamm_include}")
  get_filename_component(_spamm_include "${_spamm_package}/../csrc/include" ABSOLUTE)
endif()
file(READ "${_spamm_package}/_built.json" _spamm_built)
string(JSON _spamm_torch ERROR_VARIABLE _spamm_installed GET "${_spamm_built}" torch_folder)
if(_spamm_installed)
  get_filename_component(_spamm_torch "${_spamm_package}/../torch" ABSOLUTE)
endif()
if(DEFINED spamm_torch_LIBTORCH)
  set(_spamm_torch "${spamm_torch_LIBTORCH}")
endif()

# The library is built for one minor version of torch.
string(JSON _spamm_expected GET "${_spamm_built}" torch)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _spamm_expected "${_spamm_expected}")
set(_spamm_found "none")
if(EXISTS "${_spamm_torch}/version.py" AND EXISTS "${_spamm_torch}/lib/libtorch.so")
  file(STRINGS "${_spamm_torch}/version.py" _spamm_found REGEX "^__version__ = ")
  string(REGEX REPLACE "^__version__ = '([0-9]+\\.[0-9]+).*" "\\1" _spamm_found "${_spamm_found}")
endif()
if(NOT _spamm_found STREQUAL _spamm_expected)
  set(${CMAKE_FIND_PACKAGE_NAME}_FOUND FALSE)
  set(${CMAKE_FIND_PACKAGE_NAME}_NOT_FOUND_MESSAGE
    "spamm_torch needs torch ${_spamm_expected} in ${_spamm_torch}; found ${_spamm_found}. Another \
place: -Dspamm_torch_LIBTORCH=FOLDER, the folder with torch's version.py")
  return()
endif()

add_library(spamm_torch::spamm_torch SHARED IMPORTED)
set_target_properties(spamm_torch::spamm_torch PROPERTIES
  IMPORTED_LOCATION "${_spamm_package}/libspamm_torch.so")
target_compile_features(spamm_torch::spamm_torch INTERFACE cxx_std_20)
target_include_directories(spamm_torch::spamm_torch SYSTEM INTERFACE
  "${_spamm_include}" "${_spamm_torch}/include" "${_spamm_torch}/include/torch/csrc/api/include")
target_link_libraries(spamm_torch::spamm_torch INTERFACE
  "${_spamm_torch}/lib/libtorch.so" "${_spamm_torch}/lib/libtorch_cpu.so" "${_spamm_torch}/lib/libc10.so")
# Kernels register themselves when they are loaded: no symbol of a program refers to torch's CUDA half.
target_link_options(spamm_torch::spamm_torch INTERFACE LINKER:--no-as-needed)
