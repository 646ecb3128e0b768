"""Every check of arguments: the exception's type, one line, and the value that was refused."""

import itertools

import matrices
import numpy
import pytest
import torch
from support import refuses
from torch._subclasses.fake_tensor import FakeTensorMode

import spamm_torch

INF, NAN = float("inf"), float("nan")
ops = torch.ops.spamm_torch
mm, addmm, bmm, linear = (getattr(spamm_torch, n) for n in ("mm", "addmm", "bmm", "linear"))
norm_map, find_tau, backend_for = (
    getattr(spamm_torch, n) for n in ("norm_map", "find_tau", "backend_for")
)


def listed(shape):
    """A shape as messages have it, without brackets."""
    return ", ".join(map(str, shape))


@pytest.fixture(scope="module")
def operands(device):
    """(a, b, batches of a, batches of b)"""
    a, b = matrices.normal(40, 50, device=device), matrices.normal(50, 30, device=device)
    return a, b, a.expand(2, -1, -1), b.expand(2, -1, -1)


# Every function that takes the three knobs, on the operands above.
PRODUCTS = {
    "mm": lambda a, b, aa, bb, **knobs: mm(a, b, **knobs),
    "addmm": lambda a, b, aa, bb, **knobs: addmm(b[:1], a, b, **knobs),
    "bmm": lambda a, b, aa, bb, **knobs: bmm(aa, bb, **knobs),
    "linear": lambda a, b, aa, bb, **knobs: linear(a, b.t(), **knobs),
    "conv2d": lambda a, b, aa, bb, **knobs: spamm_torch.conv2d(
        a[None, None], b[None, None, :3, :3], **knobs
    ),
}
WRONG_TYPES = ("int64", "complex64")
every_product = pytest.mark.parametrize("product", PRODUCTS)
STAGES = {
    "find_tau": lambda x, y: find_tau(x, y, 0.5),
    "find_tau_for_error": lambda x, y: find_tau(x, y, max_error=0.5),
    "valid_counts": lambda x, y: spamm_torch.valid_counts(x, y, 1.0),
    "valid_ratio": lambda x, y: spamm_torch.valid_ratio(x, y, 1.0),
    "error_bound": lambda x, y: spamm_torch.error_bound(x, y, 1.0),
}
every_stage = pytest.mark.parametrize("stage", STAGES)
AT_TAU = (spamm_torch.valid_counts, spamm_torch.valid_ratio, spamm_torch.error_bound)


# ---- Knobs, blocks and types of every product ---------------------------------------------------


@every_product
@pytest.mark.parametrize(
    ("error", "knobs", "got"),
    [
        (ValueError, {}, "got none"),
        *(
            (ValueError, dict.fromkeys(names, 0.5), f"got {' and '.join(names)}")
            for count in (2, 3)
            for names in itertools.combinations(("tau", "valid_ratio", "max_error"), count)
        ),
        (ValueError, {"tau": NAN}, "got nan"),
        *((ValueError, {"valid_ratio": x}, f"got {x:g}") for x in (0.0, 1.5, -0.25, NAN, INF)),
        *((ValueError, {"max_error": x}, f"got {x}") for x in (-0.5, NAN)),
        *((ValueError, {"tau": 1.0, "block": x}, repr(x)) for x in (48, "64", True, 0, -64, 256)),
        *(
            (ValueError, {"tau": 1.0, "block": x}, listed(x))
            for x in ((32, 64, 16), (32, 64), (32, 32, 32, 32))
        ),
        *((TypeError, {"tau": torch.ones((), dtype=getattr(torch, t))}, t) for t in WRONG_TYPES),
        *((RuntimeError, {"tau": torch.ones(of)}, listed(of)) for of in ((1,), (2, 2))),
        (TypeError, {"tau": 1.0, "return_info": 1}, "return_info must be True or False; got 1"),
    ],
    ids=str,
)
def test_knobs_and_blocks(operands, product, error, knobs, got):
    if isinstance(knobs.get("tau"), torch.Tensor):
        knobs = {"tau": knobs["tau"].to(operands[0].device)}
    refuses(error, lambda: PRODUCTS[product](*operands, **knobs), got)


