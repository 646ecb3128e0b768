"""spamm_torch.distributed: one set of processes for each number of ranks, which runs all cases.

Each case is one function, run by all ranks together; a test is the outcome of one of them. Every
rank makes the whole operands from the same seed, multiplies them in its own process, and compares
the bits of its shard. Memory starts as NaN. After each case a rank prints that it has passed. Where
one fails the rank ends, so that the others fail at once and do not wait for it.
"""

import contextlib
import functools
import itertools
import multiprocessing
import os
import random
import re
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import matrices
import pytest
import torch
import torch.distributed as dist
from processes import FORKS, forked
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

import spamm_torch
from fuzzing import space
from spamm_torch import distributed, linalg, sparse
from spamm_torch.distributed import block_rows
from spamm_torch.sparse import maps, strips

ROOT = Path(__file__).parents[2]
ops = torch.ops.spamm_torch
S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()
KNOBS = ({"valid_ratio": 0.4}, {"max_error": 1e-2}, {"tau": 3.0})


@dataclass
class Rank:
    number: int
    world: int
    device: torch.device


_CASES = {}


def case(worlds=(2, 3, 4), devices=("cpu", "cuda")):
    """Registers a case for some numbers of ranks. They run in the order of this file."""

    def register(function):
        _CASES[function.__name__] = function, worlds, devices
        return function

    return register


def cases(world, device):
    return {
        name: function
        for name, (function, worlds, devices) in _CASES.items()
        if world in worlds and device in devices
    }


# ---- Operands and results -----------------------------------------------------------------------


def decaying(rows, columns, rank, dtype=torch.float32, seed=0):
    return matrices.fading(rows, columns, dtype, rank.device, seed, rate=12)


def operands(rank, m=300, k=260, n=333, dtype=torch.float32):
    return decaying(m, k, rank, dtype, 1), decaying(k, n, rank, dtype, 2)


