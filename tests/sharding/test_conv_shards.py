"""conv2d of shards and conv2d(devices=): the bits of one device's conv2d, wherever the images lie.

On the CPU and on one GPU several shards share the device, which tries everything but the copies
between devices. With two GPUs the shards lie on both.
"""

import matrices
import pytest
import torch
import torch.nn.functional as F
from support import TWO_GPUS, check_overwritten, cut, flops_of
from torch.library import opcheck

import spamm_torch

ops = torch.ops.spamm_torch

KNOBS = [{"tau": 3.0}, {"valid_ratio": 0.5}, {"max_error": 0.1}, {"tau": 0.0}]


def name_of(knob):
    return "-".join(f"{name}={value}" for name, value in knob.items())


def images(count, channels=40, size=(7, 9), dtype=torch.float32, device="cpu"):
    """Images that fade from the middle, and the more the later they come in the batch."""
    values = matrices.normal(count, channels, *size, seed=1)
    for d, edge in ((2, size[0]), (3, size[1])):
        window = torch.exp(-torch.linspace(-2, 2, edge).square())
        values *= window.view([-1 if i == d else 1 for i in range(4)])
    values *= torch.linspace(1, 0.1, count).view(-1, 1, 1, 1)
    return values.to(device, dtype)


def weights(*shape, dtype=torch.float32, device="cpu"):
    return (matrices.normal(*shape, seed=2) / 8).to(device, dtype)


def check(input, weight, cuts, devices, bias=None, **options):
    """Shards against the whole batch on one device. Returns the whole."""
    expected = spamm_torch.conv2d(input, weight, bias, **options)
    shards = cut(input, cuts, devices)
    outputs = spamm_torch.conv2d(shards, weight, bias, **options)
    assert [x.device for x in outputs] == [x.device for x in shards]
    assert torch.equal(torch.cat([x.to(input.device) for x in outputs]), expected)
    return expected


# ---- Bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("knob", KNOBS, ids=name_of)
def test_shards_on_one_device(device, dtype, knob):
    input = images(200, dtype=dtype, device=device)
    weight = weights(72, 40, 3, 3, dtype=dtype, device=device)
    bias = matrices.normal(72, dtype=dtype, device=device, seed=3)
    options = {"bias": bias, "padding": 1, "activation": "silu"}
    whole = check(input, weight, (0, 64, 192, 200), [device] * 3, **options, **knob)
    dense = spamm_torch.conv2d(input, weight, **options, tau=0.0)
    assert torch.equal(whole, dense) == (knob == {"tau": 0.0})


