"""Gradients are dense: those of the product without skipping, whatever the knob skips."""

import functools
import itertools

import matrices
import pytest
import torch
from support import norm_maps
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import spamm_torch

KNOBS = [{"tau": 0.0}, {"valid_ratio": 1.0}, {"max_error": 0.0}]
SKIP_ALL = {"tau": float("inf")}


def leaf(*shape, seed=0, device="cpu"):
    return matrices.normal(*shape, seed=seed, device=device, dtype=torch.float64).requires_grad_()


def square(x, multiply=torch.mm, **options):
    """Squares a symmetric matrix."""
    return multiply(x + x.mT, x + x.mT, **options)


def by_stages(a, b, **knob):
    """The last stage alone has gradients."""
    tau = torch.tensor(knob.get("tau", 0.0), device=a.device)
    return torch.ops.spamm_torch.multiply(a, b, *norm_maps(a, b, 32), tau, (32, 32, 32))


# Each: (approximate, dense, shapes of the operands)
FUNCTIONS = {
    "bmm": (spamm_torch.bmm, torch.bmm, [(2, 5, 7), (2, 7, 3)]),
    **{
        f"mm of {m} x {k} and {k} x {n}": (spamm_torch.mm, torch.mm, [(m, k), (k, n)])
        for m, k, n in ((5, 7, 3), (0, 4, 3), (5, 0, 3), (5, 4, 0))
    },
    **{
        f"addmm {scaling}": (
            functools.partial(spamm_torch.addmm, **scaling),
            functools.partial(torch.addmm, **scaling),
            [(5, 3), (5, 7), (7, 3)],
        )
        for scaling in ({"beta": 0.5, "alpha": -2}, {"beta": 0})
    },
    **{
        f"addmm of {shape}": (spamm_torch.addmm, torch.addmm, [shape, (5, 7), (7, 3)])
        for shape in ((3,), (5, 1), ())
    },
    "linear": (spamm_torch.linear, torch.nn.functional.linear, [(4, 2, 7), (3, 7), (3,)]),
    "linear without bias": (spamm_torch.linear, torch.nn.functional.linear, [(7,), (3, 7)]),
    "one operand": (
        lambda x, **knob: spamm_torch.mm(x, x.t(), **knob),
        lambda x: x @ x.t(),
        [(6, 6)],
    ),
    "by stages": (by_stages, torch.mm, [(5, 7), (7, 3)]),
    "symmetric": (
        functools.partial(square, multiply=spamm_torch.mm, symmetric=True),
        square,
        [(6, 6)],
    ),
}
all_functions = pytest.mark.parametrize("name", FUNCTIONS)


def operands(shapes, **options):
    return [leaf(*shape, seed=i, **options) for i, shape in enumerate(shapes)]


@all_functions
@pytest.mark.parametrize("knob", KNOBS)
def test_first_and_second_derivatives(device, name, knob):
    """Against finite differences, where nothing is skipped and the function is smooth."""
    approximate, _, shapes = FUNCTIONS[name]
    inputs = operands(shapes, device=device)
    assert gradcheck(lambda *args: approximate(*args, **knob), inputs)
    assert gradgradcheck(lambda *args: approximate(*args, **knob), inputs)


@all_functions
@pytest.mark.parametrize("knob", [SKIP_ALL, {"tau": 30.0}, {"valid_ratio": 0.3}])
def test_gradients_are_dense_where_products_are_skipped(device, name, knob, dtype):
    """Integer operands: gradients of the dense product, exactly, of those that require one."""
    approximate, dense, shapes = FUNCTIONS[name]

    def gradients(function, wanted):
        inputs = [
            torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(i))
            .to(device, dtype)
            .requires_grad_(i in wanted)
            for i, shape in enumerate(shapes)
        ]
        result = function(*inputs)
        assert result.requires_grad == bool(wanted)
        weights = torch.arange(result.numel(), device=device).remainder(5).reshape(result.shape)
        if wanted:
            result.backward(weights.to(dtype))
        return [x.grad for x in inputs]

    sizes = range(len(shapes) + 1)
    for wanted in itertools.chain.from_iterable(
        itertools.combinations(range(len(shapes)), size) for size in sizes
    ):
        actual = gradients(lambda *args: approximate(*args, **knob), wanted)
        for ours, torchs in zip(actual, gradients(dense, wanted), strict=True):
            assert (ours is None) == (torchs is None)
            assert ours is None or (ours.dtype == dtype and torch.equal(ours, torchs))


def test_norms_thresholds_and_bounds_have_no_gradient(device):
    a = leaf(40, 40, device=device)
    norms = spamm_torch.norm_map(a, 32)
    tau = spamm_torch.find_tau(norms, norms, 0.5)
    results = [norms, tau, spamm_torch.mm(a, a, tau=tau, return_norms=True)[1]]
    results += [spamm_torch.find_tau(norms, norms, max_error=0.5)]
    results += [of(norms, norms, tau) for of in (spamm_torch.valid_ratio, spamm_torch.error_bound)]
    assert not any(result.requires_grad for result in results)
    watched = norms.clone().requires_grad_()
    assert not spamm_torch.error_bound(watched, watched, 1.0).requires_grad
    assert not spamm_torch.find_tau(watched, watched, 0.5).requires_grad


def test_without_grad_mode_no_graph_is_built(device):
    a = leaf(40, 40, device=device)
    with torch.no_grad():
        assert not spamm_torch.mm(a, a, tau=0.0).requires_grad
    with torch.inference_mode():
        assert spamm_torch.mm(a, a, tau=0.0).is_inference()


def test_an_operand_changed_in_place_is_noticed(device):
    a, b = operands([(5, 4), (4, 3)], device=device)
    saved = a * 1
    result = spamm_torch.mm(saved, b, tau=0.0).sum()
    saved.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: spamm_torch.mm(x, torch.ones(40, 30), tau=0.0),
        lambda x: spamm_torch.conv2d(x.view(1, 1, 40, 40), torch.ones(2, 1, 3, 3), tau=0.0),
    ],
)
def test_forward_mode_is_refused(call):
    x = torch.ones(40, 40)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="reverse mode"):
        call(forward_ad.make_dual(x, x))
