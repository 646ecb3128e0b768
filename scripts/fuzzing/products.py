"""Cases of products: dense in every form, symmetric, in place, of shards, and block-sparse."""

import itertools
import math

import numpy as np
import torch
from torch.nn.functional import pad

import spamm_torch
from spamm_torch.sparse.maps import TO_DROP

from . import space
from .space import BLOCKS, DTYPES, EDGES, EXACT, PATTERNS, SEEDS, expect, expect_bits, matrices
from .space import reference as oracle

FORMS = ("mm", "addmm", "bmm", "linear", "symmetric", "into", "in place", "shards")
KNOBS = ("tau", "tau", "tau", "tensor", "max_error", "nothing", "everything", "nan")
COMMON = {"dtype": tuple(DTYPES), "pattern_a": PATTERNS, "pattern_b": PATTERNS, "seed": SEEDS}
COMMON |= {"share": (0.5, 0.1, 0.9, 1.0, 1e-3), "tf32": (False, False, False, True)}
COMMON |= {"beta": (1, 0, -0.5), "alpha": (1, 2, -0.25)}
LAYOUTS = tuple(matrices.LAYOUTS)
DENSE = {"form": FORMS, "m": EDGES, "k": EDGES, "n": EDGES, "batch": (1, 2, 3, 70, 300, 0)}
DENSE |= {"block": BLOCKS, "layout_a": LAYOUTS, "layout_b": LAYOUTS, **COMMON}
DENSE |= {"knob": (*KNOBS, "valid_ratio"), "given": (False, True, "a", "b")}
DENSE |= {"added": ("matrix", "row", "column", "number")}


def knob_of(case, host, device):
    """The keyword that says what is skipped; a tau is the very product of two norms."""
    kind, share = case["knob"], case["share"]
    if kind in ("valid_ratio", "max_error"):
        return {kind: share}
    fixed = {"nothing": 0.0, "everything": math.inf, "nan": torch.tensor(math.nan)}
    if kind in fixed:
        return {"tau": fixed[kind]}
    candidates = oracle.thresholds(*host)
    tau = candidates[int(share * (len(candidates) - 1))]
    return {"tau": torch.tensor(tau, device=device) if kind == "tensor" else float(tau)}


def tau_of(knob, maps, host):
    """The threshold of a knob, on the CPU; a search and its bound are held against the oracle's."""
    if "tau" in knob:
        return knob["tau"].cpu() if isinstance(knob["tau"], torch.Tensor) else knob["tau"]
    tau = spamm_torch.find_tau(*maps, **knob)
    bound, tau = spamm_torch.error_bound(*maps, tau).item(), tau.cpu()
    lost = oracle.error_bound(*host, tau.item())
    if "valid_ratio" in knob:
        wanted, total = oracle.find_tau(*host, knob["valid_ratio"]), oracle.products(*host).size
        counts = [np.count_nonzero(oracle.kept(*host, t)) for t in (tau.item(), wanted)]
        far, near = (abs(count - knob["valid_ratio"] * total) for count in counts)
        expect(far <= near, f"find_tau keeps {counts[0]}, the oracle {counts[1]} of {total}")
    else:
        wide = (norms.numpy().astype(np.longdouble) for norms in host)  # which holds every square
        with np.errstate(all="ignore"):
            limit = knob["max_error"] * math.prod(np.sqrt(np.sum(n**2)) for n in wide)
        expect(not lost > limit, f"find_tau for {knob} loses {lost}, above {limit}")
    info = torch.finfo(tau.dtype)
    near = lost <= bound <= lost * (1 + 1e-4) + info.smallest_normal
    too_large = math.isinf(bound) and lost > info.max * 0.999
    expect(near or too_large, f"error_bound {bound}, the oracle {lost}")
    return tau


