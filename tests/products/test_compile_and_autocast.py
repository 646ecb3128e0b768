"""The functions inside torch.compile, torch.export, FakeTensor and autocast."""

import io

import matrices
import pytest
import torch
from support import flops_of
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import spamm_torch


def operands(device, dtype=torch.float32, seed=0):
    a = matrices.normal(100, 150, dtype=dtype, device=device, seed=seed)
    return a, matrices.normal(150, 70, dtype=dtype, device=device, seed=seed + 1)


def compiled(function, **options):
    """Traced whole and differentiated ahead of time, but run without generated code."""
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True, **options)


FUNCTIONS = {
    "mm, tau": lambda a, b: spamm_torch.mm(a, b, tau=60.0),
    "mm, tau tensor": lambda a, b: spamm_torch.mm(a, b, tau=a.new_tensor(60.0)),
    "mm, valid_ratio": lambda a, b: spamm_torch.mm(a, b, valid_ratio=0.4, block=32),
    "mm, max_error": lambda a, b: spamm_torch.mm(a, b, max_error=0.1, block=(32, 64, 128)),
    "mm, maps": lambda a, b: spamm_torch.mm(
        a, b, tau=60.0, norm_a=spamm_torch.norm_map(a), norm_b=spamm_torch.norm_map(b)
    ),
    "addmm": lambda a, b: spamm_torch.addmm(b[:1], a, b, beta=0.5, alpha=2, valid_ratio=0.4),
    "bmm": lambda a, b: spamm_torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1), valid_ratio=0.4),
    "linear": lambda a, b: spamm_torch.linear(a[None], b.t(), b[0], valid_ratio=0.4),
    "symmetric": lambda a, b: spamm_torch.mm(
        *[a @ b @ (a @ b).t()] * 2, max_error=0.1, symmetric=True
    ),
    "conv2d": lambda a, b: spamm_torch.conv2d(
        a[:, None, None], b[None, None, :1, :3], valid_ratio=0.5
    ),
    "norm_map": lambda a, b: spamm_torch.norm_map(a, (32, 64)),
    "stages": lambda a, b: _stages(spamm_torch.norm_map(a), spamm_torch.norm_map(b)),
}
all_functions = pytest.mark.parametrize("name", FUNCTIONS)


def _stages(norm_a, norm_b):
    tau = spamm_torch.find_tau(norm_a, norm_b, 0.5)
    counts = spamm_torch.valid_counts(norm_a, norm_b, tau)
    ratio = spamm_torch.valid_ratio(norm_a, norm_b, tau)
    return counts.sum() + ratio + spamm_torch.error_bound(norm_a, norm_b, 30.0) + tau


# ---- torch.compile and torch.export -------------------------------------------------------------


@all_functions
def test_compiled_is_eager(device, name):
    """Results and, where there are any, gradients."""
    function = FUNCTIONS[name]

    def result_and_gradients(f):
        a, b = (x.requires_grad_() for x in operands(device))
        result = f(a, b)
        assert result.requires_grad == (name not in ("norm_map", "stages"))
        if not result.requires_grad:
            return (result,)
        return result, *torch.autograd.grad(result.square().sum(), (a, b))

    (result, *found), (eager, *expected) = map(result_and_gradients, (compiled(function), function))
    assert torch.equal(result, eager)
    for gradient, of_eager in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, of_eager)


@all_functions
def test_one_graph_serves_all_shapes(device, name):
    function = FUNCTIONS[name]
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    traced = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    frames = set()
    # At least two blocks in each dimension: torch specialises on sizes of 0 and 1.
    for m, k, n in ((100, 150, 70), (65, 180, 130), (257, 129, 99)):
        a, b = matrices.normal(m, k, device=device), matrices.normal(k, n, device=device)
        assert torch.equal(traced(a, b), function(a, b))
        frames.add(counter.frame_count)
    assert len(frames) == 1


