"""Every check of arguments: the exception's type and its one line, as golden.json has them."""

import functools
import importlib

import block_patterns as patterns
import matrices
import numpy
import pytest
import torch
from golden import assert_refused
from support import refuses
from torch._subclasses.fake_tensor import FakeTensorMode

import spamm_torch
from spamm_torch import _hints, linalg, sparse
from spamm_torch.distributed.plan import exchange_plan

ops = torch.ops.spamm_torch
mm, addmm, bmm, linear, norm_map, find_tau, backend_for = (
    getattr(spamm_torch, name)
    for name in ("mm", "addmm", "bmm", "linear", "norm_map", "find_tau", "backend_for")
)


def bsr(crow, col, edge=(32, 32), size=(96, 96), dtype=torch.float64):
    """A matrix that torch does not check."""
    values = torch.ones(len(col), *edge, dtype=dtype)
    return torch.sparse_bsr_tensor(
        torch.tensor(crow), torch.tensor(col), values, size=size, check_invariants=False
    )


A, B = (patterns.matrix(name, 3, 3, 32) for name in ("random", "banded"))
NORMS, F = norm_map(A), torch.diag(torch.arange(4.0).double()) + 0.1
NAMES = {name: getattr(spamm_torch, name) for name in spamm_torch.__all__}
NAMES |= {"ops": ops, "numpy": numpy, "torch": torch, "spamm_torch": spamm_torch, "bsr": bsr}
NAMES |= {"nan": float("nan"), "inf": float("inf"), "edges": (64, 64, 64), "F": F}
NAMES |= {"A": A, "B": B, "X": A.to_dense(), "norms": NORMS, "linalg": linalg, "sparse": sparse}
NAMES |= {"I": sparse.identity(96, 32, dtype=torch.float64), "solver": linalg.DensitySolver()}
NAMES["padded"] = sparse.from_dense(F, 32)
NAMES |= {"plan": sparse.plan(A, A, tau=1.0), "added": sparse.plan(A, A, tau=1.0, input=A)}
NAMES["turned"] = patterns.of_blocks(patterns.stored_in(A, 32).mT, A.values())
NAMES["of_scipy"] = type("csr_array", (), {"__module__": "scipy.sparse._csr"})()


def on(device):
    """Names whose tensors lie on a device: x is 40 x 40, n its norm map."""
    ones = functools.partial(torch.ones, device=device)
    images = ones(1, 2, 4, 4), ones(2, 2, 1, 1)
    more = {"ones": ones, "x": ones(40, 40), "n": ones(1, 1), "images": images}
    more["negative"] = torch.zeros(40, 40, dtype=torch.complex64, device=device).conj().imag
    return NAMES | more | {"tau": torch.tensor(1.0, device=device)}


MAPS = {"norm_a": torch.ones(8, 4), "norm_b": torch.ones(4, 6), "tau": 0.5}


def plan_of(**changed):
    return exchange_plan(**MAPS | {"cuts": [0, 256, 512]} | changed)


NAMES["plan_of"] = plan_of

# Every function that takes the three knobs, on a, b, and batches of both.
PRODUCTS = {
    "mm": lambda a, b, aa, bb, **knobs: mm(a, b, **knobs),
    "addmm": lambda a, b, aa, bb, **knobs: addmm(b[:1], a, b, **knobs),
    "bmm": lambda a, b, aa, bb, **knobs: bmm(aa, bb, **knobs),
    "linear": lambda a, b, aa, bb, **knobs: linear(a, b.t(), **knobs),
    "conv2d": lambda a, b, aa, bb, **knobs: spamm_torch.conv2d(
        a[None, None], b[None, None, :3, :3], **knobs
    ),
}
STAGES = {
    "find_tau": lambda x, y: find_tau(x, y, 0.5),
    "find_tau_for_error": lambda x, y: find_tau(x, y, max_error=0.5),
    "valid_counts": lambda x, y: spamm_torch.valid_counts(x, y, 1.0),
    "valid_ratio": lambda x, y: spamm_torch.valid_ratio(x, y, 1.0),
    "error_bound": lambda x, y: spamm_torch.error_bound(x, y, 1.0),
}