def test_bad_values_are_never_skipped(device):
    input, weight = images(128, device=device), weights(24, 40, 3, 3, device=device)
    input[100, 3, 4, 4], weight[2, 5, 1, 1] = float("nan"), float("inf")
    for knob in ({"tau": 1e30}, {"valid_ratio": 0.1}):
        expected = spamm_torch.conv2d(input, weight, **knob)
        outputs = spamm_torch.conv2d([input[:64], input[64:]], weight, **knob)
        assert expected.isnan().any()
        assert torch.equal(torch.cat(outputs).nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("knob", KNOBS[:3], ids=name_of)
@pytest.mark.parametrize(
    "cuts", [(0, 0, 64, 64, 150), (0, 150, 150), (0, 128, 128, 150, 150), (0, 0, 0)]
)
def test_empty_shards(device, knob, cuts):
    input, weight = images(cuts[-1], device=device), weights(24, 40, 3, 3, device=device)
    check(input, weight, cuts, [device] * (len(cuts) - 1), **knob)


@pytest.mark.parametrize("knob", KNOBS[:3], ids=name_of)
@pytest.mark.parametrize(
    "setting",
    [
        {"groups": 2, "padding": 1, "stride": 2},
        {"groups": 4, "padding": "same", "dilation": 2, "block": 32},
        {"padding": "same", "block": (64, 32, 128)},
        {"padding": (2, 0), "stride": (1, 3), "pixel_block": (16, 2, 4)},
        {"padding": 1, "pixel_block": (1, 8, 8)},
        {"groups": 8, "pixel_block": (4, 4, 4)},
    ],
    ids=name_of,
)
def test_settings(device, knob, setting):
    input = images(140, device=device)
    weight = weights(32, 40 // setting.get("groups", 1), 4, 3, device=device)
    check(input, weight, (0, 128, 140), [device] * 2, **setting, **knob)


@pytest.mark.parametrize("knob", KNOBS[:3], ids=name_of)
def test_im2col_matrices_of_several_pieces(device, dtype, knob):
    input = images(40, 64, (16, 24), dtype=dtype, device=device)
    weight = weights(48, 64, 3, 3, dtype=dtype, device=device)
    check(input, weight, (0, 3, 38, 40), [device] * 3, padding=1, pixel_block=(1, 8, 8), **knob)


@pytest.mark.parametrize("knob", [{"valid_ratio": 0.5}, {"max_error": 0.1}], ids=name_of)
@pytest.mark.parametrize(("count", "cuts"), [(20, (0, 16, 20)), (3, (0, 2, 3)), (1, (0, 1, 1))])
def test_the_default_pixel_block_is_that_of_the_whole_batch(device, knob, count, cuts):
    input, weight = images(count, device=device), weights(72, 40, 3, 3, device=device)
    check(input, weight, cuts, [device] * 2, padding=1, **knob)


@pytest.mark.parametrize("input_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("weight_format", [torch.contiguous_format, torch.channels_last])
def test_memory_formats(device, input_format, weight_format):
    input = images(100, device=device).to(memory_format=input_format)
    weight = weights(24, 40, 3, 3, device=device).to(memory_format=weight_format)
    whole = check(input, weight, (0, 64, 100), [device] * 2, valid_ratio=0.5)
    shards = spamm_torch.conv2d([input[:64], input[64:]], weight, valid_ratio=0.5)
    for shard in shards:
        assert shard.stride() == whole[: len(shard)].stride()


def test_a_weight_for_each_shard_and_gradients_for_what_asks(device):
    input, weight = images(100, device=device), weights(24, 40, 3, 3, device=device)
    bias = matrices.normal(24, device=device)
    shards, both = [input[:64], input[64:]], [weight, weight.clone()]
    expected = spamm_torch.conv2d(input, weight, bias, valid_ratio=0.5)
    outputs = spamm_torch.conv2d(shards, both, (bias, bias.clone()), valid_ratio=0.5)
    assert torch.equal(torch.cat(outputs), expected)
    assert not any(output.requires_grad for output in outputs)
    asks = [input[:64].clone().requires_grad_(), input[64:], input[:0]]  # the last is empty
    outputs = spamm_torch.conv2d(asks, weight, tau=3.0)
    assert [output.requires_grad for output in outputs] == [True, False, False]


# In each of these the kernel or tile of a shard by itself would be another than the whole's.
@pytest.mark.cuda
@pytest.mark.parametrize("knob", [{"tau": 0.0}, {"valid_ratio": 0.5}], ids=name_of)
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize(
    ("count", "channels", "out_channels", "setting"),
    [
        (1024, 64, 256, {}),  # large tiles
        (256, 64, 256, {"pixel_block": (1, 8, 8)}),  # for float32, an im2col matrix
        (320, 64, 64, {}),  # an even number of 64-image blocks in a shard, not in the whole
        (96, 64, 72, {}),  # the last box is narrow in the whole
        (512, 128, 256, {"groups": 2}),
    ],
    ids=str,
)
def test_shards_take_the_kernels_of_the_whole(
    set_tf32, dtype, tf32, count, channels, out_channels, setting, knob
):
    if tf32 and dtype != torch.float32:
        pytest.skip("TF32 is a matter of float32")
    set_tf32(tf32)
    if "groups" in setting and knob == {"tau": 0.0}:
        knob = {"tau": 1e-30}  # groups that skip nothing are torch's convolution, whose bits vary
    input = images(count, channels, (8, 8), dtype=dtype, device="cuda")
    weight = weights(
        out_channels, channels // setting.get("groups", 1), 3, 3, dtype=dtype, device="cuda"
    )
    input = input.to(memory_format=torch.channels_last)
    check(input, weight, (0, 64, count), ["cuda"] * 2, padding=1, **setting, **knob)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_too_large_for_the_kernel_of_its_shards(dtype):
    """The portable convolution takes less than 2^19 images."""
    count = 2**19 + 64
    input = matrices.normal(count, 32, 1, 1, dtype=dtype, device="cuda")
    weight = weights(64, 32, 1, 1, dtype=dtype, device="cuda")
    check(input, weight, (0, 2**18, count), ["cuda"] * 2, tau=1.0)


# ---- Gradients, autocast, tracing ---------------------------------------------------------------


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("per_shard", [False, True])
def test_gradients_are_dense(device, relu, per_shard):
    input = images(100, dtype=torch.float64, device=device)
    weight = weights(24, 40, 3, 3, dtype=torch.float64, device=device)
    bias = matrices.normal(24, dtype=torch.float64, device=device)
    upstream = matrices.normal(100, 24, 5, 7, dtype=torch.float64, device=device, seed=4)

    leaves = [x.clone().requires_grad_() for x in (input, weight, bias)]
    shards = [leaves[0][:64], leaves[0][64:]]
    given = [[x.clone(), x.clone()] if per_shard else x for x in leaves[1:]]
    outputs = spamm_torch.conv2d(shards, *given, valid_ratio=0.5, relu=relu)
    grads = torch.autograd.grad(torch.cat(outputs), leaves, upstream)

    dense = [x.clone().requires_grad_() for x in (input, weight, bias)]
    whole = F.conv2d(*dense)
    if relu:
        # The result that decides what passes is the one with skipping.
        upstream = upstream * (torch.cat(outputs) > 0)
    for got, expected in zip(grads, torch.autograd.grad(whole, dense, upstream), strict=True):
        torch.testing.assert_close(got, expected)


def test_autocast(device):
    input, weight = images(100, device=device), weights(24, 40, 3, 3, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        whole = check(input, weight, (0, 64, 100), [device] * 2, valid_ratio=0.5)
    assert whole.dtype == torch.bfloat16


@pytest.mark.strength(1)
@pytest.mark.parametrize("knob", KNOBS[:2], ids=name_of)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(device, knob, requires_grad):
    input, weight = images(70, 8, device=device), weights(24, 8, 3, 3, device=device)
    weight.requires_grad_(requires_grad)
    bias = matrices.normal(24, device=device)
    if "tau" in knob:
        knob = {"tau": torch.tensor(3.0, device=device)}
    shards, options = [input[:64].clone(), input[64:].clone()], {"padding": (1, 1)}
    given = [weight], []
    if requires_grad:
        given = [weight, weight.detach().clone()], [bias, bias.clone()]
        options = {"activation": "relu"}
    opcheck(ops.conv2d_shards.default, (shards, *given), options | knob)


def test_compiles(device):
    input, weight = images(100, device=device), weights(24, 40, 3, 3, device=device)

    def convolve(shards, weight):
        outputs = spamm_torch.conv2d(shards, weight, tau=3.0, relu=True)
        return [output + 1 for output in outputs]

    compiled = torch.compile(convolve, fullgraph=True, backend="aot_eager")
    shards = [input[:64], input[64:]]
    for got, expected in zip(compiled(shards, weight), convolve(shards, weight), strict=True):
        assert torch.equal(got, expected)


def test_flops(device):
    input, weight = images(100, device=device), weights(24, 40, 3, 3, device=device)
    whole = flops_of(lambda: spamm_torch.conv2d(input, weight, tau=3.0))
    shards = [input[:64], input[64:]]
    assert flops_of(lambda: spamm_torch.conv2d(shards, weight, tau=3.0)) == whole > 0


# ---- Errors -------------------------------------------------------------------------------------

INPUT, WEIGHT = images(100, 8), weights(24, 8, 3, 3)
HALVES = [INPUT[:64], INPUT[64:]]
ODD = [INPUT[:50], INPUT[50:]]
TAU = {"tau": 0.1}
WHOLE_BLOCKS = "must be whole pixel blocks, a multiple of {} images; got 50"
DEVICES = "devices must be a sequence of GPU numbers .*; got "
NO_CUDA = "devices must be CUDA devices .*; got "


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        (([], WEIGHT), TAU, ValueError, "input_shards must hold at least one shard; got none"),
        (([1], WEIGHT), TAU, TypeError, "input must be a list of tensors; got int in it"),
        (
            ([INPUT], WEIGHT),
            {**TAU, "return_info": True},
            ValueError,
            "without .*; got return_info",
        ),
        ((HALVES, [WEIGHT] * 3), TAU, ValueError, "one tensor, or one for each .* 2 shards; got 3"),
        ((HALVES, WEIGHT, []), TAU, ValueError, "bias must be a tensor or a list .* an empty list"),
        ((ODD, WEIGHT), TAU, ValueError, WHOLE_BLOCKS.format(64)),
        ((ODD, WEIGHT), {"valid_ratio": 0.5}, ValueError, WHOLE_BLOCKS.format(64)),
        ((ODD, WEIGHT), {**TAU, "block": 32}, ValueError, WHOLE_BLOCKS.format(32)),
        ((ODD, WEIGHT), {**TAU, "pixel_block": (4, 4, 4)}, ValueError, WHOLE_BLOCKS.format(4)),
        (([INPUT, INPUT[..., :4]], WEIGHT), TAU, RuntimeError, "but for the images; got shapes"),
        (([INPUT[0]], WEIGHT), TAU, RuntimeError, r"be \(images, channels, height, width\)"),
        (([INPUT], WEIGHT[:, :4]), TAU, RuntimeError, "input must have 4 channels"),
        (([INPUT], WEIGHT, torch.ones(3)), TAU, RuntimeError, r"bias must have shape \[24\]"),
        (([*HALVES[:1], INPUT.double()], WEIGHT), TAU, TypeError, "dtype; got float32 and float64"),
        (([INPUT], WEIGHT), {}, ValueError, "exactly one of tau, valid_ratio and max_error"),
        (([INPUT], WEIGHT), {"tau": torch.ones((), requires_grad=True)}, RuntimeError, "gradient"),
        (
            (INPUT, WEIGHT),
            {"devices": [0], "norm_weight": ops.conv2d_weight_norm(WEIGHT), "return_norms": True},
            *(ValueError, "devices must be given without .*; got norm_weight and return_norms"),
        ),
    ],
)
def test_errors(given, options, error, message):
    if "devices" in options:
        options = {**TAU, **options}
    with pytest.raises(error, match=message):
        spamm_torch.conv2d(*given, **options)


@pytest.mark.parametrize(
    ("devices", "error", "message"),
    [
        ([], ValueError, "at least one CUDA device; got none"),
        ([1, 0, 1], ValueError, r"devices must be distinct; got \[1, 0, 1\]"),
        (["cpu"], ValueError, f"{NO_CUDA}cpu"),
        ([torch.device("cuda")], ValueError, f"{NO_CUDA}cuda"),
        (["gpu"], ValueError, f"{NO_CUDA}'gpu'"),
        (1, TypeError, f"{DEVICES}1"),
        ([0.5], TypeError, f"{DEVICES}0.5 in it"),
        ([0, []], TypeError, f"{DEVICES}\\[\\] in it"),
        ([True], TypeError, f"{DEVICES}True in it"),
        ([99], (ValueError, RuntimeError), "must be .*; got .*99"),
    ],
)
@pytest.mark.parametrize("call", [spamm_torch.mm, spamm_torch.conv2d])
def test_devices_that_are_refused(call, devices, error, message):
    given = (INPUT, WEIGHT) if call is spamm_torch.conv2d else (WEIGHT[0, 0], WEIGHT[0, 0])
    for some in (devices, iter(devices)) if isinstance(devices, list) else (devices,):
        with pytest.raises(error, match=message):
            call(*given, tau=0.1, devices=some)


@pytest.mark.cuda
def test_kinds_of_devices():
    with pytest.raises(RuntimeError, match="devices of one kind; got cpu and cuda:0"):
        spamm_torch.conv2d([INPUT[:64], INPUT[64:].cuda()], WEIGHT, tau=0.1)
    with pytest.raises(RuntimeError, match="tau must be on a device like the shards', cpu"):
        spamm_torch.conv2d([INPUT], WEIGHT, tau=torch.tensor(1.0).cuda())


# ---- GPUs ---------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("knob", KNOBS, ids=name_of)
def test_one_device_of_devices(knob):
    input, weight = images(150, device="cuda"), weights(24, 40, 3, 3, device="cuda")
    for x in (input, input[:0], input[3]):
        for devices in ([0], ["cuda:0"], [torch.device("cuda", 0)]):
            shared = spamm_torch.conv2d(x, weight, padding=1, devices=devices, **knob)
            assert torch.equal(shared, spamm_torch.conv2d(x, weight, padding=1, **knob))


@pytest.mark.cuda
def test_information_of_devices():
    input, weight = images(150, device="cuda"), weights(24, 40, 3, 3, device="cuda")
    _, expected = spamm_torch.conv2d(input, weight, valid_ratio=0.5, return_info=True)
    _, info = spamm_torch.conv2d(input, weight, valid_ratio=0.5, return_info=True, devices=[0])
    assert info == expected


@pytest.mark.cuda
@pytest.mark.multi_gpu
@pytest.mark.usefixtures("either_gpu_is_current")
class TestTwoGpus:
    @pytest.mark.parametrize("knob", KNOBS, ids=name_of)
    def test_shards(self, dtype, knob):
        input = images(200, dtype=dtype, device="cuda:0")
        weight = weights(72, 40, 3, 3, dtype=dtype, device="cuda:0")
        bias = matrices.normal(72, dtype=dtype, device="cuda:0", seed=3)
        for devices in (TWO_GPUS, TWO_GPUS[::-1]):
            check(input, weight, (0, 128, 200), devices, bias, padding=1, **knob)
        devices = [TWO_GPUS[1], TWO_GPUS[0], TWO_GPUS[1]]
        check(input, weight, (0, 64, 64, 200), devices, bias, padding=1, **knob)

    @pytest.mark.parametrize("knob", KNOBS, ids=name_of)
    @pytest.mark.parametrize("home", [0, 1])
    @pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
    def test_devices(self, dtype, knob, home, memory_format):
        input = images(300, dtype=dtype, device=f"cuda:{home}").to(memory_format=memory_format)
        weight = weights(72, 40, 3, 3, dtype=dtype, device=f"cuda:{home}")
        expected = spamm_torch.conv2d(input, weight, padding=1, **knob)
        for devices in ([0, 1], TWO_GPUS[::-1], [1 - home]):
            output = spamm_torch.conv2d(input, weight, padding=1, **knob, devices=devices)
            assert output.device == input.device
            assert output.stride() == expected.stride()
            assert torch.equal(output, expected)

    def test_images_on_the_host(self):
        input, weight = images(200), weights(24, 40, 3, 3)
        expected = spamm_torch.conv2d(input.cuda(), weight.cuda(), valid_ratio=0.5)
        output = spamm_torch.conv2d(input, weight, valid_ratio=0.5, devices=[0, 1])
        assert output.is_cpu
        assert torch.equal(output, expected.cpu())

    def test_tau_on_a_device(self):
        input, weight = images(200, device="cuda:0"), weights(24, 40, 3, 3, device="cuda:0")
        expected = spamm_torch.conv2d(input, weight, tau=3.0)
        tau = torch.tensor(3.0, device="cuda:0")
        for devices in ([0, 1], [1]):
            output = spamm_torch.conv2d(input, weight, tau=tau, devices=devices)
            assert torch.equal(output, expected)

    def test_gradients(self):
        input, weight = images(200, device="cuda:0"), weights(24, 40, 3, 3, device="cuda:0")
        input, weight = input.double(), weight.double()
        grads = []
        for devices in (None, [0, 1]):
            x, w = input.clone().requires_grad_(), weight.clone().requires_grad_()
            output = spamm_torch.conv2d(x, w, tau=3.0, devices=devices)
            output.square().sum().backward()
            grads.append((x.grad, w.grad))
        for got, expected in zip(*grads, strict=True):
            assert got.device == expected.device
            torch.testing.assert_close(got, expected)

    @pytest.mark.parametrize("knob", [{"tau": 3.0}, {"valid_ratio": 0.5}], ids=name_of)
    def test_side_streams_and_operands_overwritten(self, knob):
        input = images(1024, 64, (16, 16), torch.float16, "cuda:0")
        weight = weights(128, 64, 3, 3, dtype=torch.float16, device="cuda:0")
        expected = spamm_torch.conv2d(input, weight, padding=1, **knob)
        options = {"padding": 1, **knob}
        check_overwritten(
            lambda shards, weights: spamm_torch.conv2d(shards, *weights, **options),
            [cut(input, (0, 512, 1024), TWO_GPUS), [weight]],
            expected.split(512),
            rounds=30,
        )
        check_overwritten(
            lambda x: [spamm_torch.conv2d(*x, devices=[0, 1], **options)],
            [[input, weight]],
            [expected],
            rounds=30,
        )
