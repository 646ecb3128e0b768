"""Every check of arguments: the exception's type, one line, and the value that was refused."""

import matrices
import numpy
import pytest
import torch

import spamm_torch

INF, NAN = float("inf"), float("nan")
ops = torch.ops.spamm_torch


def refuses(error, call, *fragments):
    """The call raises ``error`` with one line that holds every fragment."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    for fragment in fragments:
        assert fragment in message, f"{fragment!r} is missing in: {message}"


@pytest.fixture(scope="module")
def operands(device):
    """(a, b, batches of a, batches of b)"""
    a, b = matrices.normal(40, 50, device=device), matrices.normal(50, 30, device=device)
    return a, b, a.expand(2, -1, -1), b.expand(2, -1, -1)


# Every function that takes the three knobs, on the operands above.
PRODUCTS = {
    "mm": lambda a, b, aa, bb, **knobs: spamm_torch.mm(a, b, **knobs),
    "addmm": lambda a, b, aa, bb, **knobs: spamm_torch.addmm(b[:1], a, b, **knobs),
    "bmm": lambda a, b, aa, bb, **knobs: spamm_torch.bmm(aa, bb, **knobs),
    "linear": lambda a, b, aa, bb, **knobs: spamm_torch.linear(a, b.t(), **knobs),
}
every_product = pytest.mark.parametrize("product", PRODUCTS)


# ---- Knobs and blocks: ValueError ---------------------------------------------------------------


@every_product
@pytest.mark.parametrize(
    ("knobs", "got"),
    [
        ({}, "got none"),
        ({"tau": 1.0, "valid_ratio": 0.5}, "got tau and valid_ratio"),
        ({"tau": 1.0, "max_error": 0.5}, "got tau and max_error"),
        ({"valid_ratio": 0.5, "max_error": 0.5}, "got valid_ratio and max_error"),
        (
            {"tau": 1.0, "valid_ratio": 0.5, "max_error": 0.5},
            "got tau and valid_ratio and max_error",
        ),
        ({"tau": NAN}, "got nan"),
        ({"valid_ratio": 0.0}, "got 0"),
        ({"valid_ratio": 1.5}, "got 1.5"),
        ({"valid_ratio": -0.25}, "got -0.25"),
        ({"valid_ratio": NAN}, "got nan"),
        ({"valid_ratio": INF}, "got inf"),
        ({"max_error": -0.5}, "got -0.5"),
        ({"max_error": NAN}, "got nan"),
        ({"tau": 1.0, "block": 48}, "got 48"),
        ({"tau": 1.0, "block": "64"}, "got '64'"),
        ({"tau": 1.0, "block": True}, "got True"),
        ({"tau": 1.0, "block": 0}, "0"),
        ({"tau": 1.0, "block": -64}, "-64"),
        ({"tau": 1.0, "block": 256}, "256"),
        ({"tau": 1.0, "block": (32, 64, 16)}, "[32, 64, 16]"),
        ({"tau": 1.0, "block": (32, 64)}, "[32, 64]"),
        ({"tau": 1.0, "block": (32, 32, 32, 32)}, "[32, 32, 32, 32]"),
    ],
)
def test_knobs_and_blocks(operands, product, knobs, got):
    refuses(ValueError, lambda: PRODUCTS[product](*operands, **knobs), got)


@pytest.mark.parametrize("block", [48, 0, (32, 48), (32, 64, 128), (-32, 32)])
def test_norm_map_block(operands, block):
    refuses(ValueError, lambda: spamm_torch.norm_map(operands[0], block), str(block).strip("()"))


@pytest.mark.parametrize("block", [48, (32, 64, 16)])
def test_backend_for_block(device, block):
    refuses(
        ValueError,
        lambda: spamm_torch.backend_for(device, torch.float32, block),
        str(block).strip("()"),
    )


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        ({"valid_ratio": 0.0}, "got 0"),
        ({"valid_ratio": 1.5}, "got 1.5"),
        ({"valid_ratio": NAN}, "got nan"),
        ({}, "got none"),
        ({"valid_ratio": 0.5, "max_error": 0.5}, "got both"),
        ({"valid_ratio": 0.5, "max_iterations": 0}, "got 0"),
        ({"valid_ratio": 0.5, "max_iterations": -3}, "got -3"),
        ({"valid_ratio": 0.5, "tolerance": -0.25}, "got -0.25"),
        ({"valid_ratio": 0.5, "tolerance": NAN}, "got nan"),
    ],
)
def test_find_tau_arguments(device, arguments, got):
    norms = torch.ones(2, 2, device=device)
    search = lambda: spamm_torch.find_tau(norms, norms, **arguments)  # noqa: E731
    refuses(ValueError, search, got)


@pytest.mark.parametrize("shapes", [((2, 3), (4, 2)), ((3,), (3,)), ((0, 3), (4, 0))], ids=str)
def test_find_tau_of_maps_that_do_not_fit(device, shapes):
    norm_a, norm_b = (torch.ones(shape, device=device) for shape in shapes)
    search = lambda: spamm_torch.find_tau(norm_a, norm_b, 0.5)  # noqa: E731
    refuses(RuntimeError, search, str(list(shapes[1])))


@pytest.mark.parametrize(("max_error", "got"), [(-0.5, "got -0.5"), (NAN, "got nan")])
def test_find_tau_for_error_argument(device, max_error, got):
    norms = torch.ones(2, 2, device=device)
    refuses(ValueError, lambda: ops.find_tau_for_error(norms, norms, max_error), got)
    refuses(ValueError, lambda: spamm_torch.find_tau(norms, norms, max_error=max_error), got)


@pytest.mark.parametrize(
    ("dtype", "shift", "bins", "got"),
    [
        (torch.float32, 0, 0, "got 0"),
        (torch.float32, 0, 2049, "got 2049"),
        (torch.float32, -1, 1, "got -1"),
        (torch.float32, 21, 1, "got 21"),
        (torch.float64, 53, 1, "got 53"),
    ],
)
def test_product_histogram_bins(device, dtype, shift, bins, got):
    norms = torch.ones(2, 2, device=device, dtype=dtype)
    low = torch.tensor(0, device=device)
    refuses(ValueError, lambda: ops.product_histogram(norms, norms, low, shift, bins), got)


def test_product_histogram_low(device):
    norms = torch.ones(2, 2, device=device)
    histogram = lambda low: ops.product_histogram(norms, norms, low, 0, 1)  # noqa: E731
    refuses(TypeError, lambda: histogram(torch.tensor(0.0, device=device)), "got float32")
    refuses(RuntimeError, lambda: histogram(torch.tensor([0, 1], device=device)), "[2]")


@pytest.mark.parametrize(
    "function", [spamm_torch.valid_counts, spamm_torch.valid_ratio, spamm_torch.error_bound]
)
def test_a_nan_float_is_no_threshold(device, function):
    norms = torch.ones(2, 2, device=device)
    refuses(ValueError, lambda: function(norms, norms, NAN), "got nan")


# ---- Types: TypeError ---------------------------------------------------------------------------


@every_product
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.int64, "int64"),
        (torch.int8, "int8"),
        (torch.bool, "bool"),
        (torch.complex64, "complex64"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
    ],
)
def test_operand_types(operands, product, dtype, name):
    wrong = [operand.contiguous().to(dtype) for operand in operands]
    refuses(TypeError, lambda: PRODUCTS[product](*wrong, tau=1.0), "float16", name)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.int32, "int32"), (torch.complex64, "complex64")]
)
def test_norm_map_type(device, dtype, name):
    a = torch.ones(40, 40, dtype=dtype, device=device)
    refuses(TypeError, lambda: spamm_torch.norm_map(a), name)
    refuses(TypeError, lambda: spamm_torch.backend_for(device, dtype), name)


@every_product
def test_mixed_types(operands, product):
    a, b, aa, bb = operands
    mixed = a, b.double(), aa, bb.double()
    refuses(TypeError, lambda: PRODUCTS[product](*mixed, tau=1.0), "float32", "float64")


def test_input_type(operands):
    a, b, *_ = operands
    input = torch.ones(30, device=a.device, dtype=torch.float64)
    refuses(TypeError, lambda: spamm_torch.addmm(input, a, b, tau=1.0), "float32", "float64")
    refuses(TypeError, lambda: spamm_torch.linear(a, b.t(), input, tau=1.0), "float32", "float64")


@every_product
@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.int64, "int64"), (torch.complex64, "complex64")]
)
def test_threshold_type(operands, product, dtype, name):
    tau = torch.ones((), dtype=dtype, device=operands[0].device)
    refuses(TypeError, lambda: PRODUCTS[product](*operands, tau=tau), "tau", name)


@pytest.mark.parametrize("map_name", ["norm_a", "norm_b"])
@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float64, "float64"), (torch.float16, "float16")]
)
def test_type_of_given_maps(operands, map_name, dtype, name):
    a, b, *_ = operands
    norms = torch.ones(1, 1, dtype=dtype, device=a.device)
    for knob in ({"tau": 1.0}, {"valid_ratio": 0.5}, {"max_error": 0.5}):
        refuses(TypeError, lambda k=knob: spamm_torch.mm(a, b, **k, **{map_name: norms}), name)


STAGES = {
    "find_tau": lambda x, y: spamm_torch.find_tau(x, y, 0.5),
    "find_tau_for_error": lambda x, y: spamm_torch.find_tau(x, y, max_error=0.5),
    "product_histogram": lambda x, y: ops.product_histogram(
        x, y, torch.tensor(0).to(x.device), 0, 1
    ),
    "valid_counts": lambda x, y: spamm_torch.valid_counts(x, y, 1.0),
    "valid_ratio": lambda x, y: spamm_torch.valid_ratio(x, y, 1.0),
    "error_bound": lambda x, y: spamm_torch.error_bound(x, y, 1.0),
}
every_stage = pytest.mark.parametrize("stage", STAGES)


@every_stage
def test_type_of_maps(device, stage):
    norms = torch.ones(2, 2, device=device)
    refuses(TypeError, lambda: STAGES[stage](norms.half(), norms.half()), "float16")
    refuses(TypeError, lambda: STAGES[stage](norms.int(), norms.int()), "int32")
    refuses(TypeError, lambda: STAGES[stage](norms, norms.double()), "float32", "float64")


# ---- Shapes: RuntimeError -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        ("mm", [(4, 5), (6, 7)]),
        ("mm", [(5,), (5, 7)]),
        ("mm", [(4, 5), (5,)]),
        ("mm", [(2, 4, 5), (2, 5, 7)]),
        ("mm", [(), (5, 7)]),
        ("bmm", [(4, 5), (5, 7)]),
        ("bmm", [(2, 4, 5), (5, 7)]),
        ("bmm", [(2, 4, 5), (3, 5, 7)]),
        ("bmm", [(2, 4, 5), (2, 6, 7)]),
        ("bmm", [(1, 2, 4, 5), (1, 2, 5, 7)]),
        ("linear", [(4, 5), (7, 6)]),
        ("linear", [(4, 5), (5,)]),
        ("linear", [(), (7, 5)]),
    ],
)
def test_operand_shapes(device, function, shapes):
    tensors = [torch.ones(shape, device=device) for shape in shapes]
    got = [", ".join(map(str, shape)) for shape in shapes]
    refuses(RuntimeError, lambda: getattr(spamm_torch, function)(*tensors, tau=1.0), *got)


@pytest.mark.parametrize(
    "shapes",
    [
        [(3, 7), (4, 5), (6, 7)],
        [(3, 7), (5,), (5, 7)],
        [(3, 7), (4, 5), (5, 7)],
        [(4, 3), (4, 5), (5, 7)],
        [(2, 4, 7), (4, 5), (5, 7)],
        [(6,), (4, 5), (5, 7)],
    ],
)
def test_addmm_shapes(device, shapes):
    tensors = [torch.ones(shape, device=device) for shape in shapes]
    refuses(RuntimeError, lambda: spamm_torch.addmm(*tensors, tau=1.0), "got")


def test_linear_bias_shape(device):
    input, weight = torch.ones(4, 5, device=device), torch.ones(7, 5, device=device)
    bias = torch.ones(6, device=device)
    refuses(RuntimeError, lambda: spamm_torch.linear(input, weight, bias, tau=1.0), "6")


@pytest.mark.parametrize("shape", [(), (5,)])
def test_norm_map_shape(device, shape):
    a = torch.ones(shape, device=device)
    refuses(RuntimeError, lambda: spamm_torch.norm_map(a), "got", ", ".join(map(str, shape)))


@every_product
@pytest.mark.parametrize("shape", [(1,), (2, 2)])
def test_threshold_shape(operands, product, shape):
    tau = torch.ones(shape, device=operands[0].device)
    got = ", ".join(map(str, shape))
    refuses(RuntimeError, lambda: PRODUCTS[product](*operands, tau=tau), "tau", got)


@pytest.mark.parametrize("map_name", ["norm_a", "norm_b"])
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (1,), (1, 2, 1), (0, 0)])
def test_shape_of_given_maps(device, map_name, shape):
    """With blocks of 32 the maps of 100 x 130 and 130 x 70 are 4 x 5 and 5 x 3."""
    a, b = torch.ones(100, 130, device=device), torch.ones(130, 70, device=device)
    norms = torch.ones(shape, device=device)
    for knob in ({"tau": 1.0}, {"valid_ratio": 0.5}, {"max_error": 0.5}):
        refuses(
            RuntimeError,
            lambda k=knob: spamm_torch.mm(a, b, block=32, **k, **{map_name: norms}),
            "got",
            ", ".join(map(str, shape)),
        )


def test_shape_of_the_maps_of_multiply(device):
    a, b = torch.ones(100, 130, device=device), torch.ones(130, 70, device=device)
    right, wrong = torch.ones(4, 5, device=device), torch.ones(4, 3, device=device)
    refuses(
        RuntimeError,
        lambda: ops.multiply(a, b, right, wrong, torch.tensor(1.0), (32, 32, 32)),
        "norm_b",
        "[5, 3]",
        "[4, 3]",
    )


@every_stage
@pytest.mark.parametrize(
    "shapes", [((2, 3), (2, 3)), ((3,), (3, 2)), ((2, 2, 3), (3, 3, 2)), ((2, 2, 3), (3, 2))]
)
def test_shape_of_maps(device, stage, shapes):
    norms = [torch.ones(shape, device=device) for shape in shapes]
    got = [", ".join(map(str, shape)) for shape in shapes]
    refuses(RuntimeError, lambda: STAGES[stage](*norms), *got)


def test_shape_of_skip_norms(device):
    norms, skip_norm = torch.ones(2, 2, device=device), torch.ones(2, 3, device=device)
    tau = torch.tensor(1.0)
    for op, limit in ((ops.error_bound, tau), (ops.find_tau_for_error, 0.5)):
        refuses(
            RuntimeError, lambda op=op, x=limit: op(norms, norms, x, skip_norm_b=skip_norm), "2, 3"
        )


# ---- Devices ------------------------------------------------------------------------------------


@pytest.mark.cuda
@every_product
def test_operands_on_two_devices(product):
    a, b = matrices.normal(40, 50), matrices.normal(50, 30)
    for wrong in ((a.cuda(), b), (a, b.cuda())):
        batches = [operand.expand(2, -1, -1) for operand in wrong]
        refuses(
            RuntimeError,
            lambda w=wrong, bb=batches: PRODUCTS[product](*w, *bb, tau=1.0),
            "cpu",
            "cuda",
        )


@pytest.mark.cuda
@pytest.mark.parametrize("misplaced", ["input", "norm_a", "norm_b"])
def test_another_tensor_on_another_device(misplaced):
    a = torch.ones(40, 40)
    for place, other in (("cuda", "cpu"), ("cpu", "cuda")):
        operand = a.to(place)
        more = {misplaced: torch.ones(1, 1, device=other)}
        refuses(
            RuntimeError,
            lambda x=operand, m=more: ops.spamm(x, x, tau=torch.tensor(1.0), **m),
            "cpu",
            "cuda",
        )


@pytest.mark.cuda
def test_maps_and_thresholds_on_another_device():
    norms = torch.ones(2, 2)
    for stage in STAGES.values():
        refuses(RuntimeError, lambda s=stage: s(norms.cuda(), norms), "cpu", "cuda")
        refuses(RuntimeError, lambda s=stage: s(norms, norms.cuda()), "cpu", "cuda")
    on_gpu = torch.tensor(1.0, device="cuda")
    refuses(RuntimeError, lambda: spamm_torch.valid_counts(norms, norms, on_gpu), "tau", "cuda")
    refuses(RuntimeError, lambda: spamm_torch.mm(norms, norms, tau=on_gpu), "tau", "cuda")


def test_meta_operands_do_not_mix_with_real_ones(device):
    a, b = torch.ones(40, 50, device=device), torch.ones(50, 30, device="meta")
    refuses(RuntimeError, lambda: spamm_torch.mm(a, b, tau=1.0), "meta", device.type)
    refuses(RuntimeError, lambda: spamm_torch.mm(b.t(), a.t(), tau=1.0), "meta", device.type)


@pytest.mark.parametrize("name", ["tau", "norm_a", "norm_b"])
def test_one_meta_tensor_among_real_ones_is_refused(device, name):
    a = torch.ones(40, 40, device=device)
    given = {"tau": torch.tensor(1.0), "norm_a": spamm_torch.norm_map(a)}
    given["norm_b"] = given["norm_a"].clone()
    given[name] = given[name].to("meta")
    refuses(RuntimeError, lambda: spamm_torch.mm(a, a, **given), name, "meta")


def test_a_meta_addend_among_real_operands_is_refused(device):
    a = torch.ones(40, 40, device=device)
    addend = torch.ones(40, device="meta")
    refuses(RuntimeError, lambda: spamm_torch.addmm(addend, a, a, tau=1.0), "input", "meta")


def test_a_meta_threshold_among_real_maps_is_refused(device):
    norms, tau = torch.ones(2, 2, device=device), torch.ones((), device="meta")
    for stage in (spamm_torch.valid_counts, spamm_torch.valid_ratio, spamm_torch.error_bound):
        refuses(RuntimeError, lambda stage=stage: stage(norms, norms, tau), "tau", "meta")


@pytest.mark.parametrize(
    ("call", "error", "fragment"),
    [
        (lambda a: spamm_torch.mm(a, a, valid_ratio="x"), TypeError, "valid_ratio"),
        (lambda a: spamm_torch.mm(a, a, max_error="x"), TypeError, "max_error"),
        (lambda a: spamm_torch.mm(a, a, max_error=a.sum()), TypeError, "number; got tensor"),
        (lambda a: spamm_torch.mm(a, a, tau="x"), TypeError, "tau"),
        (lambda a: spamm_torch.mm(a, a, tau=True), TypeError, "got True"),
        (lambda a: spamm_torch.mm(a, a, valid_ratio=True), TypeError, "got True"),
        (lambda a: spamm_torch.mm(a, a, max_error=False), TypeError, "got False"),
        (lambda a: spamm_torch.find_tau(a, a, "x"), TypeError, "valid_ratio"),
        (lambda a: spamm_torch.find_tau(a, a, 0.5, max_iterations=2.5), TypeError, "got 2.5"),
        (lambda a: spamm_torch.find_tau(a, a, 0.5, tolerance="x"), TypeError, "tolerance"),
        (lambda a: spamm_torch.find_tau(a, a, max_error=a.sum()), TypeError, "got tensor"),
        (lambda a: spamm_torch.addmm(a, a, a, beta="x", tau=1.0), TypeError, "beta"),
        (lambda a: spamm_torch.addmm(a, a, a, beta=1j, tau=1.0), TypeError, "got 1j"),
        (lambda a: spamm_torch.addmm(a, a, a, alpha=None, tau=1.0), TypeError, "alpha"),
        (lambda a: spamm_torch.mm(a, a, tau=1.0, block=64.0), ValueError, "block"),
        (lambda a: spamm_torch.mm(a, a, tau=1.0, block="64"), ValueError, "block"),
        (lambda a: spamm_torch.mm(a, a, tau=1.0, block=None), ValueError, "block"),
        (lambda a: spamm_torch.mm(a, a, tau=1.0, block=a.sum()), ValueError, "block"),
        (lambda a: spamm_torch.mm(a, a, tau=1.0, norm_a=3), TypeError, "norm_a"),
        (lambda a: spamm_torch.mm([[1.0]], a, tau=1.0), TypeError, "list"),
        (lambda a: spamm_torch.mm(a.to_sparse(), a, tau=1.0), TypeError, "call to_dense()"),
        (lambda a: spamm_torch.addmm(None, a, a, tau=1.0), TypeError, "input"),
        (lambda a: spamm_torch.linear(a, a, a, tau=1.0), RuntimeError, "bias"),
        (lambda a: spamm_torch.norm_map(a, None), ValueError, "block"),
        (lambda a: spamm_torch.norm_map([[1.0]]), TypeError, "list"),
        (lambda a: spamm_torch.valid_counts(a, a, None), TypeError, "tau"),
        (lambda a: spamm_torch.backend_for("cpu", "float32"), TypeError, "dtype"),
        (lambda a: spamm_torch.backend_for("gpu", torch.float32), RuntimeError, "got 'gpu'"),
        (lambda a: spamm_torch.backend_for(2.5, torch.float32), TypeError, "got 2.5"),
        (
            lambda a: spamm_torch.conv2d(
                a.view(1, 1, 40, 40), a.view(1, 1, 40, 40), tau=1.0, pixel_block=(1.0, 8, 8)
            ),
            ValueError,
            "pixel_block",
        ),
    ],
)
def test_arguments_of_a_wrong_type(device, call, error, fragment):
    refuses(error, lambda: call(torch.ones(40, 40, device=device)), fragment)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused(device, layout):
    a = torch.ones(40, 40, device=device)
    nested = torch.nested.nested_tensor([a, a], layout=layout)
    for operands in ((nested, a), (a, nested)):
        refuses(TypeError, lambda o=operands: spamm_torch.mm(*o, tau=1.0), "got a nested tensor")
    refuses(TypeError, lambda: spamm_torch.norm_map(nested), "got a nested tensor")


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_masked_tensors_are_refused(device):
    a = torch.ones(40, 40, device=device)
    masked = torch.masked.masked_tensor(a, a > 0)
    for operands in ((masked, a), (a, masked)):
        refuses(TypeError, lambda o=operands: spamm_torch.mm(*o, tau=1.0), "got a masked tensor")


def test_a_threshold_that_requires_a_gradient_is_refused(device):
    a = torch.ones(40, 40, device=device)
    parameter = torch.nn.Parameter(torch.tensor(1.0, device=device))
    for tau, name in ((parameter, "Parameter"), (parameter * 2, "Tensor")):
        refuses(RuntimeError, lambda t=tau: spamm_torch.mm(a, a, tau=t), "gradient", name)
        refuses(RuntimeError, lambda t=tau: spamm_torch.valid_counts(a, a, t), "gradient", name)
    with torch.no_grad():
        refuses(RuntimeError, lambda: ops.spamm(a, a, tau=parameter), "gradient")
    assert torch.equal(spamm_torch.mm(a, a, tau=parameter.detach()), a @ a)


@pytest.mark.parametrize(
    ("function", "shapes", "hint"),
    [
        ("mm", [(2, 4, 4), (2, 4, 4)], "use bmm"),
        ("mm", [(2, 4, 4), (4, 4)], "use mm(a.flatten(0, 1), b)"),
        ("bmm", [(2, 4, 4), (4, 4)], "use mm(a.flatten(0, 1), b)"),
        ("mm", [(4, 4), (4,)], "use mm(a, b[:, None])[:, 0]"),
    ],
)
def test_other_products_are_pointed_to(device, function, shapes, hint):
    operands = [torch.ones(shape, device=device) for shape in shapes]
    refuses(RuntimeError, lambda: getattr(spamm_torch, function)(*operands, tau=1.0), hint)


class FromScipy:
    """A sparse matrix of scipy, which the tests do not need otherwise."""


FromScipy.__module__ = "scipy.sparse._csr"


@pytest.mark.parametrize(
    ("operand", "hint"),
    [(numpy.ones((4, 4)), "got ndarray (torch.from_numpy"), (FromScipy(), "of its toarray()")],
)
def test_operands_of_other_libraries(operand, hint):
    refuses(TypeError, lambda: spamm_torch.mm(operand, torch.ones(4, 4), tau=1.0), hint)


def test_messages_of_linear_name_its_arguments(device):
    x = torch.ones(40, 40, device=device)
    linear = lambda *given, **more: spamm_torch.linear(*given, tau=1.0, **more)  # noqa: E731
    refuses(TypeError, lambda: linear(x, x, x[0].double()), "bias must have the operands' dtype")
    refuses(RuntimeError, lambda: linear(x, x, norm_weight=x), "norm_weight must have shape [1, 1]")
    layer = spamm_torch.SpAMMLinear(40, 40, tau=0.0, device=device)
    refuses(TypeError, lambda: layer(x.half()), "input and weight must have one dtype")
    refuses(TypeError, lambda: linear(x.int(), x.int()), "input must be float16, bfloat16")
    if device.type == "cuda":
        refuses(RuntimeError, lambda: linear(x, x.cpu()), "input and weight must be on the same")
        refuses(RuntimeError, lambda: linear(x, x, x[0].cpu()), "bias and input must be on")


def test_a_product_of_matrices_has_no_batches(device):
    a = torch.ones(4, 5, device=device)
    with pytest.raises(RuntimeError) as caught:
        spamm_torch.mm(a, a, tau=1.0)
    assert "batches" not in str(caught.value)


@every_product
@pytest.mark.parametrize("flag", ["return_info", "return_norms", "symmetric"])
def test_flags_are_bools(operands, product, flag):
    if product in ("bmm", "linear") and flag != "return_info":
        return
    call = lambda: PRODUCTS[product](*operands, tau=1.0, **{flag: 1})  # noqa: E731
    refuses(TypeError, call, f"{flag} must be True or False; got 1")


@pytest.mark.parametrize("flag", ["return_info", "return_norms"])
def test_flags_of_a_convolution_are_bools(device, flag):
    x = torch.ones(1, 2, 4, 4, device=device)
    call = lambda: spamm_torch.conv2d(x, x, tau=1.0, **{flag: "yes"})  # noqa: E731
    refuses(TypeError, call, f"{flag} must be True or False; got 'yes'")


@pytest.mark.parametrize("transform", [torch.func.grad, lambda f: lambda x: torch.func.vjp(f, x)])
def test_gradients_of_functorch_are_refused(device, transform):
    x = torch.ones(40, 40, device=device)
    product = transform(lambda x: spamm_torch.mm(x, x, tau=0.0).sum())
    refuses(NotImplementedError, lambda: product(x), "torch.autograd", "torch.func")


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells of machines without a GPU")
def test_a_machine_without_a_gpu_says_so():
    a = torch.ones(40, 40)
    refuses(
        (ValueError, RuntimeError),
        lambda: spamm_torch.mm(a, a, tau=1.0, devices=[0]),
        "devices must be CUDA devices",
        "got 0",
    )


def test_shards_are_a_list_of_tensors():
    a = torch.ones(40, 40)
    refuses(
        TypeError,
        lambda: spamm_torch.mm_shards([a, None], [a, a], tau=1.0),
        "a_shards must be a list of tensors; got NoneType in it",
    )


def test_an_order_needs_values():
    refuses(RuntimeError, lambda: spamm_torch.spatial_order(torch.ones(4, 3).to("meta")), "meta")


@pytest.mark.parametrize("name", ["stride", "padding", "dilation", "groups"])
@pytest.mark.parametrize("value", [1.5, (1, 1.5), None, True])
def test_numbers_of_a_convolution_are_integers(device, name, value):
    input, weight = torch.ones(1, 2, 4, 4, device=device), torch.ones(2, 2, 1, 1, device=device)
    convolve = lambda: spamm_torch.conv2d(input, weight, tau=1.0, **{name: value})  # noqa: E731
    expected = "an integer;" if name == "groups" else "an integer or a pair"
    refuses(TypeError, convolve, name, expected, f"got {value}")


def test_relu_is_a_bool(device):
    x = torch.ones(1, 2, 4, 4, device=device)
    refuses(TypeError, lambda: spamm_torch.conv2d(x, x, tau=1.0, relu="yes"), "relu", "got 'yes'")


def test_thresholds_beyond_all_norms(device):
    """Below zero nothing is skipped; an infinite threshold skips all but what is not finite."""
    a = torch.ones(40, 100, device=device)
    a[0, 0] = INF
    b = torch.ones(100, 40, device=device)
    assert torch.equal(spamm_torch.mm(a, b, tau=-1), a @ b)
    assert torch.equal(spamm_torch.mm(a, b, tau=-INF), a @ b)
    assert torch.equal(spamm_torch.mm(a, b, tau=INF), a[:, :64] @ b[:64])
    nan = torch.tensor(NAN, device=device)
    assert torch.equal(spamm_torch.mm(a, b, tau=nan), a @ b)


def test_integers_of_numpy_are_integers():
    a = torch.ones(40, 40)
    found = spamm_torch.mm(a, a, tau=numpy.float64(0), block=numpy.int64(64))
    assert torch.equal(found, a @ a)


def test_no_kernels_for_a_device():
    refuses(RuntimeError, lambda: spamm_torch.backend_for("meta", torch.float32), "meta")


@pytest.mark.skipif(
    bool(spamm_torch._library.BUILT["cuda"]), reason="tells of builds for the CPU only"
)
def test_a_build_for_the_cpu_only_says_what_to_do():
    refuses(RuntimeError, lambda: spamm_torch.backend_for("cuda", torch.float32), "nvcc", "cuda")


# ---- After an error -----------------------------------------------------------------------------


def test_a_refused_call_leaves_the_operands_alone(operands):
    copies = [operand.clone() for operand in operands]
    for knobs in ({}, {"tau": 1.0, "block": 48}, {"valid_ratio": 2.0}):
        with pytest.raises(ValueError, match="got"):
            spamm_torch.mm(*operands[:2], **knobs)
    assert all(map(torch.equal, operands, copies))
