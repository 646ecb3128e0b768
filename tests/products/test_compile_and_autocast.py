"""The functions inside torch.compile, torch.export, FakeTensor and autocast."""

import functools
import io
from collections import Counter

import matrices
import pytest
import torch
from support import Watching, norm_maps, operands
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck
from torch.utils._pytree import tree_map_only

import fuzz
import spamm_torch

ops = torch.ops.spamm_torch


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
    "autocast": lambda a, b: _in_lower_type(a, b),
    "norm_map": lambda a, b: spamm_torch.norm_map(a, (32, 64)),
    "stages": lambda a, b: _stages(spamm_torch.norm_map(a), spamm_torch.norm_map(b)),
}


def _in_lower_type(a, b):
    with torch.autocast(a.device.type, dtype=torch.bfloat16):
        return spamm_torch.mm(a, b, valid_ratio=0.4)


def _stages(norm_a, norm_b):
    tau = spamm_torch.find_tau(norm_a, norm_b, 0.5)
    counts = spamm_torch.valid_counts(norm_a, norm_b, tau)
    ratio = spamm_torch.valid_ratio(norm_a, norm_b, tau)
    return counts.sum() + ratio + spamm_torch.error_bound(norm_a, norm_b, 30.0) + tau


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_graph_serves_all_shapes(device, name):
    """With the results and the gradients of a call."""
    function = FUNCTIONS[name]
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    traced = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    frames = set()
    # At least two blocks in each dimension: torch specialises on sizes of 0 and 1.
    for m, k, n in ((100, 150, 70), (65, 180, 130), (257, 129, 99)):
        a, b = (x.requires_grad_() for x in operands(m=m, k=k, n=n, device=device))
        found, expected = traced(a, b), function(a, b)
        assert torch.equal(found, expected)
        frames.add(counter.frame_count)
        assert found.requires_grad == expected.requires_grad
        assert found.requires_grad == (name not in ("norm_map", "stages"))
        if found.requires_grad:
            gradients = (torch.autograd.grad(x.square().sum(), (a, b)) for x in (found, expected))
            for gradient, of_eager in zip(*gradients, strict=True):
                torch.testing.assert_close(gradient, of_eager)
    assert len(frames) == 1


@pytest.mark.parametrize(("as_knob", "graphs"), [(torch.tensor, 1), (float, 2)])
def test_a_changing_threshold(device, as_knob, graphs):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    a, b = operands(m=100, k=150, n=70, device=device)
    mm = functools.partial(spamm_torch.mm, a, b)
    traced = torch.compile(lambda tau: mm(tau=tau), backend=counter, fullgraph=True)
    for tau in (10.0, 60.0, 1e9, 0.5, 0.0):
        assert torch.equal(traced(as_knob(tau)), spamm_torch.mm(a, b, tau=tau))
    assert counter.frame_count == graphs


def test_export(device):
    class Product(torch.nn.Module):
        def forward(self, a, b):
            return spamm_torch.mm(a, b, valid_ratio=0.4, block=32)

    a, b = operands(m=100, k=150, n=70, device=device)
    rows = torch.export.Dim("rows", max=4096)
    exported = torch.export.export(Product(), (a, b), dynamic_shapes=({0: rows}, None))
    torch.export.save(exported, file := io.BytesIO())
    file.seek(0)
    exported = torch.export.load(file)
    longer = matrices.normal(333, 150, device=device)
    for operand in (a, longer):
        assert torch.equal(exported.module()(operand, b), Product()(operand, b))


@pytest.mark.parametrize("name", ["mm, tau", "mm, valid_ratio", "bmm", "linear", "norm_map"])
def test_meta_tensors_need_no_memory(name):
    a = torch.empty(2**20, 2**20, device="meta")
    result = FUNCTIONS[name](a, a)
    assert result.is_meta
    assert result.shape[-1] == (2**14 if name == "norm_map" else 2**20)


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["mm, tau", "mm, valid_ratio", "mm, max_error", "addmm", "bmm", "linear"]
)
def test_autocast_computes_in_the_lower_type(device, name, lower):
    """Gradients have the operands' type."""
    function = FUNCTIONS[name]
    pairs = [operands(m=100, k=150, n=70, device=device) for _ in range(2)]
    (a, b), others = ([x.requires_grad_() for x in pair] for pair in pairs)
    with torch.autocast(device.type, dtype=lower):
        actual = function(a, b)
    expected = function(*(x.to(lower) for x in others))
    assert actual.dtype == lower
    assert torch.equal(actual, expected)
    for result in (actual, expected):
        result.float().sum().backward()
    for x, y in ((a, others[0]), (b, others[1])):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-2, atol=1e-1)


