"""float32 products on CUDA: accuracy, TF32, the whole range of the type."""

import matrices
import pytest
import torch
from support import hopper_kernels_run, memory_limit, norm_maps, operands, relative_error

import spamm_torch

pytestmark = pytest.mark.cuda


@pytest.fixture(params=[False, True], ids=["float32", "tf32"])
def tf32(request, set_tf32):
    set_tf32(request.param)
    return request.param


@pytest.fixture(autouse=True)
def split_parts(monkeypatch):
    """Keeps small products from the portable kernels."""
    monkeypatch.setenv("SPAMM_TORCH_SEGMENTS", "1")


def assert_as_accurate(a, b, block=64, factor=1.0, least=0.0):
    """A product's error is that of torch's, times a factor, or below the least that counts."""
    exact = a.double() @ b.double()
    ours = relative_error(spamm_torch.mm(a, b, tau=0.0, block=block), exact)
    assert ours <= max(factor * relative_error(a @ b, exact), least)


def distances(x):
    """The paper's decay matrix: entries fall off with their distance from the diagonal."""
    row, column = (torch.arange(n, device=x.device, dtype=torch.float32) for n in x.shape)
    return 0.1 / ((row[:, None] - column).abs().pow(0.1) + 1)


DATA = {
    "normal": lambda a, b: (a, b),
    "positive": lambda a, b: (a.abs(), b.abs()),
    "uniform": lambda a, b: (torch.special.ndtr(a), torch.special.ndtr(b)),
    "decay": lambda a, b: (distances(a), distances(b)),
}


@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("data", DATA)
def test_float32_is_as_accurate_as_cublas(tf32, data, block):
    allowed = 1.0
    if tf32:  # all of the error is that of rounding the operands; the portable kernel truncates too
        allowed = 1.02 if hopper_kernels_run() else 1.5
    elif data in ("positive", "uniform") and not hopper_kernels_run():
        allowed = 2.0  # cuBLAS cuts K here; the portable kernel sums in one go
    assert_as_accurate(*DATA[data](*operands(m=1000, k=2000, n=1000)), block, allowed)


# M and N, and K: from all that a tile can hold to where cuBLAS cuts K into parts, one tile or many.
SHAPES = [(256, 64), (256, 256), (256, 512), (256, 8192), (64, 8192), (512, 512), (1280, 8192)]
SHAPES += [(1536, 4096), (2048, 64), (2048, 256), (2048, 2048), (3000, 4096)]


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("edge", "k"), SHAPES)
def test_float32_by_halves_is_as_accurate_as_cublas(edge, k, data, hopper):
    assert_as_accurate(*DATA[data](*operands(m=edge, k=k, n=edge)))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "misaligned"])
@pytest.mark.parametrize("shape", [(16, 16, 16), (317, 16, 259), (190, 900, 53), (19, 3000, 4186)])
def test_small_and_thin_products_are_near_cublas(tf32, force, shape, layout):
    """Portable kernels have them, in segments where K is long, and copy odd rows entry by entry."""
    force(None)
    m, k, n = shape
    assert_as_accurate(*(matrices.LAYOUTS[layout](x) for x in operands(m=m, k=k, n=n)), 64, 2)


