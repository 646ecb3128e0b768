"""Norm maps -> threshold: the search, on one device and across ranks, the decisions, the counts and
the error bound.
"""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import matrices
import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import waiting_is_an_error

import spamm_torch
from spamm_torch.distributed.rank_product import find_tau_across
from tables import paper

INF, NAN = float("inf"), float("nan")
REAL = (torch.float32, torch.float64)
BINS = 2048
MOST_SHIFT = {torch.float32: 20, torch.float64: 52}
product_histogram = torch.ops.spamm_torch.product_histogram


def find_tau_for_error(norm_a, norm_b, max_error, **skipping):
    return torch.ops.spamm_torch.find_tau(norm_a, norm_b, max_error=max_error, **skipping)


def maps(device, norm_a, norm_b, dtype=torch.float32):
    return tuple(torch.tensor(norm, dtype=dtype, device=device) for norm in (norm_a, norm_b))


def assert_is_a_norm(found, norms):
    assert (found.shape, found.dtype, found.device) == ((), norms.dtype, norms.device)


FINITE = [kind for kind in matrices.NORM_KINDS if kind not in ("specials", "subnormal")]


@st.composite
def norm_maps(draw, max_edge=8, kinds=matrices.NORM_KINDS, tiny=0.0, batched=True):
    """Pairs of norm maps on the CPU, some empty or batched, B's for itself or for all, with ties
    and zeros.
    """
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
    tau, low = spamm_torch.find_tau(norm_a, norm_b, 0.4), torch.tensor(0, device=device)

    def all_of(a, b):
        at_tau = (spamm_torch.valid_counts, spamm_torch.error_bound)
        found = [function(a, b, tau) for function in at_tau]
        found += [spamm_torch.find_tau(a, b, 0.4), find_tau_for_error(a, b, 0.1)]
        return [*found, product_histogram(a, b, low, 20, BINS)]

    for layout in ("transposed", "every other row", "every third column", "misaligned"):
        changed = (matrices.LAYOUTS[layout](norm) for norm in (norm_a, norm_b))
        assert all(map(torch.equal, all_of(*changed), all_of(norm_a, norm_b)))


def test_a_ratio_that_keeps_no_product_warns(device, recwarn):
    x, weight = (
        matrices.normal(*shape, dtype=torch.float64, device=device, seed=2)
        for shape in ((16, 64, 4, 4), (128, 32, 2, 2))
    )
    a, b = (matrices.normal(2, 128, 128, device=device, seed=seed).double() for seed in range(2))
    calls = {
        8: lambda ratio: spamm_torch.mm(a[0], b[0], valid_ratio=ratio),
        16: lambda ratio: spamm_torch.bmm(a, b, valid_ratio=ratio),
        4: lambda ratio: spamm_torch.linear(a[0], b[0, :10], valid_ratio=ratio),
        # 2 groups, 4 kernel positions, 9 blocks of 2 x 2 pixels of 16 images
        72: lambda ratio: spamm_torch.conv2d(x, weight, padding=1, groups=2, valid_ratio=ratio),
    }
    for products, call in calls.items():
        line = f"of {products} block products is nearest to none of them: all are skipped"
        with pytest.warns(UserWarning, match=line):
            assert not call(0.49 / products).any()
        recwarn.clear()
        assert call(0.51 / products).any()
        assert not recwarn.list
    with pytest.warns(UserWarning, match=r"0\.0625 and more keep one"):
        assert spamm_torch.find_tau(*map(spamm_torch.norm_map, (a[0], b[0])), 0.05).isinf()


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
def test_find_tau_for_error_keeps_the_promise_and_skips_all_it_may(
    device, pair, max_error, skipping
):
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


# ---- product_histogram --------------------------------------------------------------------------


def keys_of(norm_a, norm_b):
    """The bit patterns of all products; NaN counts as infinity."""
    products = reference.products(norm_a, norm_b).ravel()
    products[np.isnan(products)] = INF
    return products.view(np.int32 if products.itemsize == 4 else np.int64).astype(np.int64)


@st.composite
def maps_and_bins(draw):
    """Norm maps and bins: from 0, from the key of a product or from one beside it."""
    pair = draw(norm_maps())
    keys = np.append(keys_of(*pair), 0)
    low = int(keys[draw(st.integers(0, len(keys) - 1))]) + draw(st.integers(-2, 2))
    most = MOST_SHIFT[pair[0].dtype]
    shift = draw(st.sampled_from([0, most]) | st.integers(0, most))
    return pair, max(low, 0), shift, draw(st.sampled_from([1, 2, 100, 2047, BINS]))


@given(case=maps_and_bins())
def test_histogram_counts_every_product(device, case):
    pair, low, shift, bins = case
    norm_a, norm_b = (norm.to(device) for norm in pair)
    counts = product_histogram(norm_a, norm_b, torch.tensor(low, device=device), shift, bins)
    assert counts.dtype == torch.int64
    assert counts.device == norm_a.device
    keys = keys_of(*pair)
    places = np.minimum((keys[keys >= low] - low) >> shift, bins)
    assert counts.tolist() == np.bincount(places, minlength=bins + 1).tolist()