@every_product
def test_operand_types(operands, product):
    for name in (*WRONG_TYPES, "int8", "bool", "float8_e4m3fn"):
        wrong = [operand.contiguous().to(getattr(torch, name)) for operand in operands]
        refuses(TypeError, lambda x=wrong: PRODUCTS[product](*x, tau=1.0), "float16", name)
    a, b, aa, bb = operands
    mixed = a, b.double(), aa, bb.double()
    refuses(TypeError, lambda: PRODUCTS[product](*mixed, tau=1.0), "float32", "float64")


# ---- Single arguments ---------------------------------------------------------------------------


class FromScipy:
    """A sparse matrix of scipy, which the tests do not need otherwise."""


FromScipy.__module__ = "scipy.sparse._csr"


def image(x, **options):
    """conv2d of one image like x; options take the place of its arguments."""
    given = {"input": x.new_ones(1, 2, 4, 4), "weight": x.new_ones(2, 2, 1, 1), "tau": 1.0}
    return spamm_torch.conv2d(**{**given, **options})


NUMBERS = dict.fromkeys(("stride", "padding", "dilation"), "an integer or a pair")
NUMBERS |= {"groups": "an integer;"}
# A call on x, 40 x 40 ones; the exception; what its line holds.
SINGLE = [
    (lambda x: mm(x, x, valid_ratio="x"), TypeError, "valid_ratio"),
    (lambda x: mm(x, x, max_error=x.sum()), TypeError, "number; got tensor"),
    (lambda x: mm(x, x, tau="x"), TypeError, "tau"),
    (lambda x: mm(x, x, tau=True), TypeError, "got True"),
    (lambda x: mm(x, x, tau=10**400), ValueError, "tau must be a number that float64 holds"),
    (lambda x: addmm(x, x, x, beta=-(10**400), tau=1.0), ValueError, "beta must be a number that"),
    (lambda x: mm(x, x, tau=1.0, block=64.0), ValueError, "block"),
    (lambda x: mm(x, x, tau=1.0, norm_a=3), TypeError, "norm_a"),
    (lambda x: mm([[1.0]], x, tau=1.0), TypeError, "list"),
    (lambda x: mm(x.to_sparse(), x, tau=1.0), TypeError, "spamm_torch.sparse.from_sparse(a,"),
    (lambda x: mm(x, x, tau=1.0, return_norms=1), TypeError, "return_norms must be True or False"),
    (lambda x: mm(x, x, tau=1.0, symmetric=1), TypeError, "symmetric must be True or False; got 1"),
    (lambda x: addmm(x, x, x, tau=1.0, norm_b=x[:2, :2]), RuntimeError, "norm_b must have shape"),
    (lambda x: mm(x[:, :30], x[:30, :20], tau=0.0, symmetric=True),
     *(RuntimeError, "must be square; got shapes")),
    (lambda x: mm(x, x, tau=0.0, symmetric=True, block=(32, 64, 64)),
     *(ValueError, "must have m equal to n", "got m 32")),
    (lambda x: addmm(x[0], x, x, tau=0.0, symmetric=True),
     *(RuntimeError, "square matrix of 40 rows", "got shape [40]")),
    (lambda x: addmm(x, x, x, beta="x", tau=1.0), TypeError, "beta"),
    (lambda x: addmm(x, x, x, beta=1j, tau=1.0), TypeError, "got 1j"),
    (lambda x: addmm(None, x, x, tau=1.0), TypeError, "input"),
    (lambda x: addmm(x[0].double(), x, x, tau=1.0), TypeError, "float32", "float64"),
    (lambda x: addmm(x[0].to("meta"), x, x, tau=1.0), RuntimeError, "input", "meta"),
    (lambda x: linear(x, x, x, tau=1.0), RuntimeError, "bias"),
    (lambda x: linear(x, x, x[0].double(), tau=1.0), TypeError, "bias must have the operands' dty"),
    (lambda x: linear(x, x, norm_weight=x, tau=1.0), RuntimeError, "norm_weight must have shape ["),
    (lambda x: linear(x.int(), x.int(), tau=1.0), TypeError, "input must be float16, bfloat16"),
    (lambda x: linear(x, x.half(), tau=1.0), TypeError, "input and weight must have one dtype"),
    (lambda x: mm(x, x.to("meta"), tau=1.0), RuntimeError, "meta"),
    (lambda x: norm_map(x, None), ValueError, "block"),
    (lambda x: norm_map(x, 48), ValueError, "48"),
    (lambda x: norm_map(x, (32, 64, 128)), ValueError, "32, 64, 128"),
    (lambda x: norm_map([[1.0]]), TypeError, "list"),
    (lambda x: norm_map(x.int()), TypeError, "int32"),
    (lambda x: norm_map(x[0, :5]), RuntimeError, "got", "5"),
    (lambda x: find_tau(x, x, "x"), TypeError, "valid_ratio"),
    (lambda x: find_tau(x, x, 0.5, max_iterations=2.5), TypeError, "got 2.5"),
    (lambda x: find_tau(x, x, 0.5, tolerance="x"), TypeError, "tolerance"),
    (lambda x: find_tau(x, x, max_error=x.sum()), TypeError, "got tensor"),
    (lambda x: find_tau(x, x, 1.5), ValueError, "got 1.5"),
    (lambda x: find_tau(x, x), ValueError, "got none"),
    (lambda x: find_tau(x, x, 0.5, max_error=0.5), ValueError, "got both"),
    (lambda x: find_tau(x, x, 0.5, max_iterations=0), ValueError, "got 0"),
    (lambda x: find_tau(x, x, 0.5, tolerance=-0.25), ValueError, "got -0.25"),
    (lambda x: find_tau(x, x, max_error=-0.5), ValueError, "got -0.5"),
    (lambda x: ops.find_tau(x, x, max_error=NAN), ValueError, "got nan"),
    (lambda x: ops.find_tau(x, x, max_error=0.5, skip_norm_b=x[:2, :3]), *(RuntimeError, "2, 3")),
    (lambda x: ops.error_bound(x, x, torch.tensor(1.0), skip_norm_b=x[:2, :3]),
     *(RuntimeError, "2, 3")),
    (lambda x: spamm_torch.valid_counts(x, x, None), TypeError, "tau"),
    (lambda x: backend_for("cpu", "float32"), TypeError, "dtype"),
    (lambda x: backend_for("gpu", torch.float32), RuntimeError, "gpu"),
    (lambda x: backend_for("meta", torch.float32), RuntimeError, "meta"),
    (lambda x: backend_for(x.device, torch.float32, 48), ValueError, "48"),
    (lambda x: backend_for(x.device, torch.int32), TypeError, "int32"),
    (lambda x: spamm_torch.sparse.spatial_order(x.to("meta")), RuntimeError, "meta"),
    (lambda x: spamm_torch.mm_shards([x, None], [x, x], tau=1.0),
     *(TypeError, "a_shards must be a list of tensors; got NoneType in it")),
    (lambda x: ops.multiply(x, x, x[:2, :2], x[:2, :1], torch.tensor(1.0), (32, 32, 32)),
     *(RuntimeError, "norm_b", "[2, 2]", "[2, 1]")),
    (lambda x: image(x, pixel_block=(1.0, 8, 8)), ValueError, "pixel_block"),
    (lambda x: image(x, return_info="yes"), TypeError, "return_info must be True or False; got 'y"),
    (lambda x: image(x, return_norms="yes"), TypeError, "return_norms must be True or False; got"),
    (lambda x: image(x, relu="yes"), TypeError, "relu", "got 'yes'"),
    *((lambda x, n=name, v=value: image(x, **{n: v}), TypeError, name, kind, f"got {value}")
      for name, kind in NUMBERS.items() for value in (1.5, (1, 1.5), None, True)),
    *((lambda x, f=of: f(x, x, NAN), ValueError, "got nan") for of in AT_TAU),
    *((lambda x, f=of: f(x, x, torch.ones((), device="meta")), RuntimeError, "tau", "meta")
      for of in AT_TAU),
    *((lambda x, n=name: mm(x, x, **{"tau": 1.0, n: torch.ones(()).to("meta")}), RuntimeError,
       name, "meta") for name in ("tau", "norm_a", "norm_b")),
    (lambda x: mm(numpy.ones((4, 4)), x, tau=1.0), TypeError, "got ndarray (torch.from_numpy"),
    (lambda x: mm(FromScipy(), x, tau=1.0), TypeError, "of its toarray()"),
]  # fmt: skip


