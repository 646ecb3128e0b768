"""Products besides a new tensor: one norm map, memory that is given, and what was skipped, of the
very norm maps and threshold it used.
"""

import functools

import matrices
import pytest
import torch
from torch.profiler import profile

from spamm_torch import addmm, conv2d, mm, norm_map

ops = torch.ops.spamm_torch
LAYOUTS = ("contiguous", "transposed", "every other row", "every third column", "misaligned")


def operands(device, dtype=torch.float32, shape=(150, 100, 210)):
    m, k, n = shape
    return (
        matrices.patchy(m, k, dtype=dtype, device=device),
        matrices.patchy(k, n, dtype=dtype, device=device, seed=1),
        matrices.patchy(m, n, dtype=dtype, device=device, seed=2),
    )


# ---- One matrix, one norm map -------------------------------------------------------------------


def norm_maps_taken(function):
    with profile(acc_events=True) as recorded:
        function()
    # Two maps at once have the op's range and that of the stage.
    names = ("spamm_torch::norm_map", "spamm_torch::norm_maps")
    return sum(event.name in names for event in recorded.events())


KNOBS = [{"tau": 30.0}, {"valid_ratio": 0.4}, {"max_error": 0.3}]
every_knob = pytest.mark.parametrize("knob", KNOBS, ids=str)


@every_knob
@pytest.mark.parametrize(
    "options", [{}, {"symmetric": True}, {"return_norms": True}, {"return_info": True}]
)
def test_one_matrix_has_one_norm_map(knob, options):
    a = matrices.normal(130, 130)
    for b, count in ((a, 1), (a.clone(), 2), (a.mT, 2)):
        assert norm_maps_taken(lambda b=b: mm(a, b, **knob, **options)) == count
    assert norm_maps_taken(lambda: mm(a, a[:], tau=0.5)) == 1
    assert norm_maps_taken(lambda: mm(a[:64, :64], a[64:128, :64], tau=0.5)) == 2
    assert norm_maps_taken(lambda: mm(a, a, tau=0.5, block=(64, 32, 64))) == 2


# ---- out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_of_any_layout(device, dtype, layout):
    a, b, added = operands(device, dtype)
    for tau in (0.0, 150.0, 1e30):
        out = matrices.LAYOUTS[layout](torch.full((150, 210), 7.0, dtype=dtype, device=device))
        assert mm(a, b, tau=tau, out=out) is out
        assert torch.equal(out, mm(a, b, tau=tau))
        result, norms = addmm(added, a, b, tau=tau, out=out, return_norms=True)
        assert result is out
        assert torch.equal(out, addmm(added, a, b, tau=tau))
        assert torch.equal(norms, norm_map(out))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("tau", [0.0, 150.0, 1e30])
def test_out_is_every_argument(device, dtype, symmetric, tau):
    """X = 2 X - X X in place."""
    x = matrices.symmetric(200, dtype, device)
    options = {"beta": 2, "alpha": -1, "tau": tau, "block": 32, "symmetric": symmetric}
    expected, of_expected = addmm(x, x, x, **options, return_info=True)
    result, norms, info = addmm(x, x, x, **options, out=x, return_norms=True, return_info=True)
    assert result is x
    assert torch.equal(x, expected)
    assert torch.equal(norms, norm_map(x, 32))
    assert info == of_expected


def test_out_shares_memory_with_an_argument(device):
    memory = matrices.patchy(400, 130, device=device)
    a, b, input = memory[:130], memory[130:260], memory[135:265]
    windows, row = (memory[10:140], memory[50:180], memory[136:266]), memory[0]
    across = [memory.flatten()[5 : 5 + 130 * 130].view(130, 130)]
    wide = matrices.normal(150, 700, device=device)
    array = matrices.patchy(300, 300).numpy()
    one, other = (torch.from_numpy(array) for _ in range(2))
    over_other_columns = [wide.flatten()[70 : 70 + 16 * 700].view(16, 700)]
    for of, outs, call in (
        (memory, (a, b, *windows), functools.partial(addmm, input, a, b, tau=100.0)),
        (memory, (a, b, *windows), functools.partial(mm, a, b, tau=100.0)),
        (memory, across, functools.partial(addmm, row, a, b, tau=100.0)),
        (wide, over_other_columns, functools.partial(mm, wide[130:146, :130], wide[:130], tau=0.1)),
        (one, [other], functools.partial(mm, one, one, tau=0.0)),
    ):
        expected, before = call(), of.clone()
        for out in outs:
            assert torch.equal(call(out=out), expected)
            of.copy_(before)


def test_out_without_elements_is_resized(device):
    a, b, added = operands(device)
    for empty in (torch.empty(0, device=device), torch.empty(3, 0, device=device)):
        result, norms = addmm(added, a, b, tau=150.0, out=empty, return_norms=True)
        assert result is empty
        assert torch.equal(empty, addmm(added, a, b, tau=150.0))
        assert torch.equal(norms, norm_map(empty))


def test_errors_leave_out_as_it_was(device):
    a, b, _ = operands(device)
    for out, options, error, message in (
        (torch.ones(5, 5), {}, RuntimeError, r"product's shape \[150, 210\]; got \[5, 5\]"),
        (torch.ones(150, 210).double(), {}, TypeError, "float32; got float64"),
        (torch.ones(150, 1, device=device).expand(150, 210), {}, RuntimeError, "single memory loc"),
        (torch.ones(0), {"symmetric": True}, RuntimeError, "must be square"),
        (torch.ones(0), {"norm_a": torch.ones(1, 1, device=device)}, RuntimeError, "norm_a must"),
    ):
        out = out.to(device)
        before, shape = out.clone(), out.shape
        with pytest.raises(error, match=message):
            mm(a, b, tau=0.0, out=out, **options)
        assert out.shape == shape
        assert torch.equal(out, before)


