"""Norm maps -> threshold: the search, on one device and across ranks, the decisions, the counts and
the error bound.
"""

from fractions import Fraction

import matrices
import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st

import spamm_torch

INF, NAN = float("inf"), float("nan")
REAL = (torch.float32, torch.float64)


def find_tau_for_error(norm_a, norm_b, max_error, **skipping):
    return torch.ops.spamm_torch.find_tau(norm_a, norm_b, max_error=max_error, **skipping)


def maps(device, norm_a, norm_b, dtype=torch.float32):
    return tuple(torch.tensor(norm, dtype=dtype, device=device) for norm in (norm_a, norm_b))


def assert_is_a_norm(found, norms):
    assert (found.shape, found.dtype, found.device) == ((), norms.dtype, norms.device)


FINITE = [kind for kind in matrices.NORM_KINDS if kind not in ("specials", "subnormal")]


@st.composite
def norm_maps(draw, max_edge=8, kinds=matrices.NORM_KINDS, tiny=0.0, batched=True):
    """Pairs of norm maps on the CPU, some empty or batched, B's own or shared, with ties, zeros."""
    dtype = draw(st.sampled_from(REAL))
    batch = draw(st.sampled_from([(), (1,), (3,), (2, 2), (0,)])) if batched else ()
    rows, inner, columns = (draw(st.integers(0, max_edge)) for _ in range(3))
    rng, kind = np.random.default_rng(draw(st.integers(0, 2**32 - 1))), draw(st.sampled_from(kinds))
    own_b = batch if draw(st.booleans()) else ()
    shapes = (*batch, rows, inner), (*own_b, inner, columns)
    pair = (matrices.norms(rng, kind, of, dtype) for of in shapes)
    norm_a, norm_b = (x.where(torch.from_numpy(rng.random(x.shape)) >= 0.1, tiny) for x in pair)
    return norm_a, norm_b.expand(*batch, inner, columns)


@st.composite
def maps_and_tau(draw, **options):
    """Norm maps, and a threshold: often one of the products itself, or its neighbour."""
    norm_a, norm_b = draw(norm_maps(**options))
    candidates = reference.thresholds(norm_a, norm_b)
    tau = candidates[draw(st.integers(0, len(candidates) - 1))]
    nudge = draw(st.sampled_from([-INF, None, INF]))
    if nudge is not None:
        tau = np.nextafter(tau, tau.dtype.type(nudge))
    return norm_a, norm_b, float(tau)


# ---- find_tau -----------------------------------------------------------------------------------


@given(pair=norm_maps(), ratio=st.floats(0, 1, exclude_min=True))
def test_find_tau_is_the_exact_selection(device, pair, ratio):
    norm_a, norm_b = (norm.to(device) for norm in pair)
    tau = spamm_torch.find_tau(norm_a, norm_b, ratio)
    assert_is_a_norm(tau, norm_a)
    assert tau.item() == reference.find_tau(norm_a, norm_b, ratio)


# Norm maps, and the threshold of each ratio.
SPECIAL_MAPS = {
    # Products 1, 1, 1, 2, 2, 2, 2, 3: only 0, 1, 5 and 8 of them can be kept. The nearest number is
    # kept, and between two the larger: of 6.5, 3 and 0.5.
    "ties": (
        *([[1], [2], [1], [2], [1], [2], [2], [3]], [[1]]),
        {1.0: 1, 0.95: 1, 0.8125: 1, 0.8: 2, 0.375: 2, 0.37: 3, 0.0625: 3, 0.06: INF},
    ),
    "zeros": ([[0] * 4] * 4, [[0] * 4] * 4, {0.2: INF, 1.0: 0}),  # all are kept, or none
    # Two of eight products are never skipped, so a quarter needs no finite one.
    "some": ([[INF], [NAN], [1], [2], [3], [4], [5], [6]], [[1]], {0.25: INF, 0.5: 5}),
    "infinity times zero": ([[INF], [1]], [[0, 2]], {0.5: INF, 0.75: 2}),
}