@pytest.mark.parametrize("case", SINGLE, ids=range(len(SINGLE)))
def test_single_arguments(device, case):
    call, error, *fragments = case
    refuses(error, lambda: call(torch.ones(40, 40, device=device)), *fragments)


# ---- Norm maps ----------------------------------------------------------------------------------


@every_stage
def test_type_of_maps(device, stage):
    norms = torch.ones(2, 2, device=device)
    refuses(TypeError, lambda: STAGES[stage](norms.half(), norms.half()), "float16")
    refuses(TypeError, lambda: STAGES[stage](norms.int(), norms.int()), "int32")
    refuses(TypeError, lambda: STAGES[stage](norms, norms.double()), "float32", "float64")


@every_stage
@pytest.mark.parametrize(
    "shapes",
    [
        *[((2, 3), (2, 3)), ((3,), (3, 2)), ((2, 2, 3), (3, 3, 2)), ((2, 2, 3), (3, 2))],
        *[((2, 3), (4, 2)), ((3,), (3,)), ((0, 3), (4, 0))],
    ],
    ids=str,
)
def test_shape_of_maps(device, stage, shapes):
    norms = [torch.ones(shape, device=device) for shape in shapes]
    refuses(RuntimeError, lambda: STAGES[stage](*norms), *map(listed, shapes))


