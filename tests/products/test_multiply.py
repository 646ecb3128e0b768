"""mm, addmm, bmm and linear against the oracle.

Most operands here are ``matrices.patchy``, whose products sum exactly in float32 and in TF32: a
right result then has one rounding, to the operands' type, and is compared bit for bit. Shapes,
layouts, types, numbers and knobs are the fuzzer's, of which tests/robustness runs 2,000 cases; here
is what none of them draws.
"""

import itertools

import matrices
import numpy as np
import pytest
import reference
import torch
import torch.utils.checkpoint
from processes import forked
from support import hopper_kernels_run, norm_maps

import spamm_torch

INF, NAN = float("inf"), float("nan")


def middle_tau(a, b, block, quantile=0.6):
    """A threshold that is the norm product of some block products, so that ties are decided too."""
    candidates = reference.thresholds(*norm_maps(a, b, block))
    return float(candidates[int(quantile * (len(candidates) - 1))])


def assert_exact(actual, a, b, tau, block, maps=None, **scaling):
    """The oracle's product, by the decisions that the library's norm maps make, rounded once."""
    assert actual.device == a.device
    maps = maps or norm_maps(a, b, block)
    expected = torch.from_numpy(reference.multiply(a, b, *maps, tau, block, **scaling)).to(a.dtype)
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)


# ---- mm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(70, 3000, 6000), (6000, 3000, 70), (1100, 70, 1300), (1101, 35, 1301)]
)
def test_operands_larger_than_caches_and_tiles(device, dtype, shape):
    m, k, n = (min(edge, 1500) for edge in shape) if device.type == "cpu" else shape
    a = matrices.patchy(m, k, dtype=dtype, device=device)
    b = matrices.patchy(k, n, dtype=dtype, device=device, seed=1)
    tau = middle_tau(a, b, 128)
    assert_exact(spamm_torch.mm(a, b, tau=tau, block=128), a, b, tau, 128)


def test_results_beyond_the_type_are_inf(device, dtype):
    """As in a dense product: the sum is rounded to the type once, where it may overflow."""
    largest = torch.finfo(dtype).max
    a = torch.tensor([[largest, 0.0], [largest, -largest]], dtype=dtype, device=device)
    b = torch.tensor([[2.0, 1.0], [2.0, 1.0]], dtype=dtype, device=device)
    result = spamm_torch.mm(a, b, tau=0.0).cpu()
    assert result[0].tolist() == [INF, largest]
    if dtype == torch.float16:  # its sums, in float32, do not overflow on the way
        assert result[1].tolist() == [0, 0]


@pytest.mark.parametrize("value", [-0.0, -3.5, -INF, NAN, "middle"])
@pytest.mark.parametrize("tau_dtype", [None, *matrices.DTYPES], ids=str)
@pytest.mark.parametrize("on_host", [False, True])
def test_thresholds_of_any_kind(device, dtype, value, tau_dtype, on_host):
    """Numbers, and tensors of any floating type. None that is not positive skips anything."""
    a = matrices.patchy(100, 150, dtype=dtype, device=device)
    b = matrices.patchy(150, 70, dtype=dtype, device=device, seed=1)
    tau = torch.tensor(middle_tau(a, b, 32) if value == "middle" else value)
    if tau_dtype is None:
        tau = 0.0 if tau.isnan() else tau.item()  # NaN is refused: test_errors
    else:
        tau = tau.to("cpu" if on_host else device, tau_dtype)
    actual, info = spamm_torch.mm(a, b, tau=tau, block=32, return_info=True)
    assert_exact(actual, a, b, tau, 32)
    assert info.tau.device == a.device
    assert info.tau == info.tau.new_tensor(float(tau)) or value != value


