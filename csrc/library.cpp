// Every schema of the library and nothing else; arguments.h has the long ones as structs.
// Implementations register themselves in cpu/, cuda/ and the device-free files. Fake kernels are in
// Python.
#include <ATen/core/enum_tag.h>
#include <torch/library.h>

#include <string>
#include <vector>

namespace {

using std::string;

// No argument of a whole product or convolution must be given by name: from Python, each name that
// is looked for takes the host as long as a call through the dispatcher.
const string knob =
    "Tensor? tau=None, float? threshold=None, float? valid_ratio=None, float? max_error=None";
const string product =
    "Tensor a, Tensor b, " + knob +
    ", int[3] block=64, Tensor? norm_a=None, Tensor? norm_b=None, Tensor? input=None, "
    "Scalar beta=1, Scalar alpha=1, int[]? devices=None, bool symmetric=False";
const string geometry = "int[2] stride=1, int[2] padding=0, int[2] dilation=1, int groups=1";
const string blocks = "int[3]? block=None, int[3]? pixel_block=None";
const string convolution =
    "Tensor input, Tensor weight, Tensor? bias=None, " + geometry + ", " + knob + ", " + blocks +
    ", Tensor? norm_weight=None, Tensor? norm_input=None, Tensor? residual=None, "
    "str activation=\"none\", bool weight_is_ready=False";
const string pool =
    "Tensor input, int[2] kernel_size, int[2] stride=[], int[2] padding=0, int[2] dilation=1, "
    "bool ceil_mode=False";

}  // namespace