@pytest.mark.parametrize("map_name", ["norm_a", "norm_b"])
@pytest.mark.parametrize(
    ("error", "norms", "got"),
    [
        *[(TypeError, torch.ones(1, 1).to(t), str(t)[6:]) for t in (torch.float64, torch.float16)],
        *[
            (RuntimeError, torch.ones(shape), listed(shape))
            for shape in ((2, 2), (3, 2), (1,), (1, 2, 1), (0, 0))
        ],
    ],
)
@pytest.mark.parametrize("knob", [{"tau": 1.0}, {"valid_ratio": 0.5}, {"max_error": 0.5}], ids=str)
def test_given_maps(device, map_name, error, norms, got, knob):
    """With blocks of 32 the maps of 100 x 130 and 130 x 70 are 4 x 5 and 5 x 3."""
    a, b = torch.ones(100, 130, device=device), torch.ones(130, 70, device=device)
    given = {"block": 32, map_name: norms.to(device), **knob}
    refuses(error, lambda: mm(a, b, **given), "got", got)


# ---- Shapes of operands -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "shapes", "hint"),
    [
        *(("mm", [(4, 5), (6, 7)], ""), ("mm", [(5,), (5, 7)], "")),
        ("mm", [(4, 5), (5,)], "use mm(a, b[:, None])[:, 0]"),
        ("mm", [(2, 4, 5), (2, 5, 7)], "use bmm"),
        *(("mm", [(2, 4, 4), (4, 4)], "use mm(a.flatten(0, 1), b)"), ("mm", [(), (5, 7)], "")),
        ("bmm", [(4, 5), (5, 7)], ""),
        ("bmm", [(2, 4, 5), (5, 7)], "use mm(a.flatten(0, 1), b)"),
        *(("bmm", [(2, 4, 5), (3, 5, 7)], ""), ("bmm", [(2, 4, 5), (2, 6, 7)], "")),
        *(("bmm", [(1, 2, 4, 5), (1, 2, 5, 7)], ""), ("linear", [(4, 5), (7, 6)], "")),
        *(("linear", [(4, 5), (5,)], ""), ("linear", [(), (7, 5)], "")),
        *(("addmm", [(3, 7), (4, 5), (6, 7)], ""), ("addmm", [(3, 7), (5,), (5, 7)], "")),
        *(("addmm", [(3, 7), (4, 5), (5, 7)], ""), ("addmm", [(4, 3), (4, 5), (5, 7)], "")),
        *(("addmm", [(2, 4, 7), (4, 5), (5, 7)], ""), ("addmm", [(6,), (4, 5), (5, 7)], "")),
    ],
)
def test_operand_shapes(device, function, shapes, hint):
    tensors = [torch.ones(shape, device=device) for shape in shapes]
    call = lambda: getattr(spamm_torch, function)(*tensors, tau=1.0)  # noqa: E731
    told = () if function == "addmm" else map(listed, shapes)
    refuses(RuntimeError, call, hint, "got", *told)


def test_a_product_of_matrices_has_no_batches(device):
    a = torch.ones(4, 5, device=device)
    with pytest.raises(RuntimeError) as caught:
        mm(a, a, tau=1.0)
    assert "batches" not in str(caught.value)


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