@pytest.mark.parametrize("block", [32, 64, (32, 64, 128), (128, 32, 64)])
@pytest.mark.parametrize("poisoned", ["a", "b"])
def test_what_is_skipped_is_not_even_multiplied_by_zero(force, device, dtype, block, poisoned):
    """Given maps, entries that are not finite can be skipped; they must not reach any result, in
    whichever of two segments they are.
    """
    force(2)
    m, k, n = reference.edges(block)
    a = matrices.patchy(300, 520, dtype=dtype, device=device)
    b = matrices.patchy(520, 400, dtype=dtype, device=device, seed=1)
    norm_a, norm_b = norm_maps(a, b, block)
    tau = spamm_torch.find_tau(norm_a, norm_b, 0.5)
    norm_a[-1, :], norm_b[:, -1] = 0.0, 0.0  # whole lines of blocks of C
    norm_a[1, 2] = norm_b[3, 1] = 0.0
    given = {"tau": tau, "block": block, "norm_a": norm_a, "norm_b": norm_b}
    expected = spamm_torch.mm(a, b, **given)
    if poisoned == "a":
        a[m : 2 * m, 2 * k : 3 * k] = NAN
        a[a.shape[0] // m * m :] = INF
    else:
        b[3 * k : 4 * k, n : 2 * n] = NAN
        b[:, b.shape[1] // n * n :] = INF
    assert torch.equal(spamm_torch.mm(a, b, **given), expected)


@pytest.mark.parametrize("tau", [0.5, -0.5])
def test_given_norms_below_zero_decide_by_their_products(device, dtype, tau):
    """No norm is, but what they say is done: two below zero make a valid product."""
    a = matrices.patchy(128, 128, dtype=dtype, device=device).t()
    b = matrices.patchy(128, 128, dtype=dtype, device=device, seed=1)
    given = {"device": device, "dtype": matrices.norm_dtype(dtype)}
    maps = [torch.tensor(x, **given) for x in ([[-1, 2], [1, -1]], [[-1, 1], [0.1, -3]])]
    actual = spamm_torch.mm(a, b, tau=tau, norm_a=maps[0], norm_b=maps[1])
    assert_exact(actual, a, b, tau, 64, maps)


# ---- Batches, linear -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 70, 90), (70, 90), (1, 90), (90,), (3, 1, 90), (1, 1, 1)])
def test_batched_product_with_input(device, shape):
    """The operator takes batches with an input, as torch.baddbmm does."""
    a = matrices.patchy(3, 70, 100, device=device)
    b = matrices.patchy(3, 100, 90, device=device, seed=1)
    tau = middle_tau(a, b, 32)
    input = matrices.patchy(*(1, *shape)[-3:], device=device).reshape(shape)
    scaling = {"input": input, "beta": 2, "alpha": -1}
    actual = torch.ops.spamm_torch.spamm(a, b, tau=torch.tensor(tau), block=32, **scaling)
    assert_exact(actual, a, b, tau, 32, **scaling)


@pytest.mark.parametrize("leading", [(), (1,), (70,), (3, 50), (2, 3, 20), (0,), (2, 0)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("pinned", [False, True])
def test_linear(device, dtype, leading, with_bias, strided, pinned):
    rows = int(np.prod(leading))
    flat = matrices.patchy(rows, 100, dtype=dtype, device=device)
    input = flat.reshape(*leading, 100)
    input = input.movedim(0, -1).contiguous().movedim(-1, 0) if strided else input
    weight = matrices.patchy(150, 100, dtype=dtype, device=device, seed=1)
    bias = matrices.patchy(1, 150, dtype=dtype, device=device)[0] if with_bias else None
    maps = norm_maps(flat, weight.t(), 32)
    tau = middle_tau(flat, weight.t(), 32)
    options = {"tau": tau, "block": 32, "norm_weight": maps[1] if pinned else None}
    actual, info = spamm_torch.linear(input, weight, bias, **options, return_info=True)
    assert actual.shape == (*leading, 150)
    assert_exact(actual.reshape(rows, 150), flat, weight.t(), tau, 32, input=bias)
    assert torch.equal(info.valid_ratio, spamm_torch.valid_ratio(*maps, tau))


# ---- Same bits, and what runs -------------------------------------------------------------------


PLAIN_KERNELS = {
    torch.float16: "cpu-plain-half",
    torch.bfloat16: "cpu-plain-half",
    torch.float32: "cpu-plain-float32",
    torch.float64: "cpu-plain",
}


def kernels_of_this_machine(device, dtype):
    """The names that backend_for may give without TF32, by what the processor or GPU can do."""
    if device.type == "cuda":
        everywhere, on_hopper = {
            torch.float16: ("sm80-mma-f16", "sm90-wgmma-f16"),
            torch.bfloat16: ("sm80-mma-bf16", "sm90-wgmma-bf16"),
            torch.float32: ("sm80-simt-f32", "sm90-wgmma-f32x3"),
            torch.float64: ("sm80-dmma-f64", "sm90-dmma-f64"),
        }[dtype]
        return {on_hopper if hopper_kernels_run() else everywhere}
    instructions = {torch.float16: "amx_fp16", torch.bfloat16: "amx_bf16"}.get(dtype)
    natively = torch.cpu.get_capabilities().get(instructions, False)  # if the system grants them
    return {PLAIN_KERNELS[dtype]} | ({"cpu-brgemm-vnni"} if natively else set())


@pytest.mark.parametrize("block", [32, 64, 128, (128, 64, 128), (64, 128, 32)])
def test_backend_for_names_a_kernel(device, dtype, block):
    name = spamm_torch.backend_for(device, dtype, block)
    assert name in kernels_of_this_machine(device, dtype)
    assert spamm_torch.backend_for(str(device), dtype, block) == name


# ---- The CPU's kernels and threads --------------------------------------------------------------


@pytest.mark.parametrize("block", [32, 64, 128, (128, 64, 128), (32, 128, 64)])
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
def test_with_and_without_onednn(dtype, block):
    """Matrix instructions and the plain kernels agree bit for bit on exact sums."""
    a, b = matrices.patchy(500, 700, dtype=dtype), matrices.patchy(700, 300, dtype=dtype, seed=1)
    expected = spamm_torch.mm(a, b, tau=10.0, block=block)
    with torch.backends.mkldnn.flags(enabled=False):
        plain = spamm_torch.mm(a, b, tau=10.0, block=block)
        name = spamm_torch.backend_for("cpu", dtype, block)
    assert torch.equal(plain, expected)
    assert name == PLAIN_KERNELS[dtype]


@pytest.mark.parametrize(
    "shape",
    [
        *((rows, 700, 345) for rows in (1, 12, 17, 40, 97)),
        *(
            pytest.param(shape, marks=pytest.mark.cuda)
            for shape in ((1100, 700, 1030), (2056, 130, 2056), (70, 2500, 90))
        ),
    ],
)
@pytest.mark.parametrize("block", [32, 64, (128, 64, 32)])
def test_layouts_change_no_bit(device, dtype, shape, block):
    """Operands are read where they lie, or copied; an entry is the same sum."""
    make = matrices.patchy if device.type == "cpu" else matrices.normal
    m, k, n = shape
    a = make(m, k, dtype=dtype, device=device)
    b = make(k, n, dtype=dtype, device=device, seed=1)
    given = dict(zip(("norm_a", "norm_b"), norm_maps(a, b, block), strict=True))
    options = {"tau": 1.0001 * float(spamm_torch.find_tau(*given.values(), 0.5)), "block": block}
    expected = spamm_torch.mm(a, b, **options, **given)
    assert not torch.equal(spamm_torch.mm(a, b, tau=0.0, block=block), expected)
    layouts = ("contiguous", "transposed", "every third column", "misaligned", "wide rows")
    for names in itertools.product(layouts, repeat=2):
        x, y = (matrices.LAYOUTS[name](of) for name, of in zip(names, (a, b), strict=True))
        assert torch.equal(spamm_torch.mm(x, y, **options, **given), expected), names
        if device.type == "cpu" or "every third column" in names:
            continue  # its own norms may round apart
        assert torch.equal(spamm_torch.mm(x, y, **options), expected), names
    square = a[:, :m][:, : a.shape[1]][: a.shape[1]]
    odd = matrices.LAYOUTS["misaligned"](square)
    twice = (spamm_torch.mm(x, y, **options) for x, y in ((odd, odd), (square, square.clone())))
    assert torch.equal(*twice)


def test_gradients_from_a_backward_thread():
    """Products inside torch.utils.checkpoint run again in autograd's own thread."""
    a = matrices.normal(60, 70).double().requires_grad_()
    b = matrices.normal(70, 50, seed=1).double()
    product = lambda x: spamm_torch.mm(x, b, tau=30.0)  # noqa: E731
    again = torch.utils.checkpoint.checkpoint(product, a, use_reentrant=False)
    gradients = (torch.autograd.grad(x.square().sum(), a)[0] for x in (again, product(a)))
    assert torch.equal(*gradients)


def test_long_sums_of_float64_are_as_accurate_as_torch():
    # The first term is 1, and each addition of another to it is lost.
    terms = 8192
    a, b = torch.full((1, terms), 2.0**-54, dtype=torch.float64), torch.ones(terms, 1).double()
    a[0, 0] = 1.0
    exact = 1.0 + (terms - 1) * 2.0**-54
    result = spamm_torch.mm(a, b, tau=0.0).item()
    assert abs(result - exact) <= 128 * 2.0**-54 + 2.0**-52


# Multiplies shapes in place, then so many others that the same operands are packed in the end:
# matrix instructions have a kernel for each. Then it prints by how many bytes the code that the
# process has made grows over many sizes, after as many others.
PROGRAM = """
import itertools
import re
import torch, spamm_torch

torch.manual_seed(0)
torch.set_num_threads(1)
SHAPES = [(1, 100, 70), (3, 33, 65), (17, 600, 100), (130, 1030, 200), (400, 100, 300)]
cases = []
for dtype, block, (m, k, n) in itertools.product(
    (torch.float32, torch.bfloat16), (32, 64, (128, 32, 64)), SHAPES
):
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    cases.append((a, b, block, spamm_torch.mm(a, b, tau=20.0, block=block)))
for k in range(600, 640):
    spamm_torch.mm(torch.ones(64, k).bfloat16(), torch.ones(k, 64).bfloat16(), tau=0.0)
for a, b, block, in_place in cases:
    rows = a.new_full((a.shape[0], a.shape[1] + 37), float("nan"))
    rows[:, : a.shape[1]] = a
    assert in_place.any()
    assert torch.equal(spamm_torch.mm(rows[:, : a.shape[1]], b, tau=20.0, block=block), in_place)

def bytes_of_generated_code():
    with open("/proc/self/maps") as maps:
        ranges = re.findall(r"^(\\w+)-(\\w+) ..x. \\S+ \\S+ 0 *$", maps.read(), re.MULTILINE)
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)

a, b = torch.ones(128 * 2048).bfloat16(), torch.ones(2048 * 64).bfloat16()

def multiply(sizes):
    for size in sizes:
        rows = 64 + size % 61
        spamm_torch.mm(a[: rows * size].view(rows, size), b[: size * 64].view(size, 64), tau=0.0)

multiply(range(600, 800))
before = bytes_of_generated_code()
multiply(range(800, 1000))
print(bytes_of_generated_code() - before)
"""


def test_packed_rows_change_no_bit_and_new_sizes_generate_no_more_code():
    run = forked("-c", PROGRAM)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 2**20  # kernels for each size would be 300 MiB
