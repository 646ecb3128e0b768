"""``return_info``: what a call skipped, of the very norm maps and threshold it used."""

import math

import matrices
import pytest
import torch

import spamm_torch

KNOBS = {"tau": 30.0, "valid_ratio": 0.4, "max_error": 0.3}
every_knob = pytest.mark.parametrize("knob", KNOBS)


def decaying(*shape, seed=0, **options):
    """Normal numbers that fade along both dimensions, so that a third of the products matter."""
    values = matrices.normal(*shape, seed=seed, **options)
    fade = [torch.exp2(-torch.arange(size, device=values.device) / 40) for size in shape[-2:]]
    return values * (8 * fade[0][:, None] * fade[1]).to(values.dtype)


def maps(a, b, block):
    m, k, n = block
    return spamm_torch.norm_map(a, (m, k)), spamm_torch.norm_map(b, (k, n))


def threshold(norm_a, norm_b, knob):
    """The threshold of a knob, by the stages' own functions."""
    if knob == "valid_ratio":
        return spamm_torch.find_tau(norm_a, norm_b, KNOBS[knob])
    if knob == "max_error":
        return spamm_torch.find_tau(norm_a, norm_b, max_error=KNOBS[knob])
    return torch.tensor(KNOBS[knob], dtype=norm_a.dtype, device=norm_a.device)


def check(info, norm_a, norm_b, knob, block=(32, 32, 32)):
    tau = threshold(norm_a, norm_b, knob)
    ratio = spamm_torch.valid_ratio(norm_a, norm_b, tau)
    expected = tau, ratio, spamm_torch.error_bound(norm_a, norm_b, tau)
    assert isinstance(info, spamm_torch.functional.SkipInfo)
    assert info[3:] == (block, None)
    for found, wanted in zip(info[:3], expected, strict=True):
        assert (found.shape, found.dtype, found.device) == ((), norm_a.dtype, norm_a.device)
        assert not found.requires_grad
        assert torch.equal(found, wanted)
    assert 0 < info.valid_ratio < 1  # a test of all or nothing would show little


def test_given_maps_are_used(device):
    a, b = decaying(100, 100, device=device), decaying(100, 100, seed=1, device=device)
    norm_a, norm_b = maps(a, b, (32, 32, 32))
    _, info = spamm_torch.mm(
        a, b, tau=1e9, block=32, norm_a=norm_a * 1e9, norm_b=norm_b, return_info=True
    )
    assert torch.equal(info.valid_ratio, spamm_torch.valid_ratio(norm_a * 1e9, norm_b, 1e9))


@every_knob
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("shape", [(4, 50, 300), (300,)])
def test_linear(device, knob, pinned, shape):
    input = decaying(200, 300, device=device)[: max(1, 4 * 50)].reshape(-1)[: 300 * 200]
    input = input.reshape(4, 50, 300) if len(shape) == 3 else input[:300]
    weight, bias = decaying(150, 300, seed=1, device=device), torch.ones(150, device=device)
    norm_weight = spamm_torch.norm_map(weight.t(), 32) if pinned else None
    given = {knob: KNOBS[knob], "block": 32, "norm_weight": norm_weight}
    result, info = spamm_torch.linear(input, weight, bias, **given, return_info=True)
    assert torch.equal(result, spamm_torch.linear(input, weight, bias, **given))
    assert result.shape == (*shape[:-1], 150)
    check(info, *maps(input.reshape(-1, 300), weight.t(), (32, 32, 32)), knob)


@every_knob
def test_under_autocast_the_norms_are_of_what_is_multiplied(device, knob):
    a, b = decaying(200, 300, device=device), decaying(300, 150, seed=1, device=device)
    given = {knob: KNOBS[knob], "block": 32}
    with torch.autocast(device.type, torch.bfloat16):
        result, info = spamm_torch.mm(a, b, **given, return_info=True)
        assert torch.equal(result, spamm_torch.mm(a, b, **given))
    check(info, *maps(a.bfloat16(), b.bfloat16(), (32, 32, 32)), knob)


def test_no_products_at_all(device):
    a, x = torch.ones(0, 40, device=device), torch.ones(0, 40, 8, 8, device=device)
    weight = torch.ones(64, 40, 3, 3, device=device)
    options = {"valid_ratio": 0.5, "return_info": True}
    for (result, info), shape in (
        (spamm_torch.mm(a, a.t(), **options), (0, 0)),
        (spamm_torch.conv2d(x, weight, **options), (0, 64, 6, 6)),
    ):
        assert result.shape == shape
        assert info.valid_ratio == 1
        assert info.error_bound == 0