# ---- Lines --------------------------------------------------------------------------------------

# Functions that are to say the same of the same arguments: f in the calls of a group.
ALIKE = {
    "products": PRODUCTS,
    "stages": STAGES,
    "given norms": {"tau": 1.0, "valid_ratio": 0.5, "max_error": 0.5},
    "calls": {"": None},
    "on the cpu": {"": None},
    "without values": {"": None},
    "plans": {
        "exchange_plan": plan_of,
        "row_cuts": lambda **changed: spamm_torch.row_cuts(**MAPS | {"parts": 2} | changed),
    },
    "patterns": {
        "add": lambda a: sparse.add(a, A),
        "diagonal": sparse.diagonal,
        "inner": lambda a: sparse.inner(a, A),
        "mm": lambda a: mm(a, A, tau=1.0),
        "norm": sparse.norm,
        "permute": lambda a: sparse.permute(a, torch.arange(96)),
        "plan": lambda a: sparse.plan(a, A, tau=1.0),
        "submatrix": lambda a: sparse.submatrix(a, torch.arange(5)),
        "to_dense": sparse.to_dense,
        "to_scipy": sparse.to_scipy,
        "trace": sparse.trace,
        "transpose": sparse.transpose,
    },
}
ON_DEVICES = ("products", "stages", "given norms", "calls")
ON_META = ("products", "without values")
ON_THE_CPU = ("on the cpu", "plans", "patterns")


def ways(groups):
    """The functions of groups, each of which all calls of its group are made to."""
    pairs = [(group, way) for group in groups for way in ALIKE[group]]
    return pytest.mark.parametrize(("group", "way"), pairs)


def check(group, way, device="cpu"):
    names, f = on(device), ALIKE[group][way]
    if group == "products":
        a, b = matrices.normal(40, 50, device=device), matrices.normal(50, 30, device=device)
        f = functools.partial(f, a, b, a.expand(2, -1, -1), b.expand(2, -1, -1))
    elif group == "given norms":  # with blocks of 32 they are 4 x 5 and 5 x 3
        operands = names["ones"](100, 130), names["ones"](130, 70)
        f = functools.partial(mm, *operands, block=32, **{way: f})
    assert_refused(f"refused: {group}", names | {"f": f})


@ways(ON_DEVICES)
def test_lines(device, group, way):
    check(group, way, device)


@ways(ON_META)
def test_lines_while_tracing(group, way):
    """A call without shapes, or of other arguments, gets none."""
    check(group, way, "meta")


@ways(ON_THE_CPU)
def test_lines_on_the_cpu(group, way):
    check(group, way)


def test_no_hint_hides_a_name():
    for name, hints in _hints._HINTS.items():
        assert not set(hints) & set(dir(importlib.import_module(name)))


@pytest.mark.parametrize("product", PRODUCTS)
def test_operand_types(device, product):
    a, b = matrices.normal(40, 50, device=device), matrices.normal(50, 30, device=device)
    operands = a, b, a.expand(2, -1, -1), b.expand(2, -1, -1)
    for name in ("int64", "complex64", "int8", "bool", "float8_e4m3fn"):
        wrong = [operand.contiguous().to(getattr(torch, name)) for operand in operands]
        refuses(TypeError, lambda x=wrong: PRODUCTS[product](*x, tau=1.0), "float16", name)
    mixed = a, b.double(), operands[2], operands[3].double()
    refuses(TypeError, lambda: PRODUCTS[product](*mixed, tau=1.0), "float32", "float64")


