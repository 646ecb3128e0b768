"""Subjects of the CPU alone: threads, and microkernels."""

import matrices
import pytest
import torch
import torch.utils.checkpoint
from processes import forked

import spamm_torch


def operands(dtype, m=500, k=700, n=300, make=matrices.patchy):
    return make(m, k, dtype=dtype), make(k, n, dtype=dtype, seed=1)


PLAIN_KERNELS = {
    torch.float16: "cpu-blas-float32",
    torch.bfloat16: "cpu-blas-float32",
    torch.float32: "cpu-blas",
    torch.float64: "cpu-plain",
}


@pytest.mark.parametrize("block", [32, 64, 128, (128, 64, 128), (32, 128, 64)])
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
def test_with_and_without_onednn(dtype, block):
    """The generated microkernels and the plain ones agree bit for bit on exact sums."""
    a, b = operands(dtype)
    tau = 10.0
    expected = spamm_torch.mm(a, b, tau=tau, block=block)
    with torch.backends.mkldnn.flags(enabled=False):
        plain = spamm_torch.mm(a, b, tau=tau, block=block)
        name = spamm_torch.backend_for("cpu", dtype, block)
    assert torch.equal(plain, expected)
    assert name == PLAIN_KERNELS[dtype]


@pytest.mark.parametrize("rows", [1, 16, 17])
@pytest.mark.parametrize("block", [32, 64, (128, 64, 32)])
def test_b_in_place_has_the_bits_of_its_copy(dtype, rows, block):
    """B is read where it lies if few rows of A meet it."""
    a, b = operands(dtype, rows, 700, 336)
    m, k, n = block if isinstance(block, tuple) else (block,) * 3
    norms = {"norm_a": spamm_torch.norm_map(a, (m, k)), "norm_b": spamm_torch.norm_map(b, (k, n))}
    tau = float(spamm_torch.find_tau(*norms.values(), 0.5))
    expected = spamm_torch.mm(a, b, tau=tau, block=block, **norms)
    assert not torch.equal(spamm_torch.mm(a, b, tau=0.0, block=block), expected)
    for lies in (b.t().contiguous().t(), b.repeat_interleave(2, 1)[:, ::2]):
        assert torch.equal(spamm_torch.mm(a, lies, tau=tau, block=block, **norms), expected)


def test_gradients_from_a_backward_thread():
    """Products inside torch.utils.checkpoint run again in autograd's own thread."""
    a, b = operands(torch.float64, 60, 70, 50, matrices.normal)
    a.requires_grad_()
    again = torch.utils.checkpoint.checkpoint(
        lambda x: spamm_torch.mm(x, b, tau=30.0), a, use_reentrant=False
    )
    again.square().sum().backward()
    first, a.grad = a.grad, None
    spamm_torch.mm(a, b, tau=30.0).square().sum().backward()
    assert torch.equal(first, a.grad)


# ---- In a process of its own ---------------------------------------------------------------------

# Multiplies shapes in place, then so many others that the same operands are packed in the end.
# Then it prints by how many bytes the code that the process has made grows over many sizes, after
# as many others, and the number of operations of a product, for which nothing else is imported.
PROGRAM = """
import itertools
import re
import torch, spamm_torch
from torch.utils.flop_counter import FlopCounterMode

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
    spamm_torch.mm(torch.ones(64, k), torch.ones(k, 64), tau=0.0)
for a, b, block, in_place in cases:
    rows = a.new_full((a.shape[0], a.shape[1] + 37), float("nan"))
    rows[:, : a.shape[1]] = a
    assert in_place.any()
    assert torch.equal(spamm_torch.mm(rows[:, : a.shape[1]], b, tau=20.0, block=block), in_place)

def bytes_of_generated_code():
    with open("/proc/self/maps") as maps:
        ranges = re.findall(r"^(\\w+)-(\\w+) ..x. \\S+ \\S+ 0 *$", maps.read(), re.MULTILINE)
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)

a, b = torch.ones(128 * 2048), torch.ones(2048 * 64)

def multiply(sizes):
    for size in sizes:
        rows = 64 + size % 61
        spamm_torch.mm(a[: rows * size].view(rows, size), b[: size * 64].view(size, 64), tau=0.0)

multiply(range(600, 800))
before = bytes_of_generated_code()
multiply(range(800, 1000))
with FlopCounterMode(display=False) as counter:
    spamm_torch.mm(torch.ones(4, 5), torch.ones(5, 4), tau=0.0)
print(bytes_of_generated_code() - before, counter.get_total_flops())
"""


def test_packed_rows_change_no_bit_and_new_sizes_generate_no_more_code():
    run = forked("-c", PROGRAM)
    assert run.returncode == 0, run.stderr
    growth, flops = map(int, run.stdout.split())
    assert growth < 2**20  # kernels for each size would be 300 MiB
    assert flops == 160


# ---- Accuracy ------------------------------------------------------------------------------------


def relative_error(result, exact):
    return ((result.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("decay", ["algebraic", "exponential"])
def test_float32_is_as_accurate_as_torch_on_decay_matrices(decay):
    a = {
        "algebraic": lambda: matrices.algebraic_decay(1024, exponent=1.5),
        "exponential": lambda: matrices.exponential_decay(1024, base=0.99),
    }[decay]()
    exact = a.double() @ a.double()
    dense = relative_error(a @ a, exact)
    for block in (32, 64, 128):
        assert relative_error(spamm_torch.mm(a, a, tau=0.0, block=block), exact) <= 1.1 * dense


def test_long_sums_of_float64_are_as_accurate_as_torch():
    # The first term is 1, and each addition of another to it is lost.
    terms = 8192
    a, b = torch.full((1, terms), 2.0**-54, dtype=torch.float64), torch.ones(terms, 1).double()
    a[0, 0] = 1.0
    exact = 1.0 + (terms - 1) * 2.0**-54
    result = spamm_torch.mm(a, b, tau=0.0).item()
    assert abs(result - exact) <= 128 * 2.0**-54 + 2.0**-52


def test_float32_convolutions_are_as_accurate_as_torch():
    def decaying(*shape):
        values = torch.ones(shape)
        for d, length in enumerate(shape[1:], 1):
            scale = 0.1 / (torch.arange(length) ** 1.5 + 1)
            values *= scale.view([-1 if d == e else 1 for e in range(len(shape))])
        return values

    input, weight = decaying(64, 1024, 4, 4), decaying(64, 1024, 3, 3)
    exact = torch.nn.functional.conv2d(input.double(), weight.double(), padding=1)
    dense = relative_error(torch.nn.functional.conv2d(input, weight, padding=1), exact)
    for images, pixel_block in ((64, (64, 1, 1)), (2, (1, 8, 8))):
        result = spamm_torch.conv2d(
            input[:images], weight, padding=1, tau=0.0, pixel_block=pixel_block
        )
        assert relative_error(result, exact[:images]) <= 1.1 * dense