def test_out_may_hold_what_the_call_reads(device):
    """Also a threshold, which tells the products that were skipped."""
    x = matrices.patchy(300, 300, device=device)
    x[0, 0] = 300
    expected, info = mm(x, x, tau=x[0, 0].clone(), return_info=True)
    c, found = mm(x, x, tau=x[0, 0], out=x, return_info=True)
    assert torch.equal(c, expected)
    assert found == info


def test_norms_may_be_a_given_norm_map(device):
    x = matrices.patchy(1200, 1200, device=device)
    norms = norm_map(x, 32)
    options = {"threshold": 100.0, "block": [32] * 3, "norm_a": norms, "norm_b": norms}
    expected, of_expected = ops.spamm_with_norms(x, x, **options)
    out = torch.empty_like(x)
    ops.spamm_into(x, x, out=out, **options, norms=norms)
    assert torch.equal(out, expected)
    assert torch.equal(norms, of_expected)


def test_out_has_no_gradient(device):
    a, b, _ = operands(device)
    out = torch.zeros(150, 210, device=device)
    for wanting in (a, b, out):
        wanting.requires_grad_()
        with pytest.raises(RuntimeError, match="has no gradient"):
            mm(a, b, tau=0.0, out=out)
        with pytest.raises(RuntimeError, match="no gradient"):
            ops.spamm_into(a, b, out=out, threshold=0.0)
        with torch.no_grad():
            mm(a, b, tau=0.0, out=out)
        wanting.requires_grad_(False)
    assert torch.equal(out, mm(a, b, tau=0.0))


def test_writing_to_out_is_seen_by_autograd(device):
    a, b, _ = operands(device)
    out = torch.ones(150, 210, device=device)
    factor = torch.ones(150, 210, device=device, requires_grad=True)
    product = factor * out
    mm(a, b, tau=0.0, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with torch.inference_mode():
        version = out._version
        mm(a, b, tau=0.0, out=out)
        assert out._version == version + 1


def test_autocast_leaves_products_with_out_alone(device):
    a, b, _ = operands(device)
    out = torch.empty(150, 210, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        mm(a, b, tau=0.5, out=out)
    assert torch.equal(out, mm(a, b, tau=0.5))


def test_under_compile(device):
    a, b, added = operands(device)
    options = {"return_norms": True, "return_info": True}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(a, b, c, tau):
        _, norms, info = addmm(c, a, b, tau=tau, out=c, **options)
        return c * 1, norms, info

    out, tau = added.clone(), torch.tensor(150.0, device=device)
    expected, of_expected, wanted = addmm(added, a, b, tau=tau, **options)
    result, norms, info = step(a, b, out, tau)
    assert torch.equal(out, expected)
    assert torch.equal(result, expected)
    assert torch.equal(norms, of_expected)
    assert all(map(torch.equal, info[:3], wanted[:3]))
    assert info[3:] == wanted[3:] == ((64, 64, 64), None)


# ---- What was skipped ---------------------------------------------------------------------------


@every_knob
def test_under_autocast_the_norms_are_of_what_is_multiplied(device, knob):
    a, b = (matrices.fading(*of, device=device) for of in ((200, 300), (300, 150)))
    with torch.autocast(device.type, torch.bfloat16):
        result, info = mm(a, b, **knob, block=32, return_info=True)
        assert torch.equal(result, mm(a, b, **knob, block=32))
    _, expected = mm(a.bfloat16(), b.bfloat16(), **knob, block=32, return_info=True)
    assert info == expected
    assert 0 < info.valid_ratio < 1  # a test of all or nothing would show little


def test_conv2d_of_one_image_with_norms_and_padding_by_name(device):
    rows, columns = (torch.hann_window(size + 2)[1:-1] ** 2 for size in (9, 8))
    input = (5 * matrices.normal(40, 9, 8) * rows[:, None] * columns).to(device)
    weight = matrices.normal(64, 40, 3, 2, seed=1, device=device)
    given = {"padding": "same", "valid_ratio": 0.5, "pixel_block": (1, 4, 8), "return_norms": True}
    results, info = conv2d(input, weight, **given, return_info=True)
    assert all(map(torch.equal, results, conv2d(input, weight, **given)))
    assert abs(info.valid_ratio - 0.5) < 0.05


def test_float64_images_of_any_magnitude(device):
    """Squares of entries of 1e-200 have no number, and their norms have."""
    input = matrices.normal(2, 64, 16, 16, dtype=torch.float64, device=device)
    input[1] *= 1e-200
    weight = matrices.normal(64, 64, 3, 3, dtype=torch.float64, device=device, seed=1)
    options = {"padding": 1, "pixel_block": (1, 8, 8), "return_info": True}
    assert conv2d(input, weight, **options, tau=1e-205)[1].valid_ratio == 1
    skipping = conv2d(input, weight, **options, tau=1e-190)[1]
    assert skipping.valid_ratio == 0.5
    assert 0 < skipping.error_bound < 1e-190 * 64 * 9 * 64