@pytest.mark.parametrize("edge", [256, 2048])
def test_float32_sums_overflow_to_infinity(edge):
    """In the middle of K, and then whatever follows."""
    a, b = (x.abs() for x in operands(m=edge, k=512, n=edge))
    a[:, 128:384] *= 1e20
    b[128:384] *= 1e20
    a[: edge // 2, 448:] *= -1e10
    actual = spamm_torch.mm(a, b, tau=0.0)
    assert torch.equal(actual, torch.full_like(actual, torch.inf))


def test_the_setting_chooses_the_kernel(tf32, set_tf32, hopper):
    expected = "sm90-wgmma-f32x1" if tf32 else "sm90-wgmma-f32x3"
    assert spamm_torch.backend_for("cuda", torch.float32) == expected
    expected = "sm80-mma-tf32" if tf32 else "sm90-wgmma-f32x3"
    for block in (32, (128, 64, 32)):
        assert spamm_torch.backend_for("cuda", torch.float32, block) == expected
    a, b = operands()
    product = spamm_torch.mm(a, b, tau=0.0)
    set_tf32(not tf32)
    assert not torch.equal(spamm_torch.mm(a, b, tau=0.0), product)
    a, b = operands(device="cpu")  # which it does not reach
    product = spamm_torch.mm(a, b, tau=0.0)
    set_tf32(tf32)
    assert torch.equal(spamm_torch.mm(a, b, tau=0.0), product)


SCALINGS = {
    "rows and columns": lambda a, b, s: (a * s(a, 0, 8)[:, None], b * s(b, 1, 8)),
    "along K": lambda a, b, s: (a * s(a, 1, 3), b / s(a, 1, 3)[:, None]),
    "far along K": lambda a, b, s: (a * s(a, 1, 8), b / s(a, 1, 8)[:, None]),
    "blocks along K": lambda a, b, s: (a * s(a, 1, 9, 64), b / s(a, 1, 9, 64)[:, None]),
    "one operand along K": lambda a, b, s: (a * s(a, 1, 8), b),
    "blocks of one operand along K": lambda a, b, s: (a * s(a, 1, 3, 64), b),
    "far blocks of one operand along K": lambda a, b, s: (a * s(a, 1, 17, 64), b),
    "rows, columns and along K": lambda a, b, s: (
        a * s(a, 0, 6)[:, None] * s(a, 1, 6),
        b * s(a, 1, 6)[:, None] * s(b, 1, 6),
    ),
    "zeros along K": lambda a, b, s: (a * halves(a, 1, 1, 1e-12), b * halves(b, 0, 0, 1)),
    "tiny along K": lambda a, b, s: (a * halves(a, 1, 1, 1e-36), b * halves(b, 0, 0, 1e18)),
    "entries": lambda a, b, s: (a * s(a, None, 6), b * s(b, None, 6)),
    "tiny": lambda a, b, s: (a * 1e-38, b * 1e6),
    "subnormal": lambda a, b, s: (a * 1e-41, b * 1e37),
    "huge": lambda a, b, s: (a * 1e36, b * 1e-37),
}


def halves(x, dim, first, second):
    """Factors along `dim`: of each 32 neighbours, `first` for 16 and `second` for 16."""
    k = torch.arange(x.shape[dim], device="cuda").view([-1 if i == dim else 1 for i in (0, 1)])
    return torch.where(k % 32 < 16, first, second)


def powers_of_ten(x, dim, most, repeats=1):
    """Random powers 10^-most to 10^most for each line of x along `dim`, or for each entry; a value
    serves `repeats` neighbours. Of one x and dim they are always the same."""
    shape = x.shape if dim is None else (-(-x.shape[dim] // repeats),)
    generator = torch.Generator().manual_seed(sum(x.shape))
    exponents = torch.randint(-most, most + 1, shape, generator=generator).double()
    scales = (10.0**exponents).float().cuda()
    return scales if dim is None else scales.repeat_interleave(repeats)[: x.shape[dim]]


@pytest.mark.strength(3)  # blocks of 64 have kernels of their own, and TF32 others
@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "every third column"])
def test_float32_of_any_scaling_is_near_cublas(tf32, scaling, layout, block):
    a, b = (matrices.LAYOUTS[layout](x) for x in operands(m=500, k=1000, n=400))
    assert_as_accurate(*SCALINGS[scaling](a, b, powers_of_ten), block, 4)


@pytest.mark.parametrize("large", [slice(0, 64), slice(256, 320), slice(448, 512)])
@pytest.mark.parametrize("factor", [1e9, 1e20, 1e35])
@pytest.mark.parametrize("block", [32, 64])
def test_float32_sums_beside_large_ones_keep_their_digits(tf32, large, factor, block):
    """Columns of C of which large entries of A are no part, in blocks of which they are one."""
    a, b = operands(m=200, k=512, n=128)
    a *= 1e-5
    a[:, large] *= factor
    b[large, 32:] = 0
    assert_as_accurate(a, b, block, 1.5)
    mine, theirs = spamm_torch.mm(a, b, tau=0.0, block=block), a @ b
    errors = [relative_error(c[:, 32:], a.double() @ b[:, 32:].double()) for c in (mine, theirs)]
    assert errors[0] <= 1.5 * errors[1]


@pytest.mark.parametrize("block", [32, 64])
def test_float32_loses_little_beside_tau(tf32, block):
    """Terms far below the blocks' largest entries need no digits that tau makes meaningless."""
    a, b = operands(m=300, k=260, n=280)
    a[:, ::2] *= 2.0**-45
    b[1::2] *= 2.0**-45
    rows, depth, columns = (-(-size // block) for size in (300, 260, 280))
    dense = a.double() @ b.double()
    exact = relative_error(a @ b, dense) * dense.norm().item()
    for tau in (2.0**-34, 2.0**-30, 2.0**-20, 2.0**-10):
        actual = spamm_torch.mm(a, b, tau=tau, block=block).double()
        lost = depth * (rows * columns) ** 0.5 * tau / 1000  # at most
        assert (actual - dense).norm().item() <= lost + 4 * exact


def wide_operands(m, k, n):
    """All pairs of blocks need exact products: no k is large in A and in B, and all terms of a sum
    are of like size, 2^-40 times the product of the largest entries of its blocks."""
    a, b = operands(m=m, k=k, n=n)
    a[:, ::2] *= 2.0**-40
    b[1::2] *= 2.0**-40
    return a, b


# More pairs than a tile keeps for later, odd edges, one large tile and more than one.
WIDE_SHAPES = [(7, 70, 5), (64, 64, 64), (100, 2500, 70), (300, 1030, 333), (2048, 300, 2100)]


def turning_wide(m, k, n):
    """Only those of the last steps along K need exact products. All terms are of like size."""
    a, b, plain = *operands(m=m, k=k, n=n), k * 5 // 6 // 64 * 64
    a, b = a * 2.0**-20, b * 2.0**-20
    wide_a, wide_b = wide_operands(m, k, n)
    a[:, plain:], b[plain:] = wide_a[:, plain:], wide_b[plain:]
    return a, b


WIDE = [(wide_operands, shape) for shape in WIDE_SHAPES]
WIDE += [(turning_wide, (edge, 2700, edge)) for edge in (100, 2100)]


@pytest.mark.parametrize(("make", "shape"), WIDE)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "every third column", "misaligned"])
@pytest.mark.parametrize("block", [32, 64])
def test_float32_of_wide_blocks_is_as_accurate_as_cublas(make, shape, layout, block):
    """Or as the kernels' order of sums: portable ones add k after k."""
    in_order = spamm_torch.backend_for("cuda", torch.float32, block).startswith("sm80")
    a, b = (matrices.LAYOUTS[layout](x) for x in make(*shape))
    least = 2.0**-24 * a.shape[1] ** 0.5 if in_order else 2e-7
    assert_as_accurate(a, b, block, least=least)


@pytest.mark.parametrize("block", [32, 64])
def test_float32_of_wide_blocks_keeps_infinities_and_nan(block):
    a, b = wide_operands(m=200, k=400, n=180)
    a[10, 101], a[70, 350], b[200, 130], b[301, 20] = torch.inf, -torch.inf, torch.nan, torch.inf
    expected = a.double() @ b.double()
    actual = spamm_torch.mm(a, b, tau=0.0, block=block).double()
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.isinf(), expected.isinf())
    finite = expected.isfinite()
    assert torch.equal(actual[~finite].nan_to_num(), expected[~finite].nan_to_num())
    error = (actual - expected)[finite].norm()
    assert error <= 1e-6 * expected[finite].norm()


