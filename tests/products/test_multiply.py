"""mm, addmm, bmm and linear against the oracle.

Most operands here are ``matrices.patchy``, whose products sum exactly in float32 and in TF32: a
right result then has one rounding, to the operands' type, and is compared bit for bit. Normally
distributed operands are compared within ``reference.rounding_bound``. Shapes, layouts, types and
knobs are the fuzzer's, of which tests/robustness runs 2,000 cases; here is what none of them draws.
"""

import itertools

import matrices
import numpy as np
import pytest
import reference
import torch

import spamm_torch

INF, NAN = float("inf"), float("nan")


def norm_maps(a, b, block):
    m, k, n = reference.edges(block)
    return spamm_torch.norm_map(a, (m, k)), spamm_torch.norm_map(b, (k, n))


def middle_tau(a, b, block, quantile=0.6):
    """A threshold that is the norm product of some block products, so that ties are decided too."""
    candidates = reference.thresholds(*norm_maps(a, b, block))
    return float(candidates[int(quantile * (len(candidates) - 1))])


def exact(a, b, tau, block, **scaling):
    """The oracle's product, by the decisions that the library's norm maps make, rounded once."""
    maps = norm_maps(a, b, block)
    return torch.from_numpy(reference.multiply(a, b, *maps, tau, block, **scaling)).to(a.dtype)


def assert_exact(actual, a, b, tau, block, **scaling):
    assert actual.device == a.device
    expected = exact(a, b, tau, block, **scaling)
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)


# ---- mm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(70, 3000, 6000), (6000, 3000, 70), (1100, 70, 1300)])
def test_operands_larger_than_caches_and_tiles(device, dtype, shape):
    m, k, n = (min(edge, 1500) for edge in shape) if device.type == "cpu" else shape
    a = matrices.patchy(m, k, dtype=dtype, device=device)
    b = matrices.patchy(k, n, dtype=dtype, device=device, seed=1)
    tau = middle_tau(a, b, 128)
    assert_exact(spamm_torch.mm(a, b, tau=tau, block=128), a, b, tau, 128)


@pytest.mark.parametrize("shape", [(300, 1000, 200), (70, 4000, 40)])
def test_rounding_is_the_types_own(device, dtype, shape):
    """Normally distributed operands: float32 sums for half types, float64 for float64."""
    m, k, n = shape
    a = matrices.normal(m, k, dtype=dtype, device=device)
    b = matrices.normal(k, n, dtype=dtype, device=device, seed=1)
    tau, maps = middle_tau(a, b, 64, 0.5), norm_maps(a, b, 64)
    expected = reference.multiply(a, b, *maps, tau, 64)
    error = np.abs(reference.to_float64(spamm_torch.mm(a, b, tau=tau)) - expected)
    assert (error <= reference.rounding_bound(a, b, *maps, tau, 64)).all()


def test_a_memory_mapped_file(tmp_path):
    """Copy-on-write pages of a file serve as an operand without being loaded first."""
    loaded = matrices.exponential_decay(110)
    np.save(tmp_path / "a.npy", np.asfortranarray(loaded.numpy()))
    mapped = torch.from_numpy(np.load(tmp_path / "a.npy", mmap_mode="c"))
    assert mapped.stride() == (1, 110)
    expected = spamm_torch.mm(mapped.clone(), loaded, tau=0.5, block=32)
    assert torch.equal(spamm_torch.mm(mapped, loaded, tau=0.5, block=32), expected)


def test_results_beyond_the_type_are_inf(device, dtype):
    """As in a dense product: the sum is rounded to the type once, where it may overflow."""
    largest = torch.finfo(dtype).max
    a = torch.tensor([[largest, 0.0], [largest, -largest]], dtype=dtype, device=device)
    b = torch.tensor([[2.0, 1.0], [2.0, 1.0]], dtype=dtype, device=device)
    result = spamm_torch.mm(a, b, tau=0.0).cpu()
    assert result[0].tolist() == [INF, largest]
    if dtype == torch.float16:  # its sums, in float32, do not overflow on the way
        assert result[1].tolist() == [0, 0]


# ---- Thresholds ---------------------------------------------------------------------------------