TORCH_LIBRARY(spamm_torch, m) {
  // For products and convolutions. Under torch.compile they keep the strides that eager calls have:
  // kernels read channels-last memory as it lies, and a copy would cost what they save.
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
  const auto define = [&](const string& schema) { m.def(schema.c_str(), tags); };

  // Stages.
  m.def("norm_map(Tensor a, int[2] block) -> Tensor");
  // Both in one launch where the device can. The matrices need not be operands of one product.
  m.def("norm_maps(Tensor a, Tensor b, int[3] block) -> (Tensor, Tensor)");
  // The threshold of a valid ratio or of an error bound; exactly one is given.
  m.def(
      "find_tau(Tensor norm_a, Tensor norm_b, float? valid_ratio=None, *, float? max_error=None, "
      "Tensor? skip_norm_b=None, int max_iterations=20, float tolerance=0.01) -> Tensor");
  // How many products have keys in each of `bins` ranges of 2^shift keys, the first of which begins
  // at `low`, and above them: int64 (bins + 1), all batches together. A product's key is its bit
  // pattern, as an integer; NaN has the key of infinity. `bins` is at most 2048, `shift` at most 20
  // (float64: 52), `low` 0-d int64 on the maps' device. It is at least 0, which is not checked,
  // because nothing here waits for the device.
  m.def(
      "product_histogram(Tensor norm_a, Tensor norm_b, Tensor low, int shift, int bins) -> Tensor");
  m.def("valid_counts(Tensor norm_a, Tensor norm_b, Tensor tau) -> Tensor");
  m.def(
      "error_bound(Tensor norm_a, Tensor norm_b, Tensor tau, *, Tensor? skip_norm_b=None) -> "
      "Tensor");
  // whole: (M, N) of the product that this one is a part of. It chooses the kernel, so that each
  // part has the bits of the whole.
  m.def(
      "multiply(Tensor a, Tensor b, Tensor norm_a, Tensor norm_b, Tensor tau, int[3] block, *, "
      "Tensor? input=None, Scalar beta=1, Scalar alpha=1, int[2]? whole=None) -> Tensor",
      tags);
  // Writes a @ b to `out`, which is a part of the result of a larger product. whole: (M, N) of that
  // product. It chooses the kernel, so that each part has the bits of the whole. own_rows: rows of
  // b from first_own_row on, which need not be in b; where a kernel cannot read them beside the
  // others, they are written to b. No gradient.
  m.def(
      "multiply_part(Tensor a, Tensor(b!) b, Tensor norm_a, Tensor norm_b, Tensor tau, int[3] "
      "block, "
      "Tensor(a!) out, *, int[2] whole, Tensor? own_rows=None, int first_own_row=0) -> ()");
  // The work of each block row, int64 (MB), in thousandths of a valid block product. With parts > 0
  // also parts + 1 block-row numbers, multiples of `multiple` but for the last: cuts by work. They
  // wait for the device.
  m.def(
      "row_work(Tensor norm_a, Tensor norm_b, Tensor tau, int parts=0, int multiple=1) -> (Tensor, "
      "int[])");

  // Pipelines.
  define("spamm(" + product + ") -> Tensor");
  // As spamm, and returns the norm map of the result in blocks (m, n). The norms have no gradient.
  define("spamm_with_norms(" + product + ") -> (Tensor, Tensor)");
  // As spamm, and writes the result to `out`, which has its shape and may share memory with any
  // argument. symmetric: what is written is the upper triangle, diagonal included, and its mirror
  // image. norms, if given, becomes out's norm map in blocks (m, n). No gradient.
  define("spamm_into(" + product + ", *, Tensor(a!) out, Tensor(b!)? norms=None) -> ()");
  // The product of operands in shards, one of A and one of B on each device. A's shards are its
  // rows, and B's are rows of K; or each device has the whole of B. The results are C's rows, each
  // where A's are.
  define("spamm_shards(Tensor[] a, Tensor[] b, *, " + knob + ", int[3] block=64) -> Tensor[]");
  // threshold: tau as a number that the host knows; no tensor enters a compiled graph. The result
  // is activation(convolution + bias + residual); activation.h names the activations. A convolution
  // of groups that the host knows to skip nothing is dense_conv2d's. weight_is_ready: the caller
  // promises that the weight was complete before this call, or before each replay of a captured
  // graph. Kernels may then read it while earlier kernels on the stream still run. devices: CUDA
  // devices to which the images are sent; conv2d_shards is called there, and its result gathered.
  define("conv2d(" + convolution + ", int[]? devices=None) -> Tensor");
  // As conv2d, and returns output norms, which the next layer accepts as norm_input. No gradient.
  define("conv2d_with_norms(" + convolution + ") -> (Tensor, Tensor)");
  // activation(convolution + bias + residual) by torch's convolution, or a device's call that fuses
  // the three. Nothing is skipped.
  define("dense_conv2d(Tensor input, Tensor weight, Tensor? bias=None, " + geometry +
         ", *, Tensor? residual=None, str activation=\"none\") -> Tensor");
  // For an input that is the deviation from a reference: activation(convolution + residual + base)
  // - activation(base). Base is the convolution of the reference and its bias, of one image; the
  // residual is a deviation, too. Where input and residual are zero, so is the result. Without a
  // knob dense_conv2d's convolution is called. The input is the concatenation of `parts` along
  // their channels; the result is channels-last unless there is one part. With `norms` also those
  // of the result's pixels, (images, rows, columns, blocks of 64 channels), else None. norm_parts:
  // such norms of each part. in_phases: the output's channels are [row][column][C] of 2 x 2 pixels,
  // and the result is (N, C, 2 H, 2 W), channels-last; with C = 32 its norms are those of two
  // neighbouring columns together, (N, 2 H, W, 1). No gradient.
  define("conv2d_deviation(Tensor[] parts, Tensor weight, Tensor base, " + geometry +
         ", *, float? threshold=None, float? valid_ratio=None, float? max_error=None, " + blocks +
         ", Tensor? norm_weight=None, Tensor[]? norm_parts=None, Tensor? residual=None, "
         "str activation=\"none\", bool in_phases=False, bool norms=False) -> (Tensor, Tensor)");
  // conv2d of a batch whose images are cut into shards, a shard or more on each device. Weight and
  // bias: one tensor, or one beside each shard; no bias: an empty list. Each result lies beside its
  // images. The results are those of the whole batch, bit for bit, if the devices are alike.
  define("conv2d_shards(Tensor[] input_shards, Tensor[] weight, Tensor[] bias, " + geometry +
         ", *, " + knob + ", " + blocks + ", str activation=\"none\") -> Tensor[]");
  // conv2d with nothing skipped, then torch's max pooling of 2 x 2 pixels with stride 2. Of a
  // batch; no gradient.
  define("conv2d_max_pool(Tensor input, Tensor weight, Tensor? bias=None, " + geometry +
         ", *, Tensor? norm_weight=None, str activation=\"none\") -> Tensor");
  // torch's max pooling of a batch, without indices, and with `norms` the output norms, else None.
  // No gradient.
  define("max_pool2d(" + pool + ", *, bool norms=False) -> (Tensor, Tensor)");
  // The same for deviations from a reference, one image: the max pooling of input + reference less
  // that of the reference, with norms as conv2d_deviation returns them. norm_input: norms of the
  // input's pixels, or of f neighbouring columns together, (N, H, W / f, blocks of 64 of f C
  // channels); windows that are zero need not be read then. No gradient.
  define("max_pool2d_deviation(Tensor input, Tensor reference, " +
         pool.substr(pool.find("int[2]")) + ", *, Tensor? norm_input=None) -> (Tensor, Tensor)");
  // Concatenates deviations (N, C, H, W) along their channels, with norms as conv2d_deviation
  // returns them. No gradient.
  m.def("join_deviations(Tensor[] parts) -> (Tensor, Tensor)", tags);
  // Norms (groups, MB, KB) of conv2d's weight matrix. Modules pin them.
  m.def(
      "conv2d_weight_norm(Tensor weight, int groups=1, *, int[3]? block=None, "
      "int[3]? pixel_block=None) -> Tensor");

  // On CUDA, for at most 1024 images: the images in the order of likeness_order() of the Python
  // package in bands that are given, that order, and the place of each image in it. Gradients pass
  // through the images. copies: without it the first is empty.
  m.def("order_images(Tensor images, int bands, bool copies=True) -> (Tensor, Tensor, Tensor)");

  // The name of the kernel that multiplies such matrices.
  m.def("backend_for(Device device, ScalarType dtype, int[3] block) -> str");
}