# ---- Devices ------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize(("place", "other"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_tensors_on_two_devices(place, other):
    a = torch.ones(40, 40, device=place)
    for product in PRODUCTS.values():
        batch = a.expand(2, 40, 40)
        call = lambda p=product, bb=batch: p(a, a.to(other), bb, bb.to(other), tau=1.0)  # noqa: E731
        refuses(RuntimeError, call, "cpu", "cuda")
    for stage in STAGES.values():
        refuses(RuntimeError, lambda s=stage: s(a, a.to(other)), "cpu", "cuda")
    for name in ("input", "norm_a", "norm_b"):
        more = {"tau": torch.tensor(1.0), name: torch.ones(1, 1, device=other)}
        refuses(RuntimeError, lambda m=more: ops.spamm(a, a, **m), "cpu", "cuda")
    refuses(
        RuntimeError, lambda: linear(a, a, a[0].to(other), tau=1.0), "bias and input must be on"
    )
    if place == "cpu":
        tau = torch.tensor(1.0, device=other)
        for call in (spamm_torch.valid_counts, mm):
            refuses(RuntimeError, lambda c=call: c(a, a, tau=tau), "tau", "cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells of machines without a GPU")
def test_a_machine_without_a_gpu_says_so():
    a = torch.ones(40, 40)
    call = lambda: mm(a, a, tau=1.0, devices=[0])  # noqa: E731
    got = ["got 0"] if spamm_torch._library.BUILT["cuda"] else ["CPU only", "got [0]"]
    for _ in range(2):
        refuses((ValueError, RuntimeError), call, "devices must be CUDA devices", *got)
        with FakeTensorMode():  # from here on torch's device guard counts a device
            pass


@pytest.mark.skipif(
    bool(spamm_torch._library.BUILT["cuda"]), reason="tells of builds for the CPU only"
)
def test_a_build_for_the_cpu_only_says_what_to_do():
    refuses(RuntimeError, lambda: backend_for("cuda", torch.float32), "nvcc", "cuda")


# ---- Tensors of other kinds ---------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_nested_and_masked_tensors_are_refused(device):
    a = torch.ones(40, 40, device=device)
    others = {"a masked tensor": [torch.masked.masked_tensor(a, a > 0)], "a nested tensor": []}
    for layout in (torch.strided, torch.jagged):
        others["a nested tensor"].append(torch.nested.nested_tensor([a, a], layout=layout))
    for name, tensors in others.items():
        for other in tensors:
            refuses(TypeError, lambda x=other: mm(x, a, tau=1.0), f"got {name}")
            refuses(TypeError, lambda x=other: mm(a, x, tau=1.0), f"got {name}")
    for nested in others["a nested tensor"]:
        refuses(TypeError, lambda x=nested: norm_map(x), "got a nested tensor")


def test_integers_of_numpy_are_integers():
    a = torch.ones(40, 40)
    assert torch.equal(mm(a, a, tau=numpy.float64(0), block=numpy.int64(64)), a @ a)


# ---- Gradients ----------------------------------------------------------------------------------


def test_a_threshold_that_requires_a_gradient_is_refused(device):
    a = torch.ones(40, 40, device=device)
    parameter = torch.nn.Parameter(torch.tensor(1.0, device=device))
    for tau, name in ((parameter, "Parameter"), (parameter * 2, "Tensor")):
        refuses(RuntimeError, lambda t=tau: mm(a, a, tau=t), "gradient", name)
        refuses(RuntimeError, lambda t=tau: spamm_torch.valid_counts(a, a, t), "gradient", name)
    with torch.no_grad():
        refuses(RuntimeError, lambda: ops.spamm(a, a, tau=parameter), "gradient")
    a.requires_grad_()
    result = mm(a, a, tau=parameter.detach())
    assert torch.equal(result, a @ a)
    result.sum().backward()
    assert a.grad is not None


@pytest.mark.parametrize("transform", [torch.func.grad, lambda f: lambda x: torch.func.vjp(f, x)])
def test_gradients_of_functorch_are_refused(device, transform):
    x = torch.ones(40, 40, device=device)
    product = transform(lambda x: mm(x, x, tau=0.0).sum())
    refuses(NotImplementedError, lambda: product(x), "torch.autograd", "torch.func")