@pytest.mark.strength(3)  # what is skipped is decided here
@pytest.mark.parametrize(
    ("form", "tau"),
    [
        *itertools.product(["float", "host tensor", "device tensor"], [0.0, -0.0, -3.5, -INF]),
        ("host tensor", NAN),
        ("device tensor", NAN),
    ],
)
def test_no_positive_tau_is_the_dense_product(device, dtype, form, tau):
    a = matrices.patchy(100, 150, dtype=dtype, device=device)
    b = matrices.patchy(150, 70, dtype=dtype, device=device, seed=1)
    place = {"host tensor": "cpu", "device tensor": device}
    threshold = tau if form == "float" else torch.tensor(tau, device=place[form])
    dense = (a.double() @ b.double()).to(dtype)
    assert torch.equal(spamm_torch.mm(a, b, tau=threshold), dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_at_tau_is_kept(device, dtype):
    """Block k = 0 of norm product exactly tau stays; the next representable tau drops it."""
    a = torch.zeros(32, 64, dtype=dtype, device=device)
    b = torch.zeros(64, 32, dtype=dtype, device=device)
    a[0, 0], b[0, 0] = 3.0, 5.0
    a[0, 32], b[32, 0] = 7.0, 4.0
    tau = torch.tensor(15.0, dtype=dtype, device=device)
    above = torch.nextafter(tau, torch.full_like(tau, INF))
    assert spamm_torch.mm(a, b, tau=tau, block=32)[0, 0].item() == 15 + 28
    assert spamm_torch.mm(a, b, tau=above, block=32)[0, 0].item() == 28
    assert spamm_torch.mm(a, b, tau=28.0, block=32)[0, 0].item() == 28
    assert spamm_torch.mm(a, b, tau=28.5, block=32)[0, 0].item() == 0


@pytest.mark.parametrize("tau_dtype", matrices.DTYPES)
@pytest.mark.parametrize("on_host", [False, True])
def test_tau_tensors_of_any_floating_type(device, dtype, tau_dtype, on_host):
    a = matrices.patchy(100, 100, dtype=dtype, device=device)
    value = torch.tensor(middle_tau(a, a, 32)).to(tau_dtype).item()
    tau = torch.tensor(value, dtype=tau_dtype, device="cpu" if on_host else device)
    assert_exact(spamm_torch.mm(a, a, tau=tau, block=32), a, a, value, 32)


def test_given_norm_maps_decide(device):
    """Maps that the caller supplies stand for the operands' own; NaN that is skipped stays out."""
    a = matrices.patchy(100, 130, device=device)
    b = matrices.patchy(130, 70, device=device, seed=1)
    norm_a = torch.ones(4, 5, device=device)
    norm_b = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0], device=device)[:, None].expand(5, 3)
    only_a = spamm_torch.mm(a, b, tau=INF, block=32, norm_a=norm_a * NAN)
    assert torch.equal(only_a, a @ b)
    keep = (torch.arange(130, device=device) // 32) % 2 == 0
    expected = a[:, keep] @ b[keep]
    a[:, ~keep] = NAN
    actual = spamm_torch.mm(a, b, tau=0.5, block=32, norm_a=norm_a, norm_b=norm_b)
    assert torch.equal(actual, expected)


# ---- NaN and Inf --------------------------------------------------------------------------------


@pytest.mark.usefixtures("new_memory_holds_nan")
@pytest.mark.strength(4)  # what is skipped is decided here
@pytest.mark.parametrize("special", [INF, -INF, NAN])
@pytest.mark.parametrize("tau", [0.0, 1.0, INF])
@pytest.mark.parametrize("operand", ["a", "b"])
def test_nan_and_inf_are_never_skipped(device, dtype, special, tau, operand):
    a = matrices.patchy(100, 100, dtype=dtype, device=device)
    b = matrices.patchy(100, 100, dtype=dtype, device=device, seed=1)
    (a if operand == "a" else b)[40, 70] = special
    actual = spamm_torch.mm(a, b, tau=tau, block=32)
    assert_exact(actual, a, b, tau, 32)
    line = actual[40] if operand == "a" else actual[:, 70]
    assert not torch.isfinite(line).all()


@pytest.mark.parametrize("tau", [0.5, -0.5])
def test_given_norms_below_zero_decide_by_their_products(device, dtype, tau):
    """No norm is, but what they say is done: two below zero make a valid product."""
    a = matrices.patchy(128, 128, dtype=dtype, device=device).t()
    b = matrices.patchy(128, 128, dtype=dtype, device=device, seed=1)
    norm_a = torch.tensor([[-1.0, 2.0], [1.0, -1.0]], device=device)
    norm_b = torch.tensor([[-1.0, 1.0], [0.1, -3.0]], device=device)
    maps = norm_a.to(spamm_torch.norm_map(a).dtype), norm_b.to(spamm_torch.norm_map(b).dtype)
    actual = spamm_torch.mm(a, b, tau=tau, norm_a=maps[0], norm_b=maps[1])
    expected = reference.multiply(a, b, *maps, tau, 64)
    assert torch.equal(actual.cpu(), torch.from_numpy(expected).to(dtype))


# ---- addmm --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0, 2), (-0.25, -0.5), (2, 0)])
@pytest.mark.parametrize("shape", [(100, 70), (1, 70), (100, 1), (1, 1), (70,), ()], ids=str)
@pytest.mark.parametrize("layout", matrices.LAYOUTS)
def test_addmm(device, dtype, beta, alpha, shape, layout):
    """alpha * product + beta * input, all of it exact until the one rounding to the type."""
    a = matrices.patchy(100, 150, dtype=dtype, device=device)
    b = matrices.patchy(150, 70, dtype=dtype, device=device, seed=1)
    input = matrices.patchy(*(1, 1, *shape)[-2:], dtype=dtype, device=device) + 2.5
    input = matrices.LAYOUTS[layout](input) if len(shape) == 2 else input.reshape(shape)
    tau = middle_tau(a, b, 32)
    actual = spamm_torch.addmm(input, a, b, beta=beta, alpha=alpha, tau=tau, block=32)
    assert_exact(actual, a, b, tau, 32, input=input, beta=beta, alpha=alpha)


# ---- bmm ----------------------------------------------------------------------------------------


def test_bmm_knobs_speak_for_all_batches(device):
    """One batch ten times the other: a ratio of one half keeps the large one and drops the rest."""
    large = matrices.normal(1, 96, 96, device=device).abs() + 1
    a = torch.cat([large, large / 10])
    result = spamm_torch.bmm(a, a, valid_ratio=0.5, block=32)
    assert not result[1].any()
    maps = norm_maps(a, a, 32)
    tau = spamm_torch.find_tau(*maps, 0.5)
    assert spamm_torch.valid_counts(*maps, tau).sum((1, 2)).tolist() == [27, 0]
    assert torch.equal(result, spamm_torch.bmm(a, a, tau=tau, block=32))
    tau = torch.ops.spamm_torch.find_tau(*maps, max_error=0.05)
    assert torch.equal(
        spamm_torch.bmm(a, a, max_error=0.05, block=32), spamm_torch.bmm(a, a, tau=tau, block=32)
    )


@pytest.mark.parametrize("shape", [(3, 70, 90), (70, 90), (1, 90), (90,), (3, 1, 90), (1, 1, 1)])
def test_batched_product_with_input(device, shape):
    """The operator takes batches with an input, as torch.baddbmm does."""
    a = matrices.patchy(3, 70, 100, device=device)
    b = matrices.patchy(3, 100, 90, device=device, seed=1)
    tau = middle_tau(a, b, 32)
    input = matrices.patchy(*(shape if len(shape) > 1 else (1, 90)), device=device).reshape(shape)
    actual = torch.ops.spamm_torch.spamm(
        a, b, tau=torch.tensor(tau), block=32, input=input, beta=2, alpha=-1
    )
    assert_exact(actual, a, b, tau, 32, input=input, beta=2, alpha=-1)


# ---- linear -------------------------------------------------------------------------------------


@pytest.mark.parametrize("leading", [(), (1,), (70,), (3, 50), (2, 3, 20), (0,), (2, 0)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_linear(device, dtype, leading, with_bias, strided):
    rows = int(np.prod(leading))
    flat = matrices.patchy(rows, 100, dtype=dtype, device=device)
    input = flat.reshape(*leading, 100)
    input = input.movedim(0, -1).contiguous().movedim(-1, 0) if strided else input
    weight = matrices.patchy(150, 100, dtype=dtype, device=device, seed=1)
    bias = matrices.patchy(1, 150, dtype=dtype, device=device)[0] if with_bias else None
    tau = middle_tau(flat, weight.t(), 32)
    actual = spamm_torch.linear(input, weight, bias, tau=tau, block=32)
    assert actual.shape == (*leading, 150)
    assert_exact(actual.reshape(rows, 150), flat, weight.t(), tau, 32, input=bias)


# ---- Same bits, and what runs -------------------------------------------------------------------


@pytest.mark.parametrize("knob", [{"tau": 60.0}, {"valid_ratio": 0.4}, {"max_error": 0.1}])
def test_same_bits_every_time_and_operands_are_left_alone(device, dtype, knob):
    a = matrices.normal(400, 500, dtype=dtype, device=device)
    b = matrices.normal(500, 300, dtype=dtype, device=device, seed=1)
    copies = a.clone(), b.clone()
    first = spamm_torch.mm(a, b, **knob)
    assert torch.equal(a, copies[0])
    assert torch.equal(b, copies[1])
    for _ in range(5):
        assert torch.equal(spamm_torch.mm(a.clone(), b.clone(), **knob), first)


def kernels_of_this_machine(device, dtype):
    """The names that backend_for may give, by what the processor or the GPU can do."""
    if device.type == "cuda":
        everywhere, on_hopper = {
            torch.float16: ("sm80-mma-f16", "sm90-wgmma-f16"),
            torch.bfloat16: ("sm80-mma-bf16", "sm90-wgmma-bf16"),
            torch.float32: ("sm80-simt-f32", "sm90-wgmma-f32x3"),
            torch.float64: ("sm80-dmma-f64", "sm90-dmma-f64"),
        }[dtype]
        hopper = torch.cuda.get_device_capability(device) == (9, 0)
        return {everywhere} | ({on_hopper} if hopper else set())
    if dtype == torch.float64:
        return {"cpu-plain"}
    generated = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    single = "cpu-brgemm" if generated else "cpu-blas"
    if dtype == torch.float32:
        return {single}
    instructions = "amx_fp16" if dtype == torch.float16 else "amx_bf16"
    natively = torch.cpu.get_capabilities().get(instructions, False)  # if the system grants them
    return {f"{single}-float32"} | ({"cpu-brgemm-vnni"} if natively else set())


@pytest.mark.parametrize("block", [32, 64, 128, (128, 64, 128)])
def test_backend_for_names_a_kernel(device, dtype, block):
    name = spamm_torch.backend_for(device, dtype, block)
    assert name in kernels_of_this_machine(device, dtype)
    assert spamm_torch.backend_for(str(device), dtype, block) == name