@pytest.mark.parametrize("name", SPECIAL_MAPS)
@pytest.mark.parametrize("dtype", REAL)
def test_find_tau_of_special_maps(device, name, dtype):
    *pair, taus = SPECIAL_MAPS[name]
    norm_a, norm_b = maps(device, *pair, dtype)
    for ratio, tau in taus.items():
        found = spamm_torch.find_tau(norm_a, norm_b, ratio)
        assert found.item() == tau  # exact, hence within the tolerance of the paper's search
        limits = {"max_iterations": 1, "tolerance": 0.5}
        assert spamm_torch.find_tau(norm_a, norm_b, ratio, **limits) == found
        kept = spamm_torch.valid_counts(norm_a, norm_b, found).sum().item()
        assert kept == reference.valid_counts(norm_a, norm_b, tau).sum()


def test_maps_of_any_stride(device):
    norm_a = matrices.normal(24, 18, device=device).abs()
    norm_b = matrices.normal(18, 30, device=device, seed=1).abs()
    tau = spamm_torch.find_tau(norm_a, norm_b, 0.4)

    def all_of(a, b):
        at_tau = (spamm_torch.valid_counts, spamm_torch.error_bound)
        found = [function(a, b, tau) for function in at_tau]
        return [*found, spamm_torch.find_tau(a, b, 0.4), find_tau_for_error(a, b, 0.1)]

    for layout in ("transposed", "every other row", "every third column", "misaligned"):
        changed = (matrices.LAYOUTS[layout](norm) for norm in (norm_a, norm_b))
        assert all(map(torch.equal, all_of(*changed), all_of(norm_a, norm_b)))