def cuts_of(rows, world, kind):
    """world + 1 row numbers."""
    ends = range(1, world)
    inner = {
        "even": [rows * part // world // 64 * 64 for part in ends],
        "odd": [rows * part // world + 5 * part for part in ends],
        "first empty": [rows * (part - 1) // world for part in ends],
        "all on the last": [0 for _ in ends],
        "all on the first": [rows for _ in ends],
    }[kind]
    return [0, *(min(cut, rows) for cut in inner), rows]


CUTS = ("even", "odd", "first empty", "all on the last", "all on the first")


def shard(x, cuts, rank):
    return x[cuts[rank.number] : cuts[rank.number + 1]]


def assert_bits(result, expected, what):
    assert result.dtype == expected.dtype, what
    assert result.shape == expected.shape, (what, result.shape, expected.shape)
    other = (result != expected) & ~(result.isnan() & expected.isnan())
    assert not other.any(), (
        f"{what}: {int(other.sum())} of {result.numel()} entries differ; NaN in "
        f"{int(result.isnan().sum())}, expected in {int(expected.isnan().sum())}"
    )


def assert_rows_of_mm(rank, a, b, cuts_a, cuts_b, *, group=None, balance=False, **options):
    """The rows of this rank have the bits of one process. Cuts are numbers, or a kind of them."""
    cuts_a, cuts_b = (
        cuts_of(len(x), rank.world, cuts) if isinstance(cuts, str) else cuts
        for x, cuts in ((a, cuts_a), (b, cuts_b))
    )
    found = distributed.mm(
        shard(a, cuts_a, rank), shard(b, cuts_b, rank), group=group, balance=balance, **options
    )
    expected = shard(spamm_torch.mm(a, b, **options), cuts_a, rank)
    assert_bits(found, expected, (cuts_a, cuts_b, balance, options))


def short_stages(blocks=2):
    """Inside, stages have so many block columns, so that small matrices have several."""
    return mock.patch("spamm_torch.distributed.plan.stage_blocks", return_value=blocks)


def raised_by(call):
    """The name and text of the exception that a call raises, if it does."""
    try:
        call()
    except (RuntimeError, TypeError, ValueError) as exception:
        return type(exception).__name__, str(exception)
    return None, "nothing was raised"


def assert_all_raise(error, line, call):
    """All ranks raise the same exception, with the same one line."""
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, raised_by(call))
    expected = error, line
    assert everywhere == [expected] * len(everywhere), (everywhere, expected)


# ---- Products -----------------------------------------------------------------------------------


PRODUCTS = {
    **{"m": (300, 100, 1, 0), "k": (260, 100, 1, 0), "n": (333, 100, 1, 0)},
    **{"dtype": matrices.DTYPES, "block": (32, 64, 128, (128, 32, 64))},
    **{"cuts_a": CUTS, "cuts_b": CUTS, "balance": (False, False, True), "blocks": (2, None)},
    "layout": ("contiguous", "transposed", "every other row", "misaligned"),
    "values": ("numbers", "numbers", "zeros", "NaN", "infinity"),
    "knob": (*KNOBS, {"valid_ratio": 1e-6}, *({"tau": x} for x in (0.0, -1.0, float("inf")))),
    "tau": (None, None, 5.0, float("nan")),  # a tensor, which comes before the knob
}


@case(worlds=(1, 2, 3, 4))
def bits_of_one_process(rank):
    """Drawn products, with stages of so many blocks of columns."""
    assert torch.empty(5, device=rank.device).isnan().all()
    rng = random.Random(0)
    for _ in range(60):
        of = space.draw(PRODUCTS, rng)
        a, b = operands(rank, of["m"], of["k"], of["n"], of["dtype"])
        if of["values"] == "zeros":
            a[:, 64:] = 0
        elif of["values"] != "numbers":
            a[-1:, 3:4], b[-1:, :1] = float("nan"), float(of["values"])
        knob = of["knob"]
        if of["tau"] is not None:
            knob = {"tau": torch.tensor(of["tau"], device=rank.device if of["blocks"] else "cpu")}
        options = {name: of[name] for name in ("balance", "block")} | knob
        laid_out = matrices.LAYOUTS[of["layout"]]
        with short_stages() if of["blocks"] else contextlib.nullcontext():
            cuts = of["cuts_a"], of["cuts_b"]
            assert_rows_of_mm(rank, laid_out(a), laid_out(b), *cuts, **options)
    a, b = operands(rank, 200, 190, 4500)  # stages of 2048 columns
    assert_rows_of_mm(rank, a, b, "even", "even", valid_ratio=0.3)


def tau_of_columns(rank, a, b):
    """A threshold that a product of norms meets if ``a`` is read by columns, and not if by rows.

    The last bits of a norm depend on that. None where they do not.
    """
    by_columns, by_rows = (
        spamm_torch.norm_map(x)[:, :, None] * spamm_torch.norm_map(b) for x in (a, a.contiguous())
    )
    taus = by_columns[by_columns > by_rows]
    assert len(taus) or rank.device.type != "cpu"
    return float(taus[0]) if len(taus) else float(by_columns.median())


@case()
def layouts_that_travel(rank):
    """Cuts off the block grid make rows travel; they keep the layout, and so the norms' bits."""
    for seed in range(4):
        a, b = decaying(300, 260, rank, torch.float16, seed).t(), operands(rank, k=300)[1].half()
        tau = tau_of_columns(rank, a, b)
        assert_rows_of_mm(rank, a, b, "odd", "odd", tau=tau)
        mesh = init_device_mesh(rank.device.type, (rank.world,))
        c = spamm_torch.mm(placed(a, mesh, [S1]), placed(b, mesh, [S0]), tau=tau)
        assert_bits(c.full_tensor(), spamm_torch.mm(a, b, tau=tau), "DTensor")


@case()
def balanced(rank):
    """Rows of A move to where they make work equal, and rows of C come back."""
    a, b = operands(rank, m=1500)
    a[700:] *= 1e-3
    for knob in KNOBS:
        with noted(ops, "multiply_part", lambda a, *_, **__: len(a)) as rows:
            assert_rows_of_mm(rank, a, b, "odd", "even", balance=True, **knob)
    lengths = torch.zeros(rank.world, dtype=torch.int64, device=rank.device)
    lengths[rank.number] = rows[0]
    dist.all_reduce(lengths)
    norms = ops.norm_maps(a, b, (64, 64, 64))
    expected = spamm_torch.row_cuts(*norms, KNOBS[-1]["tau"], rank.world)
    expected[-1] = len(a)
    assert lengths.tolist() == [end - begin for begin, end in itertools.pairwise(expected)]


@contextlib.contextmanager
def noted(owner, name, note):
    """Yields a list that gets ``note`` of the arguments of each call of a function inside."""
    function, notes = getattr(owner, name), []

    def noting(*given, **options):
        notes.append(note(*given, **options))
        return function(*given, **options)

    with mock.patch.object(owner, name, noting):
        yield notes


@case()
def what_travels(rank):
    """The bytes of the exchange plan travel, no more: units that are not needed stay."""
    a, b = operands(rank, 384, 448, 640)
    norms, cuts_b = ops.norm_maps(a, b, (64, 64, 64)), cuts_of(448, rank.world, "even")

    def sent_bytes(_, input, __, splits, group=None, **___):
        return (len(input) - splits[dist.get_rank(group)]) * input[:1].nbytes

    noted_bytes = functools.partial(noted, dist, "all_to_all_single", sent_bytes)
    for tau, kind in ((4.0, "even"), (0.0, "all on the first")):
        cuts_a = cuts_of(384, rank.world, kind)
        with short_stages(), noted_bytes() as sent:
            assert_rows_of_mm(rank, a, b, cuts_a, cuts_b, tau=tau)
            plan = distributed.exchange_plan(*norms, tau, cuts_a, b_cuts=cuts_b)
        assert sum(sent) == sum(plan.send[rank.number]), (tau, kind)
        assert plan.bytes > 0
        assert plan.bytes < plan.dense_bytes or tau == 0
    if rank.world == 4:
        mesh, tau = init_device_mesh(rank.device.type, (2, 2)), 6.0
        a, b = operands(rank, 512, 512, 512)
        shards = [placed(x, mesh, (S0, S1)) for x in (a, b)]
        with short_stages(), noted_bytes() as sent:
            c = spamm_torch.mm(*shards, tau=tau)
            norms = ops.norm_maps(a, b, (64, 64, 64))
            plan = distributed.exchange_plan(*norms, tau, [0, 256, 512], (2, 2))
        assert_bits(c.full_tensor(), spamm_torch.mm(a, b, tau=tau), tau)
        assert sum(sent) == sum(plan.send[rank.number])
        assert 0 < plan.bytes < plan.dense_bytes


@case()
def autocast(rank):
    a, b = operands(rank)
    cuts = cuts_of(len(a), rank.world, "even"), cuts_of(len(b), rank.world, "even")
    with torch.autocast(rank.device.type, torch.bfloat16):
        found = distributed.mm(
            shard(a, cuts[0], rank).requires_grad_(), shard(b, cuts[1], rank), valid_ratio=0.5
        )
        expected = shard(spamm_torch.mm(a, b, valid_ratio=0.5), cuts[0], rank)
    assert_bits(found, expected, "autocast")
    found.float().sum().backward()


@case(worlds=(3, 4))
def a_group_of_some_ranks(rank):
    members = list(range(1, rank.world))
    group = dist.new_group(members)
    a, b = operands(rank)
    if rank.number == 0:
        assert raised_by(lambda: distributed.mm(a, b, tau=1.0, group=group)) == (
            "ValueError",
            "group must contain this rank; got a group of other ranks",
        )
        return
    in_group = replace(rank, number=rank.number - 1, world=rank.world - 1)
    assert_rows_of_mm(in_group, a, b, "odd", "odd", valid_ratio=0.5, group=group)


@case()
def all_ranks_raise_together(rank):
    """And stay in step: a right call follows each wrong one."""
    right, even = operands(rank), [64 * part for part in range(rank.world + 1)]
    k, last, end = even[-1], rank.number == rank.world - 1, f"on rank {rank.world - 1}"
    a, b = (shard(x, even, rank) for x in operands(rank, k, k, 96))

    def odd(usual, other):
        return other if last else usual

    def differ(what, usual, other):
        return f"{what} must be the same on all ranks; got {usual} on rank 0 and {other} {end}"

    for error, line, given in (
        ("TypeError", differ("the dtype", "float32", "float16"),
         {"a": odd(a, a.half()), "b": odd(b, b.half())}),
        ("RuntimeError", differ("the number of a's columns", k, k - 1), {"a": odd(a, a[:, 1:])}),
        ("RuntimeError", f"the rows of b on all ranks must add up to the columns of a, {k}; got "
         f"{k - 1}", {"b": odd(b, b[1:])}),
        ("ValueError", differ("the block", (64, 64, 64), (32, 64, 64)),
         {"block": odd(64, (32, 64, 64))}),
        ("ValueError", differ("the knob", "tau=1.0", "valid_ratio=0.5"),
         odd({}, {"tau": None, "valid_ratio": 0.5})),
        ("ValueError", differ("balance", False, True), {"balance": last}),
        ("RuntimeError", differ("which of a and b require a gradient", "b", "none"),
         {"b": odd(b.clone().requires_grad_(), b)}),
        ("TypeError", f"a must be a tensor; got list ({end})", {"a": odd(a, [1.0])}),
        ("ValueError", f"valid_ratio must be in (0, 1]; got 2.0 ({end})",
         odd({}, {"tau": None, "valid_ratio": 2.0})),
        ("ValueError", "block must be 32, 64 or 128, or a triple (m, k, n) of these; got 48",
         {"block": 48}),
        ("TypeError", "group must be a torch.distributed.ProcessGroup or None; got list",
         {"group": [0, 1]}),
    ):  # fmt: skip
        options = {"a": a, "b": b, "tau": 1.0} | given
        assert_all_raise(error, line, functools.partial(distributed.mm, **options))
        assert_rows_of_mm(rank, *right, "odd", "odd", tau=3.0)


@case(worlds=(1, 2, 3, 4))
def block_sparse_shards(rank):
    """Any cuts at block rows, empty shards too; every knob; the bits of one process."""
    # At an odd number of block rows between two ranks: kernels take blocks of 32 in pairs.
    cuts = [[12 * r**2 // rank.world**2 for r in range(rank.world + 1)], [0] * rank.world + [12]]
    knobs = ({"valid_ratio": 0.4}, {"max_error": 1e-2}, {"tau": 1e-3})
    for edge, dtype in ((64, torch.float32), (32, torch.float64)):
        a, b = (decaying(12 * edge, 12 * edge, rank, dtype, seed) for seed in (0, 1))
        a[0, -1] = torch.nan if edge == 32 else 0  # all products with NaN are computed
        whole = [sparse.from_dense(x, edge, drop=norm) for x, norm in ((a, 1e-3), (b, 1e-2))]
        for at, knob, far in itertools.product(cuts, knobs, (0, 1.1)):
            rows = slice(edge * at[rank.number], edge * at[rank.number + 1])
            shards = [rows_of(x, rows, edge) for x in whole]
            # One rank alone, too.
            given = dict.fromkeys(("tau", "valid_ratio", "max_error")) | knob
            with mock.patch.object(block_rows, "_MOST_FAR", far):
                found = block_rows.multiply(*shards, distributed.axis_of(None), given, edge, False)
            expected = spamm_torch.mm(*whole, **knob)
            assert found.layout == torch.sparse_bsr
            assert_bits(found.to_dense(), expected.to_dense()[rows], (at, knob))
    if rank.world == 1:
        return
    refused = (
        ("ValueError", "balance is for dense shards; got sparse_bsr ones with balance=True",
         lambda: distributed.mm(*shards, tau=1.0, balance=True)),
        ("TypeError", "distributed.mm expects sparse_bsr; got a dense tensor for b: "
         "spamm_torch.sparse.from_dense(b, 64)", lambda: distributed.mm(shards[0], a, tau=1.0)),
        ("RuntimeError", "the rows of b on all ranks must add up to the columns of a, 384; got "
         f"{384 * rank.world}", lambda: distributed.mm(shards[0], whole[1], tau=1.0)),
    )  # fmt: skip
    for refusal in refused:
        assert_all_raise(*refusal)


@case()
def functions_of_shards(rank):
    """Any cuts at block rows, empty shards too; what is wrong on one rank, all raise."""
    i = torch.arange(320, device=rank.device)
    h = matrices.normal(320, 320, dtype=torch.float64, device=rank.device, seed=4)
    h = (h + h.mT) * 0.6 ** (i[:, None] - i).abs() / 8
    h[307:], h[:, 307:] = 0, 0
    signs = torch.diag((-1.5) ** (i % 2) * (i < 307))
    h, signs = (sparse.from_dense(x, 32, drop=1e-9) for x in (h, signs.to(h)))
    fine = {"max_error": 1e-9, "size": 307}
    overlap, levels = sparse.add(h, sparse.identity(307, like=h)), sparse.add(h, signs)

    def from_leaves(*given, **options):
        with mock.patch.object(linalg.inverses, "_WHOLE", 0):
            return linalg.inverse_factor(*given, **options)

    def in_strips(*given, **options):
        # The memory of one rank has no room for lists, and so all make strips.
        made = _without_lists if rank.number == rank.world - 1 else block_rows.make_plan
        most = mock.patch.object(strips, "_MOST_BYTES", 20 * 32**2 * 8)
        with mock.patch.object(block_rows, "make_plan", made), most:
            return linalg.purify(*given, **options)

    for function, a, given in (
        (linalg.inverse_sqrt, overlap, ()),
        (linalg.inverse_factor, overlap, ()),
        (from_leaves, overlap, ()),
        (linalg.sign, levels, ()),
        (linalg.purify, levels, (306,)),
        (in_strips, levels, (306,)),
        (linalg.matrix_power, h, (5,)),
        (linalg.matrix_power, h, (1,)),
        (linalg.matrix_power, h, (0,)),
    ):
        found = function(a, *given, **fine)
        if function is linalg.purify:
            assert min(step.valid_ratio for step in found.iterations) < 1, "nothing is skipped"
            assert len(found.matrix.col_indices()) < 100, "nothing is dropped"
        for at in ([10 * r // rank.world for r in range(rank.world + 1)], [0] * rank.world + [10]):
            own = assert_as_one_process(rank, function, a, found, at, *given, **fine)
    group, last, end = dist.group.WORLD, rank.number == rank.world - 1, rank.world - 1
    pair, whole = (own, rows_of(overlap, slice(*own_rows(rank, own)), 32)), (h, overlap)
    found, one = linalg.in_basis(*pair, group=group, **fine), linalg.in_basis(*whole, **fine)
    assert_bits(found.matrix.to_dense(), one.matrix.to_dense()[slice(*own_rows(rank, own))], "")

    def purify(electrons=306, a=own, **options):
        return lambda: linalg.purify(a, electrons, group=group, **fine | options)

    alike = "electrons=306, max_error=1e-09, energy_error=None, size=307"
    for refusal in (
        ("ValueError", f"max_error must be at least 0; got -1 (on rank {end})",
         lambda: linalg.sign(own, max_error=-1 if last else 0, size=307, group=group)),
        (*raised_by(lambda: linalg.inverse_sqrt(h, **fine)),
         lambda: linalg.inverse_sqrt(own, group=group, **fine)),
        ("ValueError", "electrons must be even and from 2 to 612 for 307 functions; got 309 (on "
         f"rank {end})", purify(309 if last else 306)),
        ("ValueError", f"the knob must be the same on all ranks; got {alike} on rank 0 and "
         f"{alike.replace('306', '310')} on rank {end}", purify(310 if last else 306)),
        ("TypeError", "purify expects sparse_bsr; got a dense tensor for a: "
         "spamm_torch.sparse.from_dense(a, 64)", purify(a=h.to_dense())),
        ("RuntimeError", f"the rows of all ranks must add up to the columns, 320; got "
         f"{320 * rank.world}", purify(a=h)),
    ):  # fmt: skip
        assert_all_raise(*refusal)
    with mock.patch.object(linalg.purification, "_MOST_ITERATIONS", 3):
        words = raised_by(lambda: linalg.purify(levels, 306, **fine))
        assert_all_raise(*words, purify(a=rows_of(levels, slice(*own_rows(rank, own)), 32)))


def _without_lists(*arguments, **options):
    plan = maps.make_plan(*arguments, **options)
    return plan._replace(slots_a=plan.slots_a[:0], slots_b=plan.slots_b[:0])


def assert_as_one_process(rank, function, whole, one, at, *given, **options):
    """The bits, counts and bounds of one process, by the shards that are cut at these block rows.

    Returns this rank's shard.
    """
    rows = slice(32 * at[rank.number], 32 * at[rank.number + 1])
    own = rows_of(whole, rows, 32)
    found = function(own, *given, group=dist.group.WORLD, **options)
    assert_bits(found.matrix.to_dense(), one.matrix.to_dense()[rows], at)
    begin, end = one.matrix.crow_indices()[at[rank.number : rank.number + 2]].tolist()
    assert torch.equal(found.matrix.col_indices(), one.matrix.col_indices()[begin:end]), at
    rounded = {"seconds": 0, "residual": 0}
    told = [[replace(x, **rounded) for x in of.iterations] for of in (found, one)]
    assert told[0] == told[1], at
    assert found.error_bound == one.error_bound, at
    # One process sums up traces and norms in another order.
    residuals = [[*(x.residual for x in of.iterations), of.residual] for of in (found, one)]
    torch.testing.assert_close(*map(torch.tensor, residuals), rtol=1e-6, atol=1e-9)
    return own


def own_rows(rank, own):
    """The first row of a shard, and the one behind it."""
    rows = torch.zeros(rank.world + 1, dtype=torch.int64, device=own.device)
    rows[rank.number + 1] = own.shape[0]
    dist.all_reduce(rows)
    return rows.cumsum(0)[rank.number : rank.number + 2].tolist()


def rows_of(x, rows, edge):
    """Block rows of a block-sparse matrix, by their rows."""
    begin, end = (row // edge for row in (rows.start, rows.stop))
    first, last = x.crow_indices()[[begin, end]].tolist()
    crow = x.crow_indices()[begin : end + 1] - first
    col, values = x.col_indices()[first:last], x.values()[first:last]
    return torch.sparse_bsr_tensor(crow, col, values, size=(rows.stop - rows.start, x.shape[1]))


@case(devices=("cuda",))
def captured_graphs(rank):
    a = torch.ones(64, 64 * rank.world, device=rank.device)
    b = torch.ones(64, 64, device=rank.device)
    distributed.mm(a, b, tau=1.0)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        raised = raised_by(lambda: distributed.mm(a, b, tau=1.0))
    assert raised[0] == "RuntimeError", raised
    assert raised[1].startswith("a product over ranks must not be captured"), raised


@case()
def dense_gradients(rank):
    for dtype, kind in itertools.product((torch.float64, torch.float16), ("odd", "first empty")):
        a, b = operands(rank, dtype=dtype)
        grad = matrices.normal(len(a), b.shape[1], dtype=dtype, device=rank.device, seed=5)
        cuts = cuts_of(len(a), rank.world, kind), cuts_of(len(b), rank.world, "odd")
        for needs_a, needs_b in ((True, True), (True, False), (False, True)):
            own_a = shard(a, cuts[0], rank).clone().requires_grad_(needs_a)
            own_b = shard(b, cuts[1], rank).clone().requires_grad_(needs_b)
            product = distributed.mm(own_a, own_b, valid_ratio=0.3, balance=needs_a)
            expected = spamm_torch.mm(a, b, valid_ratio=0.3)
            assert_bits(product.detach(), shard(expected, cuts[0], rank), (kind, needs_a, needs_b))
            product.backward(shard(grad, cuts[0], rank))
            for own, dense, cut, needed in (
                (own_a, grad @ b.t(), cuts[0], needs_a),
                (own_b, a.t() @ grad, cuts[1], needs_b),
            ):
                if needed:
                    close = {} if dtype == torch.float64 else {"rtol": 1e-2, "atol": 2e-2}
                    torch.testing.assert_close(own.grad, shard(dense, cut, rank), **close)
                else:
                    assert own.grad is None
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not distributed.mm(own_a, own_b, tau=1.0).requires_grad


# ---- DTensors -----------------------------------------------------------------------------------


def placed(x, mesh, placements):
    """The whole matrix ``x`` as a DTensor; partial sums are x on one rank and zeros on others."""
    spread = distribute_tensor(x, mesh, [R if p.is_partial() else p for p in placements])
    local = spread.to_local()
    for dim, placement in enumerate(placements):
        if placement.is_partial() and mesh.get_local_rank(dim) > 0:
            local = torch.zeros_like(local)
    return DTensor.from_local(local, mesh, placements, shape=x.shape, stride=x.stride())


PLACEMENTS = {  # of a and b on the dimensions of a mesh: those of c, where they are told
    **dict.fromkeys([((S0,), p) for p in ((S0,), (R,), (S1,), (P,))], (S0,)),
    **dict.fromkeys([(p, (S0,)) for p in ((S1,), (R,), (P,))], (S0,)),
    **dict.fromkeys([((R,), (S1,)), ((S1,), (S1,)), ((S1,), (R,))], (S1,)),
    ((R,), (R,)): (R,),
    **dict.fromkeys([((S0, S1), (S0, S1)), ((S0, R), (S0, S1)), ((S0, S1), (R, S1))], (S0, S1)),
    ((S0, R), (S0, R)): (S0, R),
    ((S1, S0), (S1, S0)): (S1, S0),
    ((S0, S0), (S0, S0)): (S0, S1),
    **dict.fromkeys([((R, S1), (S0, S1)), ((S1, P), (R, S0))]),
}


# More ranks than rows, and sizes of which torch.chunk makes shards of all lengths.
SIZES = ((300, 260, 333), (3, 130, 67), (129, 1, 65), (257, 191, 2), (0, 64, 64), (64, 0, 64))


@case()
def dtensors(rank):
    knobs, sizes = itertools.cycle(KNOBS), itertools.cycle(SIZES)
    layouts = itertools.cycle(matrices.LAYOUTS[name] for name in ("contiguous", "transposed"))
    shapes = [(rank.world,), (1, rank.world), (rank.world, 1), *([(2, 2)] * (rank.world == 4))]
    for shape in shapes:
        mesh = init_device_mesh(rank.device.type, shape)
        for (pa, pb), pc in PLACEMENTS.items():
            if len(pa) == len(shape):
                knob, balance = next(knobs), pa[0] == S0 and len(shape) == 2
                for size in (SIZES[0], next(sizes)):
                    a, b = map(next(layouts), operands(rank, *size, torch.float64))
                    whole = placed(a, mesh, pa), placed(b, mesh, pb)
                    with short_stages():
                        c = distributed.mm(*whole, **knob, balance=balance)
                    assert pc is None or c.placements == pc, (pa, pb, c.placements)
                    what = (shape, pa, pb, size, knob)
                    assert_bits(c.full_tensor(), spamm_torch.mm(a, b, **knob), what)


@case(worlds=(2, 4))
def dtensor_gradients(rank):
    mesh = init_device_mesh(rank.device.type, (2, rank.world // 2))
    a, b = operands(rank, dtype=torch.float64)
    grad = matrices.normal(len(a), b.shape[1], dtype=torch.float64, device=rank.device, seed=5)
    for pa, pb in (((S0, S1), (S0, S1)), ((S0, R), (R, R)), ((S1, R), (S0, S0))):
        own_a = placed(a, mesh, pa).requires_grad_()
        own_b = placed(b, mesh, pb).requires_grad_()
        c = spamm_torch.mm(own_a, own_b, valid_ratio=0.5)
        c.backward(placed(grad, mesh, c.placements))
        for own, dense in ((own_a, grad @ b.t()), (own_b, a.t() @ grad)):
            assert own.grad.placements == own.placements
            torch.testing.assert_close(own.grad.full_tensor(), dense)


@case(worlds=(2, 4))
def linear_of_dtensors(rank):
    mesh = DeviceMesh(rank.device.type, [0, 1])
    if rank.number > 1:
        return
    input = matrices.normal(4, 50, 130, device=rank.device)
    weight = matrices.normal(70, 130, device=rank.device, seed=1)
    bias = matrices.normal(70, device=rank.device, seed=2)
    own_input, own_weight, own_bias = (
        distribute_tensor(x, mesh, [S0]).requires_grad_() for x in (input, weight, bias)
    )
    found = spamm_torch.linear(own_input, own_weight, own_bias, valid_ratio=0.5)
    assert found.shape == (4, 50, 70)
    expected = spamm_torch.linear(input, weight, valid_ratio=0.5) + bias
    assert_bits(found.full_tensor().detach(), expected, "linear")
    found.sum().backward()
    assert own_weight.grad.placements == (S0,)
    assert own_bias.grad.full_tensor().tolist() == [200.0] * 70


@case()
def dtensors_that_do_not_fit(rank):
    """A right call follows each wrong one."""
    mesh = init_device_mesh(rank.device.type, (rank.world,))
    a, b = operands(rank, 96, 96, 96)
    own_a, own_b = (distribute_tensor(x, mesh, [S0]) for x in (a, b))
    last, end = rank.number == rank.world - 1, f"on rank {rank.world - 1}"
    replicated_b, narrow = distribute_tensor(b, mesh, [R]), distribute_tensor(b[:95], mesh, [S0])
    rows, length, kind = own_a.to_local(), 96 // rank.world, "a DTensor (96, 96)"
    rows = rows[1:] if last else rows
    uneven = DTensor.from_local(rows, mesh, [S0], shape=a.shape, stride=a.stride())
    mm = functools.partial(distributed.mm, tau=1.0)
    info = functools.partial(spamm_torch.mm, tau=1.0, return_info=True)
    for error, line, call in (
        ("TypeError", "a and b must both be DTensors; got b of Tensor", lambda: mm(own_a, b)),
        ("ValueError", "group must not be given for DTensors; got ProcessGroup",
         lambda: mm(own_a, own_b, group=dist.group.WORLD)),
        ("ValueError", "return_info must not be given for DTensors; got True",
         lambda: info(own_a, own_b)),
        ("TypeError", "addmm takes no DTensor, unlike mm; got one",
         lambda: spamm_torch.addmm(own_a, own_a, own_b, tau=1.0)),
        ("RuntimeError", "a's columns must match b's rows; got shapes (96, 96) and (95, 96)",
         lambda: mm(own_a, narrow)),
        ("ValueError", f"a's shard must have shape ({length}, 96), as torch.chunk cuts; got "
         f"({length - 1}, 96) ({end})", lambda: mm(uneven, own_b)),
        ("TypeError", "the kind of a and b must be the same on all ranks; got "
         f"{kind} of (Shard(dim=0),) and {kind} of (Shard(dim=0),) on rank 0 and "
         f"{kind} of (Shard(dim=0),) and {kind} of (Replicate(),) {end}",
         lambda: mm(own_a, replicated_b if last else own_b)),
        ("ValueError", f"the knob must be the same on all ranks; got tau=0.0 on rank 0 and tau=1.0 "
         f"{end}", lambda: mm(own_a, own_b, tau=float(last))),
    ):  # fmt: skip
        assert_all_raise(error, line, call)
        found = spamm_torch.mm(own_a, own_b, tau=1.0).full_tensor()
        assert_bits(found, spamm_torch.mm(a, b, tau=1.0), line)


# ---- A rank that fails: last, since it leaves no group behind ------------------------------------


@case(worlds=(3, 4), devices=("cpu",))
def a_rank_that_sleeps(rank):
    """The others end by the group's timeout; it sleeps until they have."""
    group = dist.new_group()
    dist.barrier(group)  # all have met, however long it took
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    last, store = rank.world - 1, dist.distributed_c10d._get_default_store()
    ended = [f"{number} has ended" for number in range(rank.world)]
    if rank.number == last:
        store.wait(ended[:last], TIMEOUT)
        store.set(ended[last], "")
        return
    a, b = operands(rank)
    raised = raised_by(lambda: distributed.mm(a, b, tau=1.0, group=group))
    store.set(ended[rank.number], "")
    if rank.number == 0:  # it holds the store, which the others read until they end
        store.wait(ended, TIMEOUT)
    assert raised[0] == "RuntimeError", raised


TIMEOUT = timedelta(seconds=300)  # of each collective call


def main(kind):
    """Runs the cases for so many ranks on a kind of device, as one of them."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for torch's deterministic mode
    torch.set_num_threads(1)
    # Fills torch.empty with NaN: what is read before it is written shows in the result.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    number, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, number)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if kind == "cpu" else "nccl"
    dist.init_process_group(backend, timeout=TIMEOUT)
    for name, case in cases(world, kind).items():
        case(Rank(number, world, device))
        print(f"passed {name}", flush=True)
    dist.destroy_process_group()


# ---- The tests -----------------------------------------------------------------------------------

HERE = Path(__file__).parent
LIMIT = 900  # seconds for all ranks of a world together, on a machine with much else to do


@functools.cache
def outcomes(world, device):
    """The outcome of one rank, of one that failed if one did."""
    code = f"import test_distributed; test_distributed.main({device!r})"
    paths = (HERE.parent, ROOT, ROOT / "scripts", os.environ.get("PYTHONPATH", ""))
    context = FORKS if device == "cpu" else multiprocessing.get_context("spawn")
    given = {"cwd": HERE, "ranks": world, "seconds": LIMIT, "context": context}
    return forked("-c", code, PYTHONPATH=os.pathsep.join(map(str, paths)), **given)


def check(world, device, case):
    run = outcomes(world, device)
    assert f"passed {case}" in run.stdout.splitlines(), run.stderr


def every_case(device, worlds, marks=()):
    return [
        pytest.param(world, case, marks=marks) for world in worlds for case in cases(world, device)
    ]


@pytest.mark.parametrize(
    ("world", "case"),
    [*every_case("cpu", (1, 4)), *every_case("cpu", (2, 3), pytest.mark.thorough)],
)
def test_gloo(world, case):
    check(world, "cpu", case)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("world", "case"), [*every_case("cuda", (1,)), *every_case("cuda", (2,), pytest.mark.multi_gpu)]
)
def test_nccl(world, case):
    check(world, "cuda", case)


def test_without_process_group():
    a = torch.ones(64, 64)
    with pytest.raises(ValueError, match=r"^the ranks must have met in .*init_process_group"):
        spamm_torch.distributed.mm(a, a, tau=1.0)


def test_example():
    """examples/distributed_mm.py under torchrun compares with one process itself."""
    launcher = "from torch.distributed.run import main; main()"
    command = ("--standalone", "--nproc-per-node", 2, ROOT / "examples/distributed_mm.py")
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    options = ("--rows", 700, "--valid-ratio", 0.1)
    result = forked("-c", launcher, *command, *options, **environment)
    assert result.returncode == 0, result.stderr
    assert re.search(r"^2 ranks with gloo: .* equal to one process", result.stdout, re.MULTILINE)
    assert re.search(r"travel in float32", result.stdout)