@pytest.mark.parametrize(("as_knob", "graphs"), [(torch.tensor, 1), (float, 2)])
def test_a_changing_threshold(device, as_knob, graphs):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    a, b = operands(device)
    traced = torch.compile(
        lambda tau: spamm_torch.mm(a, b, tau=tau), backend=counter, fullgraph=True
    )
    for tau in (10.0, 60.0, 1e9, 0.5, 0.0):
        assert torch.equal(traced(as_knob(tau)), spamm_torch.mm(a, b, tau=tau))
    assert counter.frame_count == graphs


def test_export(device):
    class Product(torch.nn.Module):
        def forward(self, a, b):
            return spamm_torch.mm(a, b, valid_ratio=0.4, block=32)

    a, b = operands(device)
    rows = torch.export.Dim("rows", max=4096)
    exported = torch.export.export(Product(), (a, b), dynamic_shapes=({0: rows}, None))
    torch.export.save(exported, file := io.BytesIO())
    file.seek(0)
    exported = torch.export.load(file)
    longer = matrices.normal(333, 150, device=device)
    for operand in (a, longer):
        assert torch.equal(exported.module()(operand, b), Product()(operand, b))


# ---- FakeTensor and meta ------------------------------------------------------------------------


@all_functions
def test_fake_results_look_like_real_ones(device, name, dtype):
    function = FUNCTIONS[name]
    a, b = operands(device, dtype)
    real = function(a, b)
    with FakeTensorMode() as mode:
        fake = function(mode.from_tensor(a), mode.from_tensor(b))
    assert fake.shape == real.shape
    long = [
        axis for axis, size in enumerate(real.shape) if size > 1
    ]  # of others any stride will do
    assert [fake.stride(axis) for axis in long] == [real.stride(axis) for axis in long]
    assert fake.dtype == real.dtype
    assert fake.device == real.device


@pytest.mark.parametrize(("into", "out"), [(0, 3), (4, 0)])
def test_fake_convolutions_without_channels(device, into, out):
    x, weight = torch.ones(2, into, 5, 5, device=device), torch.ones(out, into, 3, 3, device=device)
    with FakeTensorMode() as mode:
        fake = spamm_torch.conv2d(mode.from_tensor(x), mode.from_tensor(weight), tau=0.5)
    assert fake.shape == spamm_torch.conv2d(x, weight, tau=0.5).shape


@pytest.mark.parametrize("name", ["mm, tau", "mm, valid_ratio", "bmm", "linear", "norm_map"])
def test_meta_tensors_need_no_memory(name):
    a = torch.empty(2**20, 2**20, device="meta")
    result = FUNCTIONS[name](a, a)
    assert result.is_meta
    assert result.shape[-1] == (2**14 if name == "norm_map" else 2**20)


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: spamm_torch.mm(a, b, tau=1.0),
        lambda a, b: spamm_torch.mm(a, a.t().double(), tau=1.0),
        lambda a, b: spamm_torch.mm(a, a.t(), tau=1.0, block=48),
        lambda a, b: spamm_torch.mm(a, a.t()),
        lambda a, b: spamm_torch.valid_counts(a, b, 1.0),
    ],
)
def test_bad_input_is_refused_while_tracing(call):
    """A call without shapes, or of other arguments, gets none."""
    a, b = torch.empty(3, 4, device="meta"), torch.empty(5, 6, device="meta")
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        call(a, b)


# ---- Autocast -----------------------------------------------------------------------------------

AUTOCAST = pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])


@AUTOCAST
@pytest.mark.parametrize(
    "name", ["mm, tau", "mm, valid_ratio", "mm, max_error", "addmm", "bmm", "linear"]
)
def test_autocast_computes_in_the_lower_type(device, name, lower):
    function = FUNCTIONS[name]
    a, b = operands(device)
    with torch.autocast(device.type, dtype=lower):
        actual = function(a, b)
    assert actual.dtype == lower
    assert torch.equal(actual, function(a.to(lower), b.to(lower)))