@pytest.fixture
def always_warned():
    """Lets torch say again what it says once."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


def test_a_ratio_that_keeps_no_product_says_so(device, capfd, always_warned):
    x, weight = (
        matrices.normal(*shape, dtype=torch.float64, device=device, seed=2)
        for shape in ((16, 64, 4, 4), (128, 32, 2, 2))
    )
    a, b = (matrices.normal(2, 128, 128, device=device, seed=seed).double() for seed in range(2))
    calls = {
        8: lambda ratio: spamm_torch.mm(a[0], b[0], valid_ratio=ratio),
        16: lambda ratio: spamm_torch.bmm(a, b, valid_ratio=ratio),
        12: lambda ratio: spamm_torch.mm_shards(
            [a[0, :64], torch.cat([a[0, 64:], a[1, :64]])],
            [b[0, :64], b[0, 64:]],
            valid_ratio=ratio,
        )[1],
        4: lambda ratio: spamm_torch.linear(a[0], b[0, :10], valid_ratio=ratio),
        # 2 groups, 4 kernel positions, 9 blocks of 2 x 2 pixels of 16 images
        72: lambda ratio: spamm_torch.conv2d(x, weight, padding=1, groups=2, valid_ratio=ratio),
    }
    for products, call in calls.items():
        line = f"of {products} block products is nearest to none of them: all are skipped"
        assert not call(0.49 / products).any()
        assert line in capfd.readouterr().err
        assert call(0.51 / products).any()
        assert not capfd.readouterr().err
    assert spamm_torch.find_tau(*map(spamm_torch.norm_map, (a[0], b[0])), 0.05).isinf()
    assert "(0.0625 and more keep one)" in capfd.readouterr().err


# ---- Decisions, counts and ratio ----------------------------------------------------------------


@given(case=maps_and_tau())
def test_counts_and_ratio(device, case):
    *pair, tau = case
    norm_a, norm_b = (norm.to(device) for norm in pair)
    counts = spamm_torch.valid_counts(norm_a, norm_b, tau)
    assert counts.dtype == torch.int32
    assert counts.device == norm_a.device
    expected = reference.valid_counts(norm_a, norm_b, tau)
    np.testing.assert_array_equal(counts.cpu().numpy(), expected, strict=True)
    ratio = spamm_torch.valid_ratio(norm_a, norm_b, tau)
    assert_is_a_norm(ratio, norm_a)
    exact = reference.valid_ratio(norm_a, norm_b, tau)
    assert ratio.item() == torch.tensor(exact, dtype=norm_a.dtype).item()


@pytest.mark.parametrize("tau", [0.0, -0.0, -1.0, -INF, NAN])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_thresholds_that_skip_nothing(device, tau, as_tensor):
    if tau != tau and not as_tensor:
        return  # refused: test_errors
    norm_a, norm_b = maps(device, [[0, 1], [NAN, 1e-30]], [[1e-30, 0], [2, INF]])
    given_tau = torch.tensor(tau, device=device) if as_tensor else tau
    assert spamm_torch.valid_counts(norm_a, norm_b, given_tau).tolist() == [[2, 2], [2, 2]]
    assert spamm_torch.error_bound(norm_a, norm_b, given_tau).item() == 0


@pytest.mark.parametrize("where", ["float", "host tensor", "device tensor"])
@pytest.mark.parametrize("dtype", REAL)
def test_tau_is_rounded_once_to_the_norms_type(device, where, dtype):
    """float32: 1 + 2^-25 rounds to 1 and keeps a product of 1; float64 tells the two apart."""
    one, place = torch.ones(1, 1, dtype=dtype, device=device), "cpu" if "host" in where else device
    for value, kept in ((0, 1), (2.0**-25, dtype == torch.float32), (2.0**-22, 0), (1e300, 0)):
        tau = torch.tensor(1 + value, dtype=torch.float64, device=place)
        tau = tau.item() if where == "float" else tau
        assert spamm_torch.valid_counts(one, one, tau).item() == kept


# ---- The error bound and its search -------------------------------------------------------------


@given(
    case=maps_and_tau(kinds=FINITE, tiny=1e-30),
    skipping=st.sampled_from([None, 0.5, 1.0, 2.0]),
)
def test_error_bound_is_above_the_exact_value_and_close(device, case, skipping):
    """Norms to skip by, where they are given, decide; plain norms measure."""
    *pair, tau = case
    norm_a, norm_b = (norm.to(device) for norm in pair)
    skip_norm = None if skipping is None else norm_b * skipping
    host_tau = torch.tensor(tau, dtype=torch.float64)
    bound = torch.ops.spamm_torch.error_bound(norm_a, norm_b, host_tau, skip_norm_b=skip_norm)
    assert_is_a_norm(bound, norm_a)
    exact = reference.error_bound(norm_a, norm_b, tau, skip_norm)
    slack = 2.0**-17 if norm_a.dtype == torch.float32 else 2.0**-43
    smallest = torch.finfo(norm_a.dtype).smallest_normal * torch.finfo(norm_a.dtype).eps
    assert exact <= bound.item() <= exact * (1 + slack) + smallest
    if skipping is None:
        assert torch.equal(spamm_torch.error_bound(norm_a, norm_b, tau), bound)


@pytest.mark.parametrize("dtype", REAL)
def test_error_bound_covers_the_rounding_of_the_norms(device, dtype):
    """A row times itself loses exactly the product of the true norms, which rounded norms miss."""
    for seed in range(50):
        row = matrices.normal(1, 3, dtype=dtype, device=device, seed=seed)
        norms = spamm_torch.norm_map(row), spamm_torch.norm_map(row.t())
        bound = spamm_torch.error_bound(*norms, tau=float("inf")).item()
        assert Fraction(bound) >= sum(Fraction(x) ** 2 for x in row.flatten().tolist())


@pytest.mark.parametrize(
    ("dtype", "small", "large"), [(torch.float32, 1e-30, 1e15), (torch.float64, 1e-160, 1e120)]
)
def test_error_bound_neither_vanishes_nor_overflows(device, dtype, small, large):
    """Squares, or even products, below the type's range still bound what is lost from above."""
    norm_a, norm_b = maps(device, [[small]], [[small]], dtype)
    exact = float(reference.error_bound(norm_a, norm_b, 1.0))
    assert spamm_torch.error_bound(norm_a, norm_b, 1.0).item() >= exact > 0
    # Left out are products that are never skipped.
    norm_a, norm_b = maps(device, [[INF, NAN, large]], [[1], [1], [large]], dtype)
    bound = spamm_torch.error_bound(norm_a, norm_b, INF).item()
    assert bound == pytest.approx(large * large, rel=2e-5)


@given(
    pair=norm_maps(kinds=FINITE, tiny=1e-30),
    max_error=st.one_of(st.sampled_from([0.0, 1.0, 1.01]), st.floats(1e-6, 1)),
    skipping=st.booleans(),
)
def test_find_tau_for_error_keeps_promises_and_skips_all_it_may(device, pair, max_error, skipping):
    norm_a, norm_b = (norm.to(device) for norm in pair)
    skip_norm = norm_b * 2 if skipping else None
    tau = find_tau_for_error(norm_a, norm_b, max_error, skip_norm_b=skip_norm)
    assert_is_a_norm(tau, norm_a)
    norms = (reference.to_array(norm).astype(np.longdouble) for norm in (norm_a, norm_b))
    limit = max_error * np.prod([np.sqrt(np.sum(norm**2)) for norm in norms])
    assert reference.error_bound(norm_a, norm_b, tau, skip_norm) <= limit
    candidates = reference.thresholds(norm_a, norm_b if skip_norm is None else skip_norm)
    larger = candidates[candidates > tau.item()]
    if candidates.size > 1 and larger.size:
        # The next larger set of skipped products must break the promise.
        lost = reference.error_bound(norm_a, norm_b, larger[0], skip_norm)
        assert lost * (1 + 2.0**-14) > limit