def test_a_threshold_on_the_host(device):
    a = decaying(100, 100, device=device)
    for tau in (5.0, torch.tensor(5.0), torch.tensor(5.0, dtype=torch.float64)):
        _, info = spamm_torch.mm(a, a, tau=tau, block=32, return_info=True)
        assert info.tau == 5
        assert info.tau.device.type == device.type


def test_compiled(device):
    a, b = decaying(200, 300, device=device), decaying(300, 150, seed=1, device=device)

    def product(a, b, tau):
        return spamm_torch.mm(a, b, tau=tau, block=32, return_info=True)

    tau = torch.tensor(30.0, device=device)
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    (result, info), (expected, wanted) = compiled(a, b, tau), product(a, b, tau)
    assert torch.equal(result, expected)
    assert all(map(torch.equal, info[:3], wanted[:3]))
    assert info[3:] == wanted[3:] == ((32, 32, 32), None)
    # A graph outlives the settings that choose a kernel, and is of the worst.
    assert wanted.total_bound <= info.total_bound < math.inf


@pytest.mark.cuda
def test_nothing_waits_for_the_device():
    a = decaying(200, 300, device="cuda")
    input = matrices.normal(2, 32, 8, 8, device="cuda")
    weight = matrices.normal(32, 32, 3, 3, seed=1, device="cuda")
    for knob in ({"tau": 30.0}, {"valid_ratio": 0.4}, {"max_error": 0.3}):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):  # refuses whatever waits
            spamm_torch.mm(a, a.t(), **knob, return_info=True)
            spamm_torch.conv2d(input, weight, padding=1, **knob, return_info=True)


# ---- Convolutions -------------------------------------------------------------------------------


def bright_in_the_middle(shape, device, dtype):
    height, width = (torch.hann_window(size + 2)[1:-1] ** 2 for size in shape[-2:])
    values = matrices.normal(*shape, dtype=torch.float32) * height[:, None] * width
    return (5 * values).to(device, dtype)


def test_conv2d_of_one_image_with_norms_and_padding_by_name(device):
    input = bright_in_the_middle((40, 9, 8), device, torch.float32)
    weight = matrices.normal(64, 40, 3, 2, seed=1, device=device)
    given = {"padding": "same", "valid_ratio": 0.5, "pixel_block": (1, 4, 8)}
    (result, norms), info = spamm_torch.conv2d(
        input, weight, **given, return_norms=True, return_info=True
    )
    expected, wanted = spamm_torch.conv2d(input, weight, **given, return_norms=True)
    assert torch.equal(result, expected)
    assert torch.equal(norms, wanted)
    assert abs(info.valid_ratio - 0.5) < 0.05


def test_conv2d_of_pinned_norms(device):
    input = bright_in_the_middle((3, 40, 9, 7), device, torch.float32)
    weight = matrices.normal(70, 40, 3, 3, seed=1, device=device)
    norms = torch.ops.spamm_torch.conv2d_weight_norm(weight)
    of = [
        spamm_torch.conv2d(input, weight, tau=tau, norm_weight=norm_weight, return_info=True)[1]
        for tau, norm_weight in ((60.0, None), (60.0, norms), (120.0, norms * 2))
    ]
    assert torch.equal(of[0].valid_ratio, of[1].valid_ratio)
    assert torch.equal(of[0].valid_ratio, of[2].valid_ratio)


def test_float64_images_of_any_magnitude(device):
    """Squares of entries of 1e-200 have no number, and their norms have."""
    input = matrices.normal(2, 64, 16, 16, dtype=torch.float64, device=device)
    input[1] *= 1e-200
    weight = matrices.normal(64, 64, 3, 3, dtype=torch.float64, device=device, seed=1)

    def info(tau):
        options = {"padding": 1, "tau": tau, "pixel_block": (1, 8, 8), "return_info": True}
        return spamm_torch.conv2d(input, weight, **options)[1]

    assert info(1e-205).valid_ratio == 1
    skipping = info(1e-190)
    assert skipping.valid_ratio == 0.5
    assert 0 < skipping.error_bound < 1e-190 * 64 * 9 * 64