def compare(
    results, a, b, maps, tau, case, device, upper=False, drop=0.0, input=None, beta=1, alpha=1
):
    """Holds products against the oracle's, by the decisions that the library's norms make.

    On CUDA float32 is measured against the norms of blocks, too, in each of which split parts share
    a power of two. Subnormal numbers may count as zero in a CPU's instructions for bfloat16 and in
    TF32; the parts of float32 end at 2^-133. upper: of a symmetric product. drop: the norm below
    which blocks are left out.
    """
    dtype, block = a.dtype, case["block"]
    patterns = {case["pattern_a"], case["pattern_b"]}
    magnitudes = None if input is None else input.abs()
    absolute = magnitudes, abs(beta), abs(alpha)
    size = oracle.multiply(a.abs(), b.abs(), *maps, tau, block, *absolute)
    exact = oracle.multiply(a, b, *maps, tau, block, input, beta, alpha)
    on_cuda = device.type == "cuda" and dtype == torch.float32
    sums = None if patterns <= EXACT else space.sums_of(device, dtype, oracle.edges(block))
    with np.errstate(all="ignore"):
        bound = drop + space.rounding(exact, size, a.shape[-1], sums, dtype, alpha=abs(alpha))
        if on_cuda and sums:
            m, k, n = oracle.edges(block)
            finite = (torch.nan_to_num(x.double(), 0.0, 0.0, 0.0) for x in (a, b))
            norms = oracle.products(*map(oracle.norm_map, finite, ((m, k), (k, n))))
            lost = np.where(oracle.kept(*maps, tau), norms, 0).sum(-2)
            of_entries = abs(alpha) * lost.repeat(m, -2).repeat(n, -1)
            of_entries *= space.LOST_OF_TF32 if case["tf32"] else space.LOST_OF_SPLIT
            bound = bound + of_entries[..., : exact.shape[-2], : exact.shape[-1]]
        if "tiny" in patterns and (on_cuda or (dtype == torch.bfloat16 and device.type == "cpu")):
            least = 2.0 ** (-133 if on_cuda and not case["tf32"] else -126)
            how = (*maps, tau, block, None, 0, abs(alpha))
            bound += space.flushed(lambda a, b: oracle.multiply(a, b, *how), a, b, least)
    if sums is None and not drop:  # the one rounding
        exact, bound = torch.from_numpy(exact).to(dtype).double().numpy(), np.zeros_like(bound)
    if patterns & {"huge", "tiny"} and patterns & {"inf", "nan"}:  # sums overflow, or 0 times inf
        size = np.where(np.isfinite(size), size, np.finfo(np.float64).max)
    if upper:
        exact, bound, size = (np.triu(x) + np.triu(x, 1).T for x in (exact, bound, size))
    for found in results:
        space.expect_near(found, exact, bound, size)