def test_autocast_of_other_types(device):
    """As torch's own: two types meet, float64 stays; norms and thresholds keep the norms' type."""
    a, b = operands(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        both = spamm_torch.mm(a.bfloat16(), b, tau=0.0)
        with torch.autocast(device.type, enabled=False):
            inside = spamm_torch.mm(a, b, tau=60.0)
        assert spamm_torch.mm(a, b, tau=60.0).dtype == torch.bfloat16
        assert spamm_torch.mm(a.double(), b.double(), tau=0.0).dtype == torch.float64
        norms = spamm_torch.norm_map(a)
        assert spamm_torch.find_tau(norms, norms.t(), 0.5).dtype == torch.float32
    assert torch.equal(both, spamm_torch.mm(a.bfloat16(), b.bfloat16(), tau=0.0))
    assert torch.equal(inside, spamm_torch.mm(a, b, tau=60.0))
    assert torch.equal(norms, spamm_torch.norm_map(a))


def test_autocast_gradients_have_the_parameters_type(device):
    input, weight = matrices.normal(40, 50, device=device), matrices.normal(30, 50, device=device)
    weight.requires_grad_()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        result = spamm_torch.linear(input, weight, tau=float("inf"))
    result.float().sum().backward()
    assert weight.grad.dtype == torch.float32
    expected = torch.ones(30, 40, device=device, dtype=torch.bfloat16) @ input.bfloat16()
    torch.testing.assert_close(weight.grad, expected.float(), rtol=1e-2, atol=1e-1)


def test_autocast_inside_compile(device):
    a, b = operands(device)

    def function(a, b):
        with torch.autocast(a.device.type, dtype=torch.bfloat16):
            return spamm_torch.mm(a, b, valid_ratio=0.4)

    assert torch.equal(compiled(function)(a, b), function(a, b))


# ---- opcheck and flops ---------------------------------------------------------------------------


ops = torch.ops.spamm_torch


def operand(device, *shape, seed=0, dtype=torch.float32, requires_grad=False):
    values = matrices.normal(*shape, dtype=dtype, device=device, seed=seed)
    return values.requires_grad_(requires_grad)


def cases_of_stages(device):
    """(name, op, arguments, options)"""
    a, b = operand(device, 70, 100), operand(device, 100, 40)
    batch = operand(device, 2, 70, 100, dtype=torch.float16, requires_grad=True)
    yield "norm_map", ops.norm_map, (batch, (32, 64)), {}
    yield "norm_map, strided", ops.norm_map, (a.double().t(), (128, 32)), {}
    yield "norm_maps", ops.norm_maps, (a, b, (32, 64, 128)), {}
    for dtype, of in ((torch.float32, (2,)), (torch.float64, ())):
        maps = [operand(device, *of, *shape, dtype=dtype).abs() for shape in ((3, 4), (4, 2))]
        name, host, tau = f", {dtype}", torch.tensor(0.5), torch.tensor(0.5, device=device)
        skip, low = {"skip_norm_b": maps[1] * 2}, torch.tensor(1 << 20, device=device)
        more = {"max_iterations": 5, "tolerance": 0.1}
        yield f"find_tau{name}", ops.find_tau, (*maps, 0.4), more
        yield f"find_tau by error{name}", ops.find_tau, maps, {"max_error": 0.1, **skip}
        yield f"product_histogram{name}", ops.product_histogram, (*maps, low, 3, 100), {}
        yield f"valid_counts{name}", ops.valid_counts, (*maps, host), {}
        yield f"error_bound{name}", ops.error_bound, (*maps, tau), skip


def cases_of_products(device):
    for dtype, of, wants in ((torch.float32, (), True), (torch.bfloat16, (2,), False)):
        options = {"dtype": dtype, "requires_grad": wants}
        a, b = operand(device, *of, 40, 70, **options), operand(device, *of, 70, 50, **options)
        more = {"input": operand(device, 40, 50, **options), "beta": 2, "alpha": 0.5}
        name, tau = f", {dtype}", torch.tensor(40.0, device=device)
        maps = ops.norm_map(a, (32, 64)), ops.norm_map(b, (64, 32))
        yield f"multiply{name}", ops.multiply, (a, b, *maps, tau, (32, 64, 32)), more
        yield f"spamm{name}", ops.spamm, (a, b), {"tau": tau}
        yield f"spamm by error{name}", ops.spamm, (a, b), {"max_error": 0.5, **more}
        ratio = {"valid_ratio": 0.5, "block": (32, 32, 64), **more}
        yield f"spamm_with_norms{name}", ops.spamm_with_norms, (a, b), ratio
    a, b = operand(device, 40, 70), operand(device, 70, 40, seed=1)
    ratio = {"valid_ratio": 0.5}
    square = operand(device, 70, 70, requires_grad=True)
    yield "symmetric", ops.spamm, (square, square), {**ratio, "symmetric": True}
    given = {"norm_a": ops.norm_map(a, (64, 64)), "norm_b": ops.norm_map(b, (64, 64))}
    yield "given maps", ops.spamm, (a, b), {"threshold": 40.0, **given}
    for sizes in ((0, 4, 3), (5, 0, 3)):
        m, k, n = sizes
        yield f"empty {sizes}", ops.spamm, (operand(device, m, k), operand(device, k, n)), ratio
    for layout in ("transposed", "one row"):
        yield layout, ops.spamm, [matrices.LAYOUTS[layout](x) for x in (a, b)], ratio
    into = {"input": operand(device, 40, 40), "beta": 2, "symmetric": True}
    into["norms"], out = torch.ones(2, 2, device=device), operand(device, 40, 40)
    block = {"max_error": 0.1, "block": (32, 32, 32)}
    yield "spamm_into", ops.spamm_into, (a, b), {"out": out, **block, **into}


def cases_of_convolutions(device):
    for dtype in (torch.float32, torch.float16):
        input = operand(device, 2, 8, 5, 6, dtype=dtype)
        weight = operand(device, 16, 8, 3, 3, dtype=dtype, seed=1)
        given = {"valid_ratio": 0.5, "activation": "relu"}
        yield f"with norms, {dtype}", ops.conv2d_with_norms, (input, weight), {"valid_ratio": 0.5}
        norms = {"norm_input": torch.ones(1, 5, 6, 1, device=device), "weight_is_ready": True}
        single = (input[0], weight, None, 2)
        yield f"one picture, {dtype}", ops.conv2d_with_norms, single, {**given, **norms}
    bias = operand(device, 16, dtype=dtype, seed=2, requires_grad=True)
    yield "half types", ops.conv2d, (input, weight, bias, [2, 1], [1, 1]), given
    last = {"memory_format": torch.channels_last}
    for of, of_weight, setting in (
        ((2, 3, 6, 5), (4, 3, 3, 3), {"tau": torch.tensor(0.5), "padding": [1, 1]}),
        ((2, 4, 6, 5), (4, 2, 2, 3), {"valid_ratio": 0.5, "groups": 2, "stride": [2, 1]}),
        ((3, 6, 5), (4, 3, 1, 1), {"max_error": 0.1, "pixel_block": [1, 4, 8]}),
    ):
        input, bias = (operand(device, *shape, requires_grad=True) for shape in (of, (4,)))
        weight = operand(device, *of_weight).to(**last if "groups" in setting else {})
        yield f"conv2d of {of}", ops.conv2d, (input, weight.requires_grad_(), bias), setting
    for wants in (False, True):
        shapes = (2, 6, 6, 7), (8, 6, 3, 3), (8,)
        given = tuple(operand(device, *shape, requires_grad=wants) for shape in shapes)
        residual = operand(device, 2, 8, 6, 7).to(**last).requires_grad_(wants)
        options = {"padding": [1, 1], "residual": residual, "activation": "silu"}
        for name in ("dense_conv2d", "conv2d", "conv2d_with_norms")[: 2 if wants else 3]:
            knob = {} if name == "dense_conv2d" else {"threshold": 0.5}
            yield f"{name}, residual, {wants}", getattr(ops, name), given, options | knob
    given = (operand(device, 2, 8, 6, 7).to(**last), operand(device, 8, 1, 3, 3), given[2].detach())
    options |= {"groups": 8, "residual": residual.detach()}
    yield "dense_conv2d of groups", ops.dense_conv2d, given, options
    yield "conv2d of groups", ops.conv2d, given, {"threshold": 0.0, **options}
    single = {**options, "residual": options["residual"][0]}
    yield "dense_conv2d of one picture", ops.dense_conv2d, (given[0][0], *given[1:]), single
    for setting in ({}, {"groups": 2}, {"block": [128, 64, 32]}):
        weight = operand(device, 40, 33, 2, 3)
        yield f"conv2d_weight_norm {setting}", ops.conv2d_weight_norm, (weight,), setting
    input, weight = operand(device, 3, 16, 9, 8).to(**last), operand(device, 24, 16, 3, 3)
    for norms in (False, True):
        options = {"kernel_size": 3, "stride": 2, "padding": 1, "norms": norms}
        yield f"max_pool2d, {norms}", ops.max_pool2d, (input,), options
    options = {"norm_weight": ops.conv2d_weight_norm(weight), "activation": "relu"}
    yield "conv2d_max_pool", ops.conv2d_max_pool, (input, weight, None, 1, 1), options


def cases(device):
    families = cases_of_stages, cases_of_products, cases_of_convolutions
    return {name: case for family in families for name, *case in family(device)}


CASES = cases("cpu")
FIRST = {op: name for name, (op, *_) in reversed(CASES.items())}  # case of each op
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("name", CASES)
def test_opcheck(device, name):
    """Each op's first case under a graph of any sizes, too, which takes the longest."""
    op, args, options = cases(device)[name]
    checks = (*CHECKS, "test_aot_dispatch_dynamic") if name in FIRST.values() else CHECKS
    rounds = {"rtol": 2e-2, "atol": 2e-2} if name == "half types" else {}
    opcheck(op.default, tuple(args), options, test_utils=checks, **rounds)


# ---- FlopCounterMode counts products as the dense ones that they stand for ----------------------


DENSE = {
    **dict.fromkeys(["mm, tau", "mm, valid_ratio", "mm, max_error"], torch.mm),
    "addmm": lambda a, b: torch.addmm(b[:1], a, b),
    "bmm": lambda a, b: torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1)),
    "linear": lambda a, b: nn.functional.linear(a[None], b.t(), b[0]),
    "symmetric": lambda a, b: torch.mm(*[a @ b @ (a @ b).t()] * 2),
}