# ---- find_tau_across ranks ----------------------------------------------------------------------


class Ranks:
    """Ranks that run as threads and sum tensors as torch.distributed.all_reduce does."""

    def __init__(self, count):
        self.parts = [None] * count
        self.barrier = threading.Barrier(count, timeout=60)
        self.summed = [[] for _ in range(count)]  # the sizes of the tensors summed

    def sum_on(self, rank):
        def reduce(counts):
            self.summed[rank].append(counts.numel() * counts.element_size())
            self.parts[rank] = counts.clone()
            self.barrier.wait()
            total = sum(self.parts)
            self.barrier.wait()
            counts.copy_(total)

        return reduce

    def run(self, function):
        """function(rank, reduce) on all ranks; their results."""

        def guarded(rank):
            try:
                return function(rank, self.sum_on(rank))
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(len(self.parts)) as pool:
            return list(pool.map(guarded, range(len(self.parts))))


def product_count(norm_a, norm_b):
    return norm_a.numel() * norm_b.shape[-1]


def search(parts, valid_ratio):
    """The thresholds that the owners of these pairs of maps find together, and the sums' sizes."""
    ranks, total = Ranks(len(parts)), sum(product_count(*pair) for pair in parts)
    taus = ranks.run(lambda r, reduce: find_tau_across(*parts[r], valid_ratio, total, reduce))
    return taus, ranks.summed


def cut(rng, length, parts):
    """Ranges that cover a length, uneven, some of them empty."""
    cuts = [0, *sorted(rng.integers(0, length + 1, parts - 1).tolist()), length]
    return [slice(first, last) for first, last in itertools.pairwise(cuts)]


