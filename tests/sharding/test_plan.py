"""The plan of a product over several devices, against brute force."""

import itertools
import math

import pytest
import torch
from golden import assert_kept

import spamm_torch
from spamm_torch.distributed import plan as planning
from spamm_torch.distributed.plan import exchange_plan

ops = torch.ops.spamm_torch

NORM_DTYPES = (torch.float32, torch.float64)


def host(tau, dtype=torch.float64):
    return torch.tensor(tau, dtype=dtype)


def random_map(generator, rows, columns, dtype):
    """Norms of few different values, so that products tie with thresholds; some of them special."""
    info = torch.finfo(dtype)
    subnormal = info.smallest_normal / 8
    values = torch.tensor(
        [0.0, 0.1, 0.25, 0.3, 0.5, 1.0, 3.0, 7.0, subnormal, info.max, math.inf, math.nan],
        dtype=dtype,
    )
    # Special values are rare in half of the maps, and absent from the others.
    usual = 8 if torch.rand((), generator=generator) < 0.5 else len(values)
    weights = torch.ones(usual)
    weights[8:] = 0.05
    count = rows * columns
    picks = torch.multinomial(weights, count + 1, replacement=True, generator=generator)
    return values[picks[:count]].reshape(rows, columns)


def random_cuts(generator, rows, parts):
    inner = torch.randint(0, rows + 1, (parts - 1,), generator=generator)
    return [0, *sorted(inner.tolist()), rows]