@pytest.mark.parametrize(
    ("norm_a", "norm_b", "max_error", "tau"),
    [
        ([[0, 1, 2]], [[1], [3], [2]], 0.0, 3),  # zeros alone are skipped
        ([[1e-30, 1]], [[1e-30], [1]], 0.0, 0),  # 1e-30 * 1e-30 is zero in float32 alone
        ([[1e30, 1]], [[1e30], [1]], INF, INF),
        ([[0, 1]], [[1e30], [1]], INF, INF),
        # Norms without a bound have no finite limit.
        *[([[x, y]], [[1], [1e-3]], 0.5, 0) for x in (INF, NAN) for y in (1e-3, 0.0)],
        *[([[x, 1]], [[1e30], [1]], INF, 0) for x in (INF, NAN)],
    ],
)
def test_find_tau_for_error_by_hand(device, norm_a, norm_b, max_error, tau):
    found = spamm_torch.find_tau(*maps(device, norm_a, norm_b), max_error=max_error)
    assert found.item() == tau
    a = torch.ones(40, 40, device=device)
    assert not spamm_torch.mm(a, a, max_error=INF).any()


@pytest.mark.parametrize("dtype", REAL)
def test_find_tau_for_error_leaves_room_for_rounded_norms(device, dtype):
    """A limit above what a threshold loses, but below the bound of it, allows less."""
    norm_a = matrices.normal(9, 12, dtype=dtype, device=device).abs()
    norm_b = matrices.normal(12, 7, dtype=dtype, device=device, seed=1).abs()
    slack = 2.0**-18 if dtype == torch.float32 else 2.0**-44
    norms = norm_a.double().norm().item() * norm_b.double().norm().item()
    for tau in reference.thresholds(norm_a, norm_b)[5:-1:50]:
        lost = float(reference.error_bound(norm_a, norm_b, tau))
        max_error = lost * (1 + slack / 2) / (1 - 2 * slack) / norms
        found = find_tau_for_error(norm_a, norm_b, max_error)
        assert found < tau
        assert spamm_torch.error_bound(norm_a, norm_b, found) <= max_error * norms


@pytest.mark.parametrize(
    ("dtype", "tiny", "large"),
    [
        (torch.float16, 2.0**-24, 65504.0),
        (torch.bfloat16, 2.0**-133, 1e30),
        (torch.float32, 2.0**-149, 1e30),
        (torch.float64, 5e-324, 1e300),
        (torch.float64, 5e-324, 1e-300),
    ],
)
def test_subnormal_norms_keep_the_promises(device, dtype, tiny, large):
    """A @ B is one entry, 2 * tiny * large; the norm of A, sqrt(2) * tiny, is stored as tiny."""
    a, b = (torch.zeros(64, 64, dtype=dtype, device=device) for _ in range(2))
    a[0, :2], b[:2, 0] = tiny, large
    norms = spamm_torch.norm_map(a), spamm_torch.norm_map(b)
    assert spamm_torch.mm(a, b, tau=INF).abs().max() == 0
    exact = 2 * Fraction(a[0, 0].item()) * Fraction(b[0, 0].item())
    for pair in (norms, norms[::-1]):  # subnormal are the norms of one operand, or of the other
        bound = Fraction(spamm_torch.error_bound(*pair, INF).item())
        assert exact <= bound <= 4 * exact + 8 * Fraction(2.0**-1074)
        assert spamm_torch.error_bound(*pair, 0.0).item() == 0
        # The error from skipping is all of norm(A) * norm(B): less than that allows nothing.
        tau = spamm_torch.find_tau(*pair, max_error=0.8)
        assert spamm_torch.valid_counts(*pair, tau).item() == 1