def dense(case, device):
    """Products of dense matrices, and the stages they are made of."""
    torch.backends.cuda.matmul.allow_tf32 = case["tf32"]
    form, dtype, seed = case["form"], DTYPES[case["dtype"]], case["seed"]
    m, k, n = case["m"], case["k"], case["n"]
    (bm, bk, bn), batch = oracle.edges(case["block"]), ()
    if form in ("symmetric", "in place"):
        k, n = m, m
    if form == "bmm":
        batch = (case["batch"],)
        m, k, n = (min(edge, 200 if case["batch"] <= 3 else 33) for edge in (m, k, n))
    if form == "symmetric":
        bn, case = bm, case | {"pattern_b": case["pattern_a"]}
    case = case | {"block": (bm, bk, bn)}
    layouts = matrices.BATCH_LAYOUTS if batch else matrices.LAYOUTS
    numbers = space.values((*batch, m, k), case["pattern_a"], dtype, seed)
    if form == "symmetric":
        numbers = numbers.triu() + numbers.triu(1).mT
        layouts = layouts | dict.fromkeys(("one row", "one column", "sliding"), lambda t: t)
    host_a, a = space.laid_out(layouts, case["layout_a"], numbers, device)
    host_b, b = host_a, a
    if form != "symmetric":
        numbers = space.values((*batch, k, n), case["pattern_b"], dtype, seed + 1)
        host_b, b = space.laid_out(layouts, case["layout_b"], numbers, device)
    maps = spamm_torch.norm_map(a, (bm, bk)), spamm_torch.norm_map(b, (bk, bn))
    host = [norms.cpu() for norms in maps]
    space.expect_norms(host[0], oracle.norm_map(host_a, (bm, bk)), "norms of a")
    space.expect_norms(host[1], oracle.norm_map(host_b, (bk, bn)), "norms of b")
    knob = knob_of(case, host, device)
    tau = tau_of(knob, maps, host)
    options, plain = {**knob, "block": (bm, bk, bn)}, {**knob, "block": (bm, bk, bn)}
    given = form == "in place" or case["given"]  # the norms of a copy may round apart
    if given:
        names = [name for name in ("norm_a", "norm_b") if given in (True, name[-1])]
        options |= {name: maps[name == "norm_b"] for name in names}
    scaling, again, norms, info = {}, None, None, None  # again: the same in another way
    if form in ("addmm", "in place"):
        host_added, added = host_a, a
        if form == "addmm":
            shape = {"matrix": (m, n), "row": (n,), "column": (m, 1), "number": ()}[case["added"]]
            pattern = "nan" if case["beta"] == 0 else "patchy"
            numbers = space.values(shape or (1,), pattern, dtype, seed + 2).reshape(shape)
            layout = case["layout_b"] if len(shape) == 2 else "contiguous"
            host_added, added = space.laid_out(layouts, layout, numbers, device)
        scaling = {"beta": case["beta"], "alpha": case["alpha"], "input": host_added}
        of = scaling | {"input": added, "a": a, "b": b}
    if form == "linear":
        scaling = {"input": space.values((n,), "patchy", dtype, seed + 2)}
        more = {**plain, "return_info": True}
        found, info = spamm_torch.linear(a, b.mT, scaling["input"].to(device), **more)
    elif form == "bmm":
        found, info = spamm_torch.bmm(a, b, **plain, return_info=True)
    elif form == "shards":
        parts = [a[i:j] for i, j in itertools.pairwise((0, min(m, bm), m))]
        found = torch.cat(spamm_torch.mm_shards(parts, [b, b], **plain))
        again = spamm_torch.mm(a, b, **plain)
    elif form == "addmm":
        again = spamm_torch.addmm(**of, **plain)
        options |= {"return_norms": True, "return_info": True}
        found, norms, info = spamm_torch.addmm(**of, **options)
    elif form == "in place":
        found = spamm_torch.addmm(**of, **options)
        again = a.clone()
        spamm_torch.addmm(**of | {"input": again, "a": again}, **options, out=again)
    elif form == "into":
        wide = torch.full((m + 2, n + 3), 7.0, dtype=dtype, device=device)
        out = wide[1 : m + 1, 2 : n + 2]
        if case["layout_a"] == "transposed":
            wide = wide.new_full((n + 3, m + 2), 7.0)
            out = wide[2 : n + 2, 1 : m + 1].mT
        found = spamm_torch.mm(a, b, **options, out=out).clone()
        out.fill_(7.0)
        expect(bool((wide == 7).all()), "memory around out was written")
        again = spamm_torch.mm(a, b, **plain)
    else:
        kind = {"symmetric": form == "symmetric"}
        options |= {"return_norms": True, "return_info": True}
        found, norms, info = spamm_torch.mm(a, b, **kind, **options)
        again = spamm_torch.mm(a, b, **kind, **plain)
    got = f"{found.dtype} on {found.device}"
    expect(found.dtype == dtype and found.device.type == device.type, got)
    if norms is not None:
        expect_bits(norms, spamm_torch.norm_map(found, (bm, bn)), "norms of the result")
    if info is not None:
        told = spamm_torch.valid_ratio(*maps, info.tau), spamm_torch.error_bound(*maps, info.tau)
        expect(info.tau.item() == oracle.rounded(tau, host[0].numpy().dtype) or tau != tau, info)
        expect_bits(torch.stack(info[1:3]), torch.stack(told), "what the norms tell")
        expect(info[3:] == ((bm, bk, bn), None), info)
    found, again = found.cpu(), None if again is None else again.cpu()
    results, upper = [found] if again is None else [found, again], form == "symmetric"
    if again is not None and (device.type == "cpu" or form == "shards"):
        expect_bits(again, found, f"the same product in another way than {form}")
    compare(results, host_a, host_b, host, tau, case, device, upper, **scaling)


SPARSE = {"form": ("mm", "addmm", "dense b", "symmetric", "drop", "plan"), "edge": (32, 64, 128)}
SPARSE |= {"m": (1, 2, 3, 5, 0), "k": (1, 2, 4, 7, 0), "n": (1, 2, 3, 5, 0), "knob": KNOBS}
SPARSE |= {"stored": (0.5, 1.0, 0.1, 0.0), "stored_b": (0.5, 1.0, 0.1, 0.0)}
SPARSE |= {"index": ("int64", "int32"), **COMMON}


def _blocks(rows, columns, share, case, pattern, seed, symmetric=False):
    """A mask of stored blocks, and the dense matrix, which is zero elsewhere."""
    mask = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < share
    shape = rows * case["edge"], columns * case["edge"]
    numbers = space.values(shape, pattern, DTYPES[case["dtype"]], seed)
    if symmetric:
        mask, numbers = mask | mask.T, numbers.triu() + numbers.triu(1).mT
    wide = mask.repeat_interleave(case["edge"], 0).repeat_interleave(case["edge"], 1)
    return mask, torch.where(wide, numbers, 0)


def _matrix(mask, dense, case, device):
    """The block-sparse matrix of a mask."""
    edge, index = case["edge"], getattr(torch, case["index"])
    blocks = dense.reshape(len(mask), edge, mask.shape[1], edge).transpose(1, 2)[mask]
    crow, col = pad(mask.sum(1).cumsum(0), (1, 0)).to(index), mask.nonzero()[:, 1].to(index)
    size = tuple(dense.shape)
    found = torch.sparse_bsr_tensor(crow, col, blocks, size=size, check_invariants=False)
    return found.to(device)


