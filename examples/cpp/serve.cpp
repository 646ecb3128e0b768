// Runs a network that AOTInductor has packed, with spamm_torch's ops in it:
//   serve NETWORK.pt2 INPUT.pt OUTPUT.pt
// INPUT.pt is a tensor that torch.save has written, and OUTPUT.pt one for torch.load.
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <vector>

namespace {

at::Tensor read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "serve: cannot read ", path);
  return torch::jit::pickle_load({std::istreambuf_iterator<char>(file), {}}).toTensor();
}

void write(const char* path, const at::Tensor& x) {
  const std::vector<char> bytes = torch::jit::pickle_save(x);
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size())).flush();
  TORCH_CHECK(file, "serve: cannot write ", path);
}

int fail(char** arguments, const char* why) {
  std::fprintf(stderr, "serve %s %s %s: %s\n", arguments[1], arguments[2], arguments[3], why);
  return 1;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) {
    std::fprintf(stderr, "usage: serve NETWORK.pt2 INPUT.pt OUTPUT.pt\n");
    return 2;
  }
  try {
    torch::inductor::AOTIModelPackageLoader network(arguments[1]);
    write(arguments[3], network.run({read(arguments[2])}).at(0));
  } catch (const c10::Error& error) {
    return fail(arguments, error.what_without_backtrace());
  } catch (const std::exception& error) {  // from the packed network
    return fail(arguments, error.what());
  }
  return 0;
}