class TestRowCuts:
    """Plans of products; tests/cpp/plan_test.cpp has the cuts themselves, by brute force."""

    @pytest.mark.parametrize("block", [32, 64, 128, (32, 64, 128)])
    @pytest.mark.parametrize("shape", [(13, 5, 6), (0, 3, 4), (5, 0, 4), (5, 3, 0)])
    def test_python_returns_rows(self, device, block, shape):
        m = block if isinstance(block, int) else block[0]
        rows, depth, columns = shape
        norm_a, norm_b = (torch.rand(x, device=device) for x in ((rows, depth), (depth, columns)))
        cuts = spamm_torch.row_cuts(norm_a, norm_b, 0.3, 3, block=block)
        multiple = max(m, 128)
        found = ops.row_work(norm_a, norm_b, host(0.3), 3, multiple // m)[1]
        assert cuts == [m * cut for cut in found] == sorted(cuts)
        assert all(type(cut) is int for cut in cuts)
        assert all(cut % multiple == 0 or cut == m * rows for cut in cuts)
        assert (cuts[0], cuts[-1], len(cuts)) == (0, m * rows, 4)

    def test_a_compiled_function_breaks_the_graph_there(self):
        norm_a, norm_b = torch.rand(9, 5), torch.rand(5, 6)
        compiled = torch.compile(spamm_torch.row_cuts, backend="eager")
        assert compiled(norm_a, norm_b, 0.3, 3) == spamm_torch.row_cuts(norm_a, norm_b, 0.3, 3)


def chunks(blocks, parts):
    """The ends of each of ``parts`` parts, as torch.chunk cuts a range of blocks."""
    pieces = torch.arange(blocks).chunk(parts) if blocks else []
    ranges = [(piece[0].item(), piece[-1].item() + 1) for piece in pieces]
    return ranges + [(blocks, blocks)] * (parts - len(ranges))


def traffic(valid, rows, owners, columns, stage):
    """Blocks of B that travel, by the part of C's rows, the owner and the part of C's columns."""
    parts = map(enumerate, (rows, owners, columns))
    for (row, taken), (owner, owned), (column, within) in itertools.product(*parts):
        if owner != row:
            needed = valid[slice(*taken), slice(*owned), slice(*within)].any(0)
            units = needed.split(stage, 1)
            yield row, owner, column, sum(int(unit.any(1).sum()) * unit.shape[1] for unit in units)


def sent(valid, row_cuts, b_cuts, mesh, block, itemsize, stage=None):
    """Bytes from rank to rank on a mesh: units of B along its columns, of A along its rows."""
    mesh_rows, mesh_columns = mesh
    m, k, n = block
    _, depth, width = valid.shape
    rows, columns = list(itertools.pairwise(row_cuts)), chunks(width, mesh_columns)
    b_owners = list(itertools.pairwise(b_cuts)) if b_cuts else chunks(depth, mesh_rows)
    stages = [
        stage or planning.stage_blocks(max(end - begin for begin, end in ranges), edge)
        for ranges, edge in ((columns, n), (rows, m))
    ]
    send = [[0] * (mesh_rows * mesh_columns) for _ in range(mesh_rows * mesh_columns)]
    for row, owner, column, blocks in traffic(valid, rows, b_owners, columns, stages[0]):
        places = (owner * mesh_columns + column, row * mesh_columns + column)
        send[places[0]][places[1]] += blocks * k * n * itemsize
    turned, a_owners = valid.permute(2, 1, 0), chunks(depth, mesh_columns)
    for column, owner, row, blocks in traffic(turned, columns, a_owners, rows, stages[1]):
        places = (row * mesh_columns + owner, row * mesh_columns + column)
        send[places[0]][places[1]] += blocks * m * k * itemsize
    work = [valid[slice(*r), :, slice(*c)] for r, c in itertools.product(rows, columns)]
    return send, [(1000 * int(x.sum()) + 6 * x.numel()) / 1000 for x in work]


EMPTY = {6: (0, 3, 4), 7: (5, 3, 0), 8: (5, 0, 4)}  # shapes of maps, by seed
MESHES = [(1, 1), (2, 1), (1, 2), (3, 1), (4, 1), (2, 2), (1, 4), (2, 3)]


class TestExchangePlan:
    @pytest.mark.parametrize("seed", range(9))
    @pytest.mark.parametrize("mesh", MESHES)
    def test_counts_what_travels(self, device, mesh, seed):
        generator = torch.Generator().manual_seed(seed)
        dtype = NORM_DTYPES[seed % 2]
        block = [(64, 64, 64), (32, 64, 128), (128, 32, 64)][seed % 3]
        m, k, _ = block
        # Wide enough for several stages in some of the cases.
        rows, depth, columns = (
            torch.randint(0, most, (), generator=generator).item() for most in (90, 9, 90)
        )
        rows, depth, columns = EMPTY.get(seed, (rows, depth, columns))
        norm_a = random_map(generator, rows, depth, dtype)
        norm_b = random_map(generator, depth, columns, dtype)
        # Most products are skipped, so that whole units are.
        norm_a *= torch.rand(rows, depth, generator=generator) < 0.05
        cuts = random_cuts(generator, rows, mesh[0])
        b_cuts = random_cuts(generator, depth, mesh[0]) if seed % 2 else None
        maps, short = (norm_a.to(device), norm_b.to(device)), 5 * (seed % 2)
        rows_of_a = [min(m * cut, m * rows - short) for cut in cuts]  # the last block may be ragged
        rows_of_b = b_cuts and [min(k * cut, k * depth - short) for cut in b_cuts]
        products = norm_a[:, :, None] * norm_b[None]
        of = cuts, b_cuts, mesh, block, dtype.itemsize
        tie = max([1e-3, *products.nan_to_num(1.0, posinf=1.0).flatten().tolist()])
        taus = (0.5, tie, tie * (1 + 1e-9), 1e-44, math.inf, -0.0, -1.0, math.nan)
        for tau, is_on_device in zip(taus, itertools.cycle((False, True)), strict=False):
            threshold = host(tau, dtype).to(device) if is_on_device else host(tau)
            plan = exchange_plan(*maps, threshold, rows_of_a, mesh, b_cuts=rows_of_b, block=block)
            valid = ~(products < host(tau).to(dtype))  # one product at a time
            assert (plan.send, plan.work) == sent(valid, *of), tau
            assert plan.dense_send == sent(torch.ones_like(valid), *of)[0]
        assert plan.bytes == sum(map(sum, plan.send))
        assert plan.dense_bytes == sum(map(sum, plan.dense_send))
        assert plan.dtype == dtype
        assert plan.mesh_shape == mesh
        if mesh[1] == 1:  # a line of ranks
            assert exchange_plan(*maps, 0.5, rows_of_a, block=block).mesh_shape == mesh

    def test_prints_a_table(self):
        norm_a, norm_b = torch.ones(8, 8), torch.ones(8, 8)
        norm_a[:4, 4:] = 0  # rank 0 needs nothing
        plan = exchange_plan(norm_a, norm_b, 0.5, [0, 256, 512])
        assert_kept("plan of an exchange", str(plan).splitlines())


@pytest.mark.parametrize("dtype", NORM_DTYPES)
def test_exchange_plan_of_stored_blocks(dtype):
    """Against the products of each rank, one at a time."""
    generator = torch.Generator().manual_seed(3)
    norm_a, norm_b = (
        random_map(generator, *shape, dtype) * (torch.rand(shape, generator=generator) < 0.6)
        for shape in ((7, 5), (5, 6))
    )
    maps = [x.to_sparse_csr() for x in (norm_a, norm_b)]
    cuts, owners, tau = [0, 64, 64, 160, 224], [0, 96, 128, 128, 160], 0.075
    found = exchange_plan(*maps, tau, cuts, b_cuts=owners, block=32)
    stored = (norm_a != 0)[:, :, None] & (norm_b != 0)
    valid = stored & ~(norm_a[:, :, None] * norm_b < tau)
    of = [x // 32 for x in cuts], [x // 32 for x in owners], (4, 1), (32, 32, 32), dtype.itemsize
    assert (found.send, found.dense_send) == tuple(
        sent(x, *of, stage=1)[0] for x in (valid, stored)
    )
    for rank, (begin, end) in enumerate(itertools.pairwise(of[0])):
        assert found.work[rank] == valid[begin:end].sum()
    assert 0 < found.bytes < found.dense_bytes
    assert str(found).count("\n") == 5
    with pytest.raises(ValueError, match=r"a line of ranks; got block \(32, 32, 32\) and mesh"):
        exchange_plan(*maps, tau, [0, 96, 224], (2, 2), block=32)