@pytest.mark.parametrize("name", DENSE)
def test_flops_of_products(device, name):
    a, b = operands(device)
    ours, dense = (flops_of(lambda of=of: of[name](a, b)) for of in (FUNCTIONS, DENSE))
    assert ours == dense > 0


@pytest.mark.parametrize("shape", [(2, 12, 9, 8), (12, 9, 8)])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("return_norms", [False, True])
def test_flops_of_convolutions(device, shape, groups, return_norms):
    input = torch.ones(shape, device=device)
    weight = torch.ones(6, 12 // groups, 3, 2, device=device)
    settings = {"stride": (2, 1), "padding": 1, "groups": groups}
    found = flops_of(
        lambda: spamm_torch.conv2d(
            input, weight, **settings, valid_ratio=0.5, return_norms=return_norms
        )
    )
    batch = input if input.dim() == 4 else input.unsqueeze(0)
    assert found == flops_of(lambda: nn.functional.conv2d(batch, weight, **settings)) > 0


def test_flops_of_the_backward_pass(device):
    dense = nn.Conv2d(12, 6, 3, padding=1, device=device)
    ours = spamm_torch.SpAMMConv2d.from_dense(dense, tau=1e9)
    input = torch.ones(2, 12, 9, 8, device=device, requires_grad=True)
    found = flops_of(lambda: ours(input), backward=True)
    assert found == flops_of(lambda: dense(input), backward=True)


@pytest.mark.parametrize("exports", [False, True])
def test_the_backend_keeps_autocast_inside_a_forward(exports):
    """Convolutions of such a graph stay torch's, in the types that autocast gives them."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Conv2d(c, 32, 3) for c in (3, 32))

        def forward(self, x):
            x = self.first(x).relu()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.second(x).relu()
            return x

    model, images = Mixed().eval(), torch.rand(2, 3, 9, 9)
    with torch.no_grad():
        expected = model(images)
        if exports:
            graph = torch.export.export(model, (images,)).module()
            found = spamm_torch.fuse(graph, [images], inner="eager")(images)
        else:
            options = {"inner": "eager"}
            found = torch.compile(model, backend="spamm_torch", options=options)(images)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)