@given(
    pair=norm_maps(max_edge=12, batched=False),
    ratio=st.floats(0, 1, exclude_min=True),
    ranks=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_find_tau_across_ranks_equals_one_device(device, pair, ratio, ranks, seed):
    """Each rank has rows of A's map, and B's whole map or, of two rows of ranks, half."""
    norm_a, norm_b = (norm.to(device) for norm in pair)
    rng, count = np.random.default_rng(seed), product_count(*pair)
    mesh_columns = 2 if ranks % 2 == 0 and rng.random() < 0.5 else 1
    parts = [
        (norm_a[rows], norm_b[:, columns])
        for rows in cut(rng, norm_a.shape[0], ranks // mesh_columns)
        for columns in cut(rng, norm_b.shape[1], mesh_columns)
    ]
    for share in (1.0, 1e-9, ratio, max(1, round(ratio * count)) / max(1, count)):
        expected = spamm_torch.find_tau(norm_a, norm_b, share)
        for tau in search(parts, share)[0]:
            assert_is_a_norm(tau, norm_a)
            assert torch.equal(tau, expected), f"{tau.item()!r}, not {expected.item()!r}"


def test_the_next_larger_product_of_another_rank(device):
    """Three equal products without which the ratio is nearer, and a larger one far above."""
    norm_a, norm_b = maps(device, [[1], [1], [1], [1e20]], [[1]])
    taus, _ = search([(norm_a[:3], norm_b), (norm_a[3:], norm_b)], 0.5)
    assert [tau.item() for tau in taus] == [norm_a[3].item()] * 2


@pytest.mark.parametrize(("dtype", "rounds"), [(torch.float32, 3), (torch.float64, 6)])
def test_what_a_search_sums(device, dtype, rounds):
    """16 KiB a round, and as many rounds again only for the next larger of equal products."""
    norm_a = torch.arange(1.0, 9.0, device=device, dtype=dtype)[:, None]
    norm_b = torch.ones(1, 2, device=device, dtype=dtype)
    parts = [(norm_a[:3], norm_b), (norm_a[3:], norm_b)]
    assert search(parts, 0.5)[1] == [[8 * (BINS + 1)] * rounds] * 2
    norm_b[:, 1] = 2
    parts = [(torch.ones_like(part), norm_b) for part in (norm_a[:3], norm_a[3:])]
    assert search(parts, 0.7)[1] == [[8 * (BINS + 1)] * (2 * rounds)] * 2


@pytest.mark.parametrize("total", [0, 7, 9, -1])
def test_a_wrong_number_of_products_is_refused_on_every_rank(device, total):
    norm_a, norm_b = torch.rand(2, 2, device=device), torch.rand(2, 2, device=device)

    def refused(rank, reduce):
        with pytest.raises(ValueError, match=f"8; got {total}") as error:
            find_tau_across(norm_a[rank : rank + 1], norm_b, 0.5, total, reduce)
        return str(error.value)

    first, second = Ranks(2).run(refused)
    assert first == second


def test_bad_arguments_of_ranks(device):
    norm = torch.ones(2, 2, device=device)
    for ratio in (0.0, -0.1, 1.1, NAN):
        with pytest.raises(ValueError, match=f"valid_ratio must be .*; got {ratio}"):
            find_tau_across(norm, norm, ratio, 8, lambda counts: None)
    with pytest.raises(TypeError, match=r"total_products must be an integer; got 8\.0"):
        find_tau_across(norm, norm, 0.5, 8.0, lambda counts: None)


@pytest.mark.cuda
def test_nothing_waits_for_the_device_before_the_product_is_found():
    norm_a = matrices.normal(40, 30, device="cuda").abs()
    norm_b = matrices.normal(30, 50, device="cuda", seed=1).abs()
    rounds = []
    refused = pytest.raises(RuntimeError, match="synchronizing CUDA operation")
    with waiting_is_an_error(), refused:
        find_tau_across(norm_a, norm_b, 0.3, 40 * 30 * 50, rounds.append)
    assert len(rounds) == 3


# ---- On CUDA: what the CPU finds ----------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("kind", matrices.NORM_KINDS)
@pytest.mark.parametrize(
    "shape",
    [(16, 16, 16), (20, 24, 30), (3, 200, 65), (65, 3, 64), (128, 128, 128), (150, 170, 190)],
)
def test_one_thread_block_or_many_count_alike(shape, kind, dtype):
    """Maps that one thread block holds or sorts, and for many; whether or not a sample misleads."""
    m, k, n = shape
    rng = np.random.default_rng(0)
    pair = [matrices.norms(rng, kind, of, dtype) for of in ((m, k), (k, n))]
    there = [norms.cuda() for norms in pair]
    for ratio in (1e-9, 0.001, 0.05, 0.3, 0.95, 1.0):  # the first is nearest to nothing at all
        found = spamm_torch.find_tau(*there, ratio)
        assert torch.equal(found.cpu(), spamm_torch.find_tau(*pair, ratio))
    middle = int(np.median(keys_of(*pair)))
    for low, shift in ((0, MOST_SHIFT[dtype]), (middle, 0), (max(middle - 2**15, 0), 5)):
        start = torch.tensor(low)
        counts = product_histogram(*there, start.cuda(), shift, BINS)
        assert torch.equal(counts.cpu(), product_histogram(*pair, start, shift, BINS))


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
    one = torch.ones((), device="cuda").view(torch.int32).long()
    counts = product_histogram(norm_a, norm_b, one, 20, 12)  # two in bins, two above them
    assert counts.tolist() == [2**31, *[0] * 7, 2**31, *[0] * 3, 2**32]


# One thread block searches, or many; with a thread for each block of C, for several, or with
# several for each. They share out K in parts that may be uneven, and the last one empty.
ERROR_SEARCHES = [(5, 7, 4), (17, 17, 17), (19, 300, 20), (70, 33, 91), (300, 40, 310)]
ERROR_SEARCHES += [(1, 5000, 1), (1, 97, 1), (2, 5000, 2), (12, 1001, 16), (12, 1001, 17)]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("shape", ERROR_SEARCHES)
def test_the_error_search_finds_what_the_cpu_finds(dtype, shape):
    m, k, n = shape
    # Entries over many powers of two, as in the norm maps of matrices with decay.
    norm_a = (4 * matrices.normal(m, k, dtype=torch.float64)).exp().to(dtype)
    norm_b = (4 * matrices.normal(k, n, dtype=torch.float64, seed=1)).exp().to(dtype)
    for max_error in (0.0, 1e-9, 1e-4, 0.1, 0.7, 2.0):
        expected = find_tau_for_error(norm_a, norm_b, max_error)
        found = find_tau_for_error(norm_a.cuda(), norm_b.cuda(), max_error)
        assert found.item() == expected.item(), max_error


@pytest.mark.cuda
@pytest.mark.parametrize("scale", [1e-180, 1e-150, 1.0, 1e150])
def test_the_error_search_far_from_one(scale):
    norm_a = matrices.normal(40, 50, dtype=torch.float64).abs() * scale
    norm_b = matrices.normal(50, 60, dtype=torch.float64, seed=1).abs()
    # Any threshold is right for products that are too small for float64.
    for other in (norm_b, norm_b * scale) if scale * scale > 0 else (norm_b,):
        expected = find_tau_for_error(norm_a, other, 0.1)
        assert find_tau_for_error(norm_a.cuda(), other.cuda(), 0.1).item() == expected.item()


@pytest.mark.cuda
def test_table_1():
    """Thresholds for a_ij = b_ij = 0.1 / (|i-j|^0.1 + 1); tests/study has small ones."""
    for n in (8192, 32768):
        norms = spamm_torch.norm_map(matrices.algebraic_decay(n, device="cuda"), 32)
        for ratio in paper.RATIOS:
            tau = spamm_torch.find_tau(norms, norms, ratio)
            assert tau.item() == pytest.approx(paper.TAU[n, ratio], rel=0.01), (n, ratio)
            reached = spamm_torch.valid_ratio(norms, norms, tau).item()
            assert reached == pytest.approx(ratio, abs=0.01), (n, ratio)
