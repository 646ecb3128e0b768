"""Counts of norm products by their keys, and the search for a threshold across ranks."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import matrices
import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import waiting_is_an_error

import spamm_torch
from spamm_torch.distributed.histogram import find_tau_across

INF, NAN = float("inf"), float("nan")
REAL = (torch.float32, torch.float64)
BINS = 2048
MOST_SHIFT = {torch.float32: 20, torch.float64: 52}
product_histogram = torch.ops.spamm_torch.product_histogram


@st.composite
def pairs_of_maps(draw, max_edge=8):
    """Norm maps on the CPU, some empty."""
    rows, inner, columns = (draw(st.integers(0, max_edge)) for _ in range(3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind, dtype = draw(st.sampled_from(matrices.NORM_KINDS)), draw(st.sampled_from(REAL))
    return matrices.norms(rng, kind, (rows, inner), dtype), matrices.norms(
        rng, kind, (inner, columns), dtype
    )


# ---- product_histogram --------------------------------------------------------------------------


def keys_of(norm_a, norm_b):
    """The bit patterns of all products; NaN counts as infinity."""
    products = reference.products(norm_a, norm_b).ravel()
    products[np.isnan(products)] = INF
    return products.view(np.int32 if products.itemsize == 4 else np.int64).astype(np.int64)


def counts_of(keys, low, shift, bins):
    places = np.minimum((keys[keys >= low] - low) >> shift, bins)
    return np.bincount(places, minlength=bins + 1).tolist()


@st.composite
def maps_and_bins(draw):
    """Norm maps and bins: from 0, from the key of a product or from one beside it."""
    pair = draw(pairs_of_maps())
    keys = np.append(keys_of(*pair), 0)
    low = int(keys[draw(st.integers(0, len(keys) - 1))]) + draw(st.integers(-2, 2))
    shift = draw(st.integers(0, MOST_SHIFT[pair[0].dtype]))
    return pair, max(low, 0), shift, draw(st.sampled_from([1, 2, 100, 2047, BINS]))


@given(case=maps_and_bins())
def test_histogram_counts_every_product(device, case):
    pair, low, shift, bins = case
    norm_a, norm_b = (norm.to(device) for norm in pair)
    counts = product_histogram(norm_a, norm_b, torch.tensor(low, device=device), shift, bins)
    assert counts.dtype == torch.int64
    assert counts.device == norm_a.device
    assert counts.tolist() == counts_of(keys_of(*pair), low, shift, bins)


@pytest.mark.parametrize("dtype", REAL)
def test_histogram_of_all_keys(device, dtype):
    """The widest bins hold every product, the largest ones in the bin of infinity."""
    norm_a = torch.tensor([[0.0], [NAN], [INF], [1e308], [1.0]], device=device).to(dtype)
    norm_b = torch.tensor([[0.0, 1e-45, 1e308]], device=device).to(dtype)
    low = torch.zeros((), dtype=torch.int64, device=device)
    counts = product_histogram(norm_a, norm_b, low, MOST_SHIFT[dtype], BINS)
    infinity = torch.tensor(INF, dtype=dtype)
    key = infinity.view(torch.int32 if dtype == torch.float32 else torch.int64).item()
    assert counts.tolist() == counts_of(keys_of(norm_a, norm_b), 0, MOST_SHIFT[dtype], BINS)
    assert counts[key >> MOST_SHIFT[dtype] :].sum().item() == (keys_of(norm_a, norm_b) == key).sum()


def test_histogram_counts_all_batches_and_any_stride(device):
    norm_a = matrices.normal(3, 7, 9, device=device).abs()
    norm_b = matrices.normal(3, 9, 5, device=device, seed=1).abs()
    low = torch.zeros((), dtype=torch.int64, device=device)
    counts = product_histogram(norm_a, norm_b, low, 20, BINS)
    each = [product_histogram(a, b, low, 20, BINS) for a, b in zip(norm_a, norm_b, strict=True)]
    assert torch.equal(counts, sum(each))
    transposed = norm_a.mT.contiguous().mT
    assert torch.equal(product_histogram(transposed, norm_b, low, 20, BINS), counts)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("kind", matrices.NORM_KINDS)
@pytest.mark.parametrize("shape", [(3, 200, 65), (65, 3, 64), (128, 128, 128), (150, 170, 190)])
def test_cpu_and_cuda_count_alike(shape, kind, dtype):
    m, k, n = shape
    rng = np.random.default_rng(0)
    pair = matrices.norms(rng, kind, (m, k), dtype), matrices.norms(rng, kind, (k, n), dtype)
    there = [norm.cuda() for norm in pair]
    middle = int(np.median(keys_of(*pair)))
    for low, shift in ((0, MOST_SHIFT[dtype]), (middle, 0), (max(middle - 2**15, 0), 5)):
        start = torch.tensor(low)
        counts = product_histogram(*there, start.cuda(), shift, BINS)
        assert torch.equal(counts.cpu(), product_histogram(*pair, start, shift, BINS))


@pytest.mark.cuda
def test_histogram_beyond_32_bits():
    """2048^3 = 8.6e9 products of four values: two in bins, two above them."""
    norm_a = torch.arange(2048, device="cuda").remainder(4).add(1.0)[:, None].expand(2048, 2048)
    norm_b = torch.ones(2048, 2048, device="cuda")
    one = torch.ones((), device="cuda").view(torch.int32).long()
    counts = product_histogram(norm_a, norm_b, one, 20, 12)
    assert counts.tolist() == [2**31, *[0] * 7, 2**31, *[0] * 3, 2**32]


# ---- find_tau_across ----------------------------------------------------------------------------


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


def split(rng, norm_a, norm_b, ranks):
    """One part for each rank: rows of A's map, and B's whole map or, of two rows of ranks, half."""
    mesh_columns = 2 if ranks % 2 == 0 and rng.random() < 0.5 else 1
    return [
        (norm_a[rows], norm_b[:, columns])
        for rows in cut(rng, norm_a.shape[0], ranks // mesh_columns)
        for columns in cut(rng, norm_b.shape[1], mesh_columns)
    ]


def assert_equals_one_device(norm_a, norm_b, parts, ratio):
    expected = spamm_torch.find_tau(norm_a, norm_b, ratio)
    for tau in search(parts, ratio)[0]:
        assert tau.shape == ()
        assert tau.dtype == norm_a.dtype
        assert tau.device == norm_a.device
        assert torch.equal(tau, expected), f"{tau.item()!r}, not {expected.item()!r}"


@given(
    pair=pairs_of_maps(max_edge=12),
    ratio=st.floats(0, 1, exclude_min=True),
    ranks=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_find_tau_across_ranks_equals_one_device(device, pair, ratio, ranks, seed):
    norm_a, norm_b = (norm.to(device) for norm in pair)
    parts, count = split(np.random.default_rng(seed), norm_a, norm_b, ranks), product_count(*pair)
    for share in (1.0, 1e-9, ratio, max(1, round(ratio * count)) / max(1, count)):
        assert_equals_one_device(norm_a, norm_b, parts, share)


def test_the_next_larger_product_of_another_rank(device):
    """Three equal products without which the ratio is nearer, and a larger one far above."""
    norm_a = torch.tensor([[1.0], [1.0], [1.0], [1e20]], device=device)
    norm_b = torch.ones(1, 1, device=device)
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


def test_bad_arguments(device):
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