@pytest.mark.parametrize("dtype", REAL)
def test_every_subnormal_norm_is_at_most_one_unit_off(device, dtype):
    """All pairs of true norms about some stored ones; each is rounded to the nearest number."""
    unit = 2.0**-149 if dtype == torch.float32 else 2.0**-1074
    stored = torch.arange(9, dtype=torch.float64) * unit
    norm_a = stored.to(dtype).to(device)[:, None]
    norm_b = torch.full((1, 1), 2.0, dtype=dtype, device=device)
    for i in range(1, 9):
        bound = spamm_torch.error_bound(norm_a[i : i + 1], norm_b, INF).item()
        assert Fraction(bound) >= Fraction(unit) * (2 * i + 1)
    assert spamm_torch.error_bound(norm_a[:1], norm_b, INF).item() == 0


# ---- On CUDA: what the CPU finds ----------------------------------------------------------------


# One thread block holds or sorts maps, or many do; with a thread for each block of C, for several,
# or with several for each. They share out K in parts that may be uneven, and the last one empty.
SEARCHES = [(5, 7, 4), (16, 16, 16), (17, 17, 17), (20, 24, 30), (19, 300, 20), (70, 33, 91)]
SEARCHES += [(3, 200, 65), (65, 3, 64), (128, 128, 128), (150, 170, 190), (300, 40, 310)]
SEARCHES += [(1, 5000, 1), (1, 97, 1), (2, 5000, 2), (12, 1001, 16), (12, 1001, 17)]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("kind", matrices.NORM_KINDS)
@pytest.mark.parametrize("shape", SEARCHES)
def test_searches_find_what_the_cpu_finds(shape, kind, dtype):
    """Also where a sample misleads."""
    m, k, n = shape
    rng = np.random.default_rng(0)
    pair = [matrices.norms(rng, kind, of, dtype) for of in ((m, k), (k, n))]
    there = [norms.cuda() for norms in pair]
    for ratio in (1e-9, 0.001, 0.05, 0.3, 0.95, 1.0):  # the first is nearest to nothing at all
        found = spamm_torch.find_tau(*there, ratio)
        assert torch.equal(found.cpu(), spamm_torch.find_tau(*pair, ratio))
    for max_error in (0.0, 1e-9, 1e-4, 0.1, 0.7, 2.0) if kind in FINITE else ():
        expected = find_tau_for_error(*pair, max_error)
        assert find_tau_for_error(*there, max_error).item() == expected.item(), max_error


@pytest.mark.cuda
def test_more_staircases_than_shared_memory_keeps():
    """Maps whose sorted rows a launch has to sort anew in every pass."""
    norm_a = matrices.normal(64, 200_000, dtype=torch.float32, device="cuda").abs()
    norm_b = matrices.normal(200_000, 64, dtype=torch.float32, device="cuda", seed=1).abs()
    tau = spamm_torch.find_tau(norm_a, norm_b, 0.3)
    total = norm_a.shape[1] * 64 * 64
    above = torch.nextafter(tau, torch.full_like(tau, INF))
    kept = [spamm_torch.valid_counts(norm_a, norm_b, t).sum().item() for t in (tau, above)]
    assert kept[1] < kept[0]
    distance = abs(kept[0] - 0.3 * total)
    assert distance <= abs(kept[1] - 0.3 * total)
    assert distance <= kept[0] - kept[1]


@pytest.mark.cuda
def test_counts_beyond_32_bits():
    """2048^3 = 8.6e9 products of four values: sum and selection must not wrap around."""
    norm_a = torch.arange(2048, device="cuda").remainder(4).add(1.0)[:, None].expand(2048, 2048)
    norm_b = torch.ones(2048, 2048, device="cuda")
    for ratio, tau in ((0.25, 4), (0.5, 3), (0.75, 2), (1.0, 1)):
        assert spamm_torch.find_tau(norm_a, norm_b, ratio).item() == tau
        assert spamm_torch.valid_ratio(norm_a, norm_b, tau).item() == ratio


@pytest.mark.cuda
@pytest.mark.parametrize("scale", [1e-180, 1e-150, 1.0, 1e150])
def test_the_error_search_far_from_one(scale):
    norm_a = matrices.normal(40, 50, dtype=torch.float64).abs() * scale
    norm_b = matrices.normal(50, 60, dtype=torch.float64, seed=1).abs()
    # Any threshold is right for products that are too small for float64.
    for other in (norm_b, norm_b * scale) if scale * scale > 0 else (norm_b,):
        expected = find_tau_for_error(norm_a, other, 0.1)
        assert find_tau_for_error(norm_a.cuda(), other.cuda(), 0.1).item() == expected.item()
