"""The functions inside torch.compile, torch.export, FakeTensor and autocast."""

import matrices
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import spamm_torch

DTYPES = matrices.DTYPES


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
    function = FUNCTIONS[name]
    a, b = operands(device)
    assert torch.equal(compiled(function)(a, b), function(a, b))


@all_functions
def test_compiled_gradients(device, name):
    function = FUNCTIONS[name]
    if name in ("norm_map", "stages"):
        assert not function(*operands(device)).requires_grad
        return

    def gradients(f):
        a, b = (x.requires_grad_() for x in operands(device))
        return torch.autograd.grad(f(a, b).square().sum(), (a, b))

    for traced, eager in zip(gradients(compiled(function)), gradients(function), strict=True):
        torch.testing.assert_close(traced, eager)


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


def test_a_changing_threshold(device):
    a, b = operands(device)
    traced = compiled(lambda tau: spamm_torch.mm(a, b, tau=tau))
    for tau in (10.0, 60.0, 1e9, 0.0):
        assert torch.equal(traced(tau), spamm_torch.mm(a, b, tau=tau))


@pytest.mark.parametrize(("as_knob", "graphs"), [(torch.tensor, 1), (float, 2)])
def test_graphs_of_a_changing_threshold(device, as_knob, graphs):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    a, b = operands(device)
    traced = torch.compile(
        lambda tau: spamm_torch.mm(a, b, tau=tau), backend=counter, fullgraph=True
    )
    for tau in (10.0, 60.0, 1e9, 0.5, 2.0):
        traced(as_knob(tau))
    assert counter.frame_count == graphs


def test_export(device):
    class Product(torch.nn.Module):
        def forward(self, a, b):
            return spamm_torch.mm(a, b, valid_ratio=0.4, block=32)

    a, b = operands(device)
    rows = torch.export.Dim("rows", max=4096)
    exported = torch.export.export(Product(), (a, b), dynamic_shapes=({0: rows}, None))
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
    assert fake.stride() == real.stride()
    assert fake.dtype == real.dtype
    assert fake.device == real.device


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
    """What has no shape, or is of other arguments, gets none."""
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


def test_autocast_brings_two_types_together(device):
    a, b = operands(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        actual = spamm_torch.mm(a.bfloat16(), b, tau=0.0)
    assert torch.equal(actual, spamm_torch.mm(a.bfloat16(), b.bfloat16(), tau=0.0))


def test_autocast_leaves_float64_and_norms_alone(device):
    """As torch's own: float64 stays; norm maps and thresholds keep the norms' type."""
    a, b = operands(device, torch.float64)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert spamm_torch.mm(a, b, tau=0.0).dtype == torch.float64
        norms = spamm_torch.norm_map(a.float())
        assert torch.equal(norms, spamm_torch.norm_map(a.float()))
        assert spamm_torch.find_tau(norms, norms.t(), 0.5).dtype == torch.float32
    assert norms.dtype == torch.float32


def test_autocast_switched_off_inside(device):
    a, b = operands(device)
    expected = spamm_torch.mm(a, b, tau=60.0)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        with torch.autocast(device.type, enabled=False):
            inside = spamm_torch.mm(a, b, tau=60.0)
        assert spamm_torch.mm(a, b, tau=60.0).dtype == torch.bfloat16
    assert inside.dtype == torch.float32
    assert torch.equal(inside, expected)


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