@pytest.mark.parametrize("scale", [1e38, 2.0**90, 2.0**50, 2.0**-40])
@pytest.mark.parametrize("block", [32, 64])
def test_float32_of_wide_blocks_at_the_ends_of_the_range(scale, block):
    """Sums that overflow are infinite, not NaN, and small ones keep their digits."""
    a, b = wide_operands(m=130, k=200, n=140)
    a, b = a.abs().clamp(max=3) * scale, b.abs().clamp(max=3) * min(scale, 2.0**40)
    expected = (a.double() @ b.double()).float()
    actual = spamm_torch.mm(a, b, tau=0.0, block=block)
    assert torch.equal(actual.isinf(), expected.isinf())
    assert torch.allclose(actual, expected, rtol=1e-5, atol=0)


def uneven_operands(m, k, n):
    """Blocks of which none, one or both hold entries of many magnitudes along K."""
    a, b = operands(m=m, k=k, n=n)
    a[100] *= 1e-9
    b[:, 300:] *= 1e12
    along_k = powers_of_ten(a, 1, 6)
    a[64:192] *= along_k
    b[:, 200:330] *= along_k[:, None]
    return a, b


def without(x, norms, block, value=0.0):
    """A matrix whose blocks of norm zero hold a value."""
    wide = norms.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return torch.where(wide[: x.shape[0], : x.shape[1]] == 0, value, x)