def test_autocast_of_other_types(device):
    """As torch's own: two types meet, float64 stays; norms and thresholds keep the norms' type."""
    a, b = operands(m=100, k=150, n=70, device=device)
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


NO_GRADIENTS = ("conv2d_with_norms", "conv2d_max_pool", "max_pool2d", "spamm_into")
NO_GRADIENTS += ("multiply_part",)
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
DRAWN = {"dense": 24, "convolution": 20, "pool": 16}  # cases of each family


def calls_of_cases(device, family):
    """Name, arguments and options of each op that drawn cases call."""
    calls = []
    for number in range(DRAWN[family]):
        case = fuzz.drawn(0, number, family)
        case |= {name: "normal" for name in case if name.startswith("pattern")}
        with Watching(lambda *call: calls.append(call)):
            assert fuzz.problem(case, device) is None
    return [call for call in calls if hasattr(ops, call[0]) and "backend" not in call[0]]


def calls_beside_cases(device):
    """Arguments that no case draws."""
    make = functools.partial(matrices.normal, device=device)
    a, b = make(70, 100), make(100, 40)
    block, tau = (32, 64, 32), torch.tensor(40.0, device=device)
    more = {"input": make(70, 40), "beta": 2, "alpha": 0.5}
    yield "norm_maps", (a, b, block), {}
    yield "multiply", (a, b, *norm_maps(a, b, block), tau, block), more
    arguments = a, b, *norm_maps(a, b, (64, 64, 64)), tau, (64, 64, 64)
    yield "multiply", arguments, {"whole": (200, 40), "input": make(40)}
    yield "multiply_part", (*arguments, make(70, 40)), {"whole": (200, 40)}
    for dtype, of in ((torch.float32, (2,)), (torch.float64, ())):
        maps = [make(*of, *shape, dtype=dtype).abs() for shape in ((3, 4), (4, 2))]
        skip = {"skip_norm_b": maps[1] * 2}
        yield "find_tau", (*maps, 0.4), {"max_iterations": 5, "tolerance": 0.1}
        yield "find_tau", maps, {"max_error": 0.1, **skip}
        yield "error_bound", (*maps, tau), skip
        if not of:
            yield "row_work", (*maps, tau), {}
            yield "row_work", (*maps, tau.cpu().float()), {}
    input, weight = make(8, 5, 6), make(16, 8, 3, 3)
    norms = {"norm_input": torch.ones(1, 5, 6, 1, device=device)}
    yield "conv2d_with_norms", (input, weight, None, 2), {"valid_ratio": 0.5, **norms}
    residual = {"residual": make(16, 3, 4), "activation": "silu"}
    yield "dense_conv2d", (input, weight), residual
    yield "conv2d", (input, weight), {"threshold": 0.5, **residual}
    leaky = {"activation": "leaky_relu", "slope": make(16)}
    yield "conv2d_max_pool", (input[None], weight), leaky
    for into, out in ((0, 3), (4, 0)):
        yield "conv2d", (make(2, into, 5, 5), make(out, into, 3, 3)), {"threshold": 0.5}


@pytest.mark.usefixtures("set_tf32")  # which cases change
@pytest.mark.parametrize("family", [*DRAWN, None])
def test_opcheck(device, family):
    """Each op's first call under a graph of any sizes, too, which takes the longest."""
    calls = calls_beside_cases(device) if family is None else calls_of_cases(device, family)
    counts = Counter()
    for name, args, options in calls:
        counts[name] += 1
        if counts[name] > 8:
            continue
        wants = name not in NO_GRADIENTS and counts[name] % 2 == 1

        def fresh(x, wants=wants):
            x = x.detach() if x.numel() else x.new_zeros(x.shape)  # which torch can clone
            return x.requires_grad_(wants and x.is_floating_point() and x.dim() > 0)

        args, options = tree_map_only(torch.Tensor, fresh, (args, options))
        checks = (*CHECKS, "test_aot_dispatch_dynamic") if counts[name] == 1 else CHECKS
        rounds = {"rtol": 2e-2, "atol": 2e-2}
        opcheck(getattr(ops, name).default, tuple(args), options, test_utils=checks, **rounds)


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