def sparse(case, device):
    """Products of block-sparse matrices against the oracle, and which blocks the result stores."""
    torch.backends.cuda.matmul.allow_tf32 = case["tf32"]
    edge, form, seed = case["edge"], case["form"], case["seed"]
    m, k, n = (min(case[name], 384 // edge) for name in "mkn")
    case = case | {"block": (edge,) * 3}
    is_symmetric, is_dense = form == "symmetric", form == "dense b"
    if is_symmetric:
        k, n, case = m, m, case | {"pattern_b": case["pattern_a"]}
    pattern_a, pattern_b = case["pattern_a"], case["pattern_b"]
    mask_a, host_a = _blocks(m, k, case["stored"], case, pattern_a, seed, is_symmetric)
    a = _matrix(mask_a, host_a, case, device)
    mask_b, host_b, b = mask_a, host_a, a
    if not is_symmetric:
        share = 1.0 if is_dense else case["stored_b"]
        mask_b, host_b = _blocks(k, n, share, case, pattern_b, seed + 1)
        b = _matrix(mask_b, host_b, case, device)
    decides, of_plan = host_a, a
    if form == "plan":  # made from other values than it is used for
        even = (torch.arange(m)[:, None] + torch.arange(k)) % 2 == 0
        even = even.repeat_interleave(edge, 0).repeat_interleave(edge, 1)
        decides = torch.where(even, host_a, host_a * 2**-6)
        of_plan = _matrix(mask_a, decides, case, device)
    host = [spamm_torch.norm_map(x.to(device), edge).cpu() for x in (decides, host_b)]
    knob = knob_of(case, host, device)
    tau = knob.get("tau")
    if tau is None:  # searched among the products of stored blocks alone
        share = 1 - TO_DROP if form == "drop" else 1
        norms = [spamm_torch.norm_map(x, edge) for x in (of_plan, b)]
        tau = spamm_torch.find_tau(*norms, max_error=knob["max_error"] * share)
    tau = tau.cpu() if isinstance(tau, torch.Tensor) else tau
    options = {**knob, "return_norms": True, "symmetric": is_symmetric}
    drop = {"drop": torch.finfo(host_a.dtype).smallest_normal} if form == "drop" else {}
    scaling, mask_c, mask, info = {}, torch.zeros(m, n, dtype=torch.bool), None, None
    if form == "addmm":
        mask, added = _blocks(m, n, 0.4, case, "patchy", seed + 2)
        scaling, mask_c = {"beta": case["beta"], "alpha": case["alpha"]}, mask & bool(case["beta"])
        options |= scaling | {"return_info": True}
        found, norms, info = spamm_torch.addmm(_matrix(mask, added, case, device), a, b, **options)
        scaling["input"] = added
    elif is_dense:
        found, norms = spamm_torch.mm(a, host_b.to(device), **options)
    elif form == "plan":
        plan = spamm_torch.sparse.plan(of_plan, b, **knob)
        found, norms = spamm_torch.mm(a, b, plan=plan, return_norms=True)
    else:
        found, norms, info = spamm_torch.mm(a, b, **options, **drop, return_info=True)
    if is_dense:
        expect_bits(norms, spamm_torch.norm_map(found, edge), "norms of the result")
    else:
        valid = oracle.kept(*host, tau)
        exists = mask_a.numpy()[:, :, None] & mask_b.numpy()[None]
        pattern, stored = (
            torch.from_numpy((valid & exists).any(1)) | mask_c,
            torch.zeros_like(mask_c),
        )
        if is_symmetric:
            pattern = pattern.triu() | pattern.triu().T
        rows = torch.arange(m).repeat_interleave(found.crow_indices().diff().cpu().long())
        stored[rows, found.col_indices().cpu().long()] = True
        if info and not is_symmetric:
            count = np.count_nonzero(valid & exists)
            shares = [count / x if x else 1.0 for x in (np.count_nonzero(exists), exists.size)]
            told = [x.item() for x in (info.valid_ratio, info.valid_ratio_of_all)]
            expect(np.allclose(told, shares, rtol=1e-6), f"{info}, the oracle {shares}")
            expect(form == "drop" or info.drop_bound == 0, f"{info}, where nothing is dropped")
        expect(found.col_indices().dtype == a.col_indices().dtype, f"{found.col_indices().dtype}")
        fewer = form == "drop" and not (stored & ~pattern).any()
        expect(fewer or torch.equal(stored, pattern), "blocks that the result stores")
        found = spamm_torch.sparse.to_dense(found)
    if bool(host_a.isfinite().all() and host_b.isfinite().all()):
        # Else the oracle multiplies a NaN by blocks that are not stored, the library does not.
        more = scaling | drop
        compare([found], host_a, host_b, host, tau, case, device, is_symmetric, **more)
