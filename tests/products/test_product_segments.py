"""float64 products whose tiles are cut into two segments that two thread blocks of a GPU multiply.

Whether they are follows from the sizes; SPAMM_TORCH_SEGMENTS forces it. A segment has every second
step of 64 along K. The first that is done leaves its sums in C, where the other finds them.
"""

import matrices
import pytest
import torch
from support import captured, hopper_kernels_run

from spamm_torch import addmm, mm, norm_map

pytestmark = pytest.mark.cuda

STEP = 64  # of K
FORCED = [1, 2]
SHAPES = [(1040, 1040, 1040), (64, 2000, 64), (130, 300, 70), (1, 65, 200), (500, 40, 100)]


@pytest.fixture
def force(monkeypatch):
    """Forces a number of segments until the end of the test."""

    def set_number(segments):
        monkeypatch.setenv("SPAMM_TORCH_SEGMENTS", str(segments))

    return set_number


def operands(m, k, n, seed=0):
    a = matrices.normal(m, k, dtype=torch.float64, device="cuda", seed=seed)
    return a, matrices.normal(k, n, dtype=torch.float64, device="cuda", seed=seed + 1)


def of_segment(a, b, segment):
    """The columns of a and rows of b that one segment multiplies."""
    steps = range(segment, -(-a.size(-1) // STEP), 2)
    columns = [k for step in steps for k in range(a.size(-1))[step * STEP : (step + 1) * STEP]]
    return a[..., columns].contiguous(), b[..., columns, :].contiguous()


def sum_of_segments(force, multiply, a, b):
    """What the segments add up to, each of them computed by a product of its own."""
    force(1)
    return multiply(*of_segment(a, b, 0)) + multiply(*of_segment(a, b, 1))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tau", [0.0, 4096.0, 1e30])
@pytest.mark.parametrize("block", [64, 32])
def test_each_segment_has_the_bits_of_a_product_of_its_steps(force, shape, tau, block):
    a, b = operands(*shape)
    tau *= (block / 64) ** 2
    expected = sum_of_segments(force, lambda a, b: mm(a, b, tau=tau, block=block), a, b)
    whole = mm(a, b, tau=tau, block=block)
    force(2)
    got = mm(a, b, tau=tau, block=block)
    if hopper_kernels_run():
        assert torch.equal(got, expected)
    torch.testing.assert_close(got, whole, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("segments", FORCED)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_transposed_operands(force, segments, layout):
    a, b = operands(200, 333, 150)
    x = a.mT.contiguous().mT if layout[0] == "t" else a
    y = b.mT.contiguous().mT if layout[1] == "t" else b
    force(segments)
    assert torch.equal(mm(x, y, tau=3000.0), mm(a, b, tau=3000.0))


@pytest.mark.parametrize("segments", FORCED)
def test_batches_and_what_is_added(force, segments):
    a, b = operands(5 * 70, 200, 90)
    a = a.view(5, 70, 200)
    spamm = torch.ops.spamm_torch.spamm
    force(segments)
    together = spamm(a, b.expand(5, 200, 90), threshold=3000.0)
    assert torch.equal(together, torch.stack([mm(matrix, b, tau=3000.0) for matrix in a]))
    added = matrices.normal(70, 90, dtype=torch.float64, device="cuda", seed=2)
    expected = 0.5 * added - 2 * together[0]
    got = addmm(added, a[0], b, beta=0.5, alpha=-2.0, tau=3000.0)
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-12)
    assert addmm(added, a[0], b, beta=0.5, alpha=-2.0, tau=3000.0, out=added) is added
    assert torch.equal(added, got)


@pytest.mark.parametrize("segments", FORCED)
def test_results_amid_other_memory(force, segments):
    """Segments meet in the result itself, and touch nothing beside it."""
    a, b = operands(150, 700, 133)
    force(segments)
    expected = mm(a, b, tau=3000.0)
    for width in (200, 201):  # rows whose pairs of entries are aligned, and rows where they are not
        memory = torch.full((170, width), 7.0, dtype=torch.float64, device="cuda")
        mm(a, b, tau=3000.0, out=memory[:150, :133])
        assert torch.equal(memory[:150, :133], expected)
        memory[:150, :133] = 7
        assert (memory == 7).all()
    x, y = operands(200, 200, 200)
    expected = addmm(x, x, y, beta=2, alpha=-1, tau=3000.0)
    assert torch.equal(addmm(x, x, y, beta=2, alpha=-1, tau=3000.0, out=x), expected)


@pytest.mark.parametrize("segments", FORCED)
@pytest.mark.parametrize("n", [65, 500, 1040])
def test_symmetric_products_have_the_bits_of_whole_ones(force, segments, n):
    upper = matrices.normal(n, n, dtype=torch.float64, device="cuda").triu()
    a = upper + upper.triu(1).mT
    force(segments)
    for tau in (0.0, 4096.0):
        c, norms = mm(a, a, tau=tau, symmetric=True, return_norms=True)
        whole = mm(a, a, tau=tau)
        assert torch.equal(c, torch.where(torch.ones_like(c, dtype=torch.bool).triu(), whole, c.mT))
        assert torch.equal(norms, norm_map(c))


@pytest.mark.parametrize("segments", FORCED)
def test_what_is_skipped_stays_out(force, segments):
    """Infinities and NaN of skipped blocks enter no sum, whichever segment they are in."""
    a, b = operands(128, 640, 128)
    norm_a, norm_b = norm_map(a), norm_map(b)
    norm_a[0, 3] = norm_a[1, 8] = 0
    clean = a.clone()
    a[:64, 3 * 64 : 4 * 64], a[64:, 8 * 64 : 9 * 64] = torch.inf, torch.nan
    force(segments)
    options = {"tau": 1.0, "norm_a": norm_a, "norm_b": norm_b}
    assert torch.equal(mm(a, b, **options), mm(clean, b, **options))


@pytest.mark.parametrize("segments", FORCED)
def test_the_same_bits_every_time(force, segments):
    """Whichever thread block is last, in graphs and on two streams at once."""
    force(segments)
    a, b = operands(700, 900, 700)
    expected = [mm(a, b, tau=tau) for tau in (0.0, 4096.0)]
    outs = [[torch.empty_like(c) for c in expected] for _ in range(20)]
    streams = [torch.cuda.Stream() for _ in expected]
    for i, (tau, stream) in enumerate(zip((0.0, 4096.0), streams, strict=True)):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for out in outs:
                mm(a, b, tau=tau, out=out[i])
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for out in outs for pair in zip(out, expected, strict=True))
    graph, result = captured(lambda: mm(a, b, tau=4096.0))
    for _ in range(5):
        result.zero_()
        graph.replay()
        assert torch.equal(result, expected[1])