@pytest.mark.parametrize(
    ("make", "block"),
    [
        *((uneven_operands, block) for block in (32, 64, 128)),
        (wide_operands, 32),
        (wide_operands, 64),
    ],
)
def test_a_block_of_float32_does_not_depend_on_others(tf32, force, make, block):
    """Whatever shares a tile, a batch, K or a list of pairs with it, and if that is skipped.

    But for the number of segments, which follows from the size.
    """
    force(1)
    a, b = make(m=500, k=2000, n=640)
    rows, columns = slice(128, 256), slice(256, 384)
    if block == 32:  # halves of what the kernels scale and load together
        rows, columns = slice(96, 160), slice(288, 352)
    whole = spamm_torch.mm(a, b, tau=0.0, block=block)
    part = spamm_torch.mm(a[rows].clone(), b[:, columns].clone(), tau=0.0, block=block)
    assert torch.equal(whole[rows, columns], part)
    batch = spamm_torch.bmm(torch.stack([-a, a]), b.expand(2, -1, -1), tau=0.0, block=block)
    assert torch.equal(batch[1], whole)
    norm_a, norm_b = norm_maps(a, b, block)
    if make is wide_operands and not tf32:
        norm_a[1::2, ::3] = 0
    else:
        norm_a[:, 512 // block : 1024 // block] = 0
    skipped = spamm_torch.mm(a, b, tau=1e-30, block=block, norm_a=norm_a, norm_b=norm_b)
    zeros = without(a, norm_a, block)
    assert torch.equal(skipped, spamm_torch.mm(zeros, b, tau=0.0, block=block))


@pytest.mark.parametrize("bad", [torch.inf, torch.nan, 1e38])
@pytest.mark.parametrize("edge", [256, 2048])
def test_a_skipped_block_of_32_leaves_no_trace(tf32, bad, edge):
    """Beside valid ones of the same 64 x 64, whatever it holds."""
    a, b = uneven_operands(m=edge, k=320, n=edge)
    maps = norm_maps(a, b, 32)
    maps[0][2::4, 1::3] = maps[0][3, 4] = maps[1][1::3, 3::4] = 0
    product = lambda value: spamm_torch.mm(  # noqa: E731
        *(without(x, norms, 32, value) for x, norms in zip((a, b), maps, strict=True)),
        **{"tau": 1e-30, "block": 32, "norm_a": maps[0], "norm_b": maps[1]},
    )
    assert torch.equal(product(bad), product(0.0))


@pytest.mark.parametrize("layout", matrices.LAYOUTS)
@pytest.mark.parametrize("block", [32, 64])
def test_norms_taken_with_the_halves_are_those_of_norm_map(tf32, layout, block):
    a, b = (matrices.LAYOUTS[layout](x) for x in operands(m=330, k=450, n=270))
    maps = norm_maps(a, b, block)
    products = (maps[0][:, :, None] * maps[1][None]).flatten().sort().values
    for tau in products[:: products.numel() // 7]:  # each the norm of one product, kept by it alone
        expected = spamm_torch.mm(a, b, tau=tau, block=block, norm_a=maps[0], norm_b=maps[1])
        assert torch.equal(spamm_torch.mm(a, b, tau=tau, block=block), expected)


@pytest.mark.parametrize("rows", [64, 1])
def test_one_row_of_many_columns_that_is_repeated(hopper, rows):
    """Its rows have a stride of 0."""
    a, row = operands(m=128, k=rows, n=20000)
    b = row[:1].expand(64, -1)[:rows]
    found = spamm_torch.mm(a, b, tau=0.0, block=32)
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


def test_float32_says_how_much_memory_its_halves_need(hopper):
    a = torch.ones(16384, 16384, device="cuda")
    refused = pytest.raises(torch.OutOfMemoryError, match=r"need \d+ bytes .* \[1, 16384, 16384\]")
    with memory_limit([0], 1.2 * a.numel() * 4), refused:
        spamm_torch.mm(a, a, tau=0.0)


def test_many_small_matrices_take_little_memory(tf32, force):
    """Split parts would pad each of them to 64 x 64."""
    force(None)
    a = torch.ones(50_000, 4, 4, device="cuda")
    for b in (a, a[:1].expand_as(a)):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        assert (spamm_torch.bmm(b, a, tau=0.0) == 4).all()
        used = torch.cuda.max_memory_allocated() - before
        assert used < 20 * 3 * a.numel() * 4  # operands and result
