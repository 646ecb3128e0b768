"""Ops of block-sparse matrices: patterns that change, lists that lead elsewhere, torch's checks."""

import block_patterns as patterns
import pytest
import torch
from support import refuses
from torch.library import opcheck

import spamm_torch
from spamm_torch import mm, sparse

ops = torch.ops.spamm_torch


def test_patterns_that_change():
    a = patterns.of_blocks(torch.eye(3).bool(), torch.ones(3, 32, 32))
    plan = sparse.plan(a, a, tau=0.0)
    assert sparse.trace(a) == 96
    a.col_indices()[1] = 2
    words = "pattern of a: expected 3 stored blocks in 3 x 3; got 3 in"
    refuses(RuntimeError, lambda: mm(a, a, plan=plan), words)
    a.crow_indices()[1] = 2
    a.col_indices()[1] = 0
    refuses(RuntimeError, lambda: sparse.trace(a), "a's block columns must ascend")


@pytest.mark.cuda
def test_two_devices():
    a, words = patterns.matrix("random", 3, 3, 32), "must be on the same device; got cpu and cuda:0"
    for other in (a.cuda(), a.to_dense().cuda()):
        refuses(RuntimeError, lambda other=other: mm(a, other, tau=1.0), words)
    refuses(RuntimeError, lambda: sparse.add(a, a.cuda()), words)
    words, norms = "norm_a must be on the operands' device cuda:0; got cpu", spamm_torch.norm_map(a)
    refuses(RuntimeError, lambda: mm(a.cuda(), a.cuda(), tau=1.0, norm_a=norms), words)


def test_the_op_refuses_lists_that_lead_elsewhere():
    """Arguments that Python never passes: nothing is read or written outside of the matrices."""
    upper = torch.ones(3, 3).triu().bool()
    a = patterns.of_blocks(upper, torch.rand(6, 32, 32, dtype=torch.float64))
    plan = sparse.plan(a, a, tau=0.0)
    crow, col, values = a.crow_indices(), a.col_indices(), a.values()

    def multiply(**changed):
        parts = dict(zip(("crow", "col", "first", "slots_a", "slots_b"), plan[5:10], strict=True))
        parts |= {"crow_a": crow, "col_a": col, "values_a": values, "values_b": values}
        symmetric = changed.pop("symmetric", False)
        return ops.bsr_multiply(*(parts | changed).values(), symmetric=symmetric)

    assert len(multiply()[0]) == plan.blocks
    wrong = (
        {"slots_a": plan.slots_a + 100},
        {"slots_b": plan.slots_b - 100},
        {"slots_a": plan.slots_a.flip(0)},
        {"first": plan.first.flip(0)},
        {"first": plan.first[1:]},
        {"symmetric": True},
    )
    for changed in wrong:
        with pytest.raises(RuntimeError, match="a plan must "):
            multiply(**changed)
    with pytest.raises(RuntimeError, match=r"a must hold \d+ square blocks of 32, 64 or 128"):
        multiply(values_a=values[1:])


@pytest.mark.strength(1)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_ops(index, dtype):
    a = patterns.matrix("random", 3, 3, 32, dtype, index=index)
    norms = spamm_torch.norm_map(a)
    pattern = (a.crow_indices().clone(), a.col_indices().clone())  # no views of sparse tensors
    maps, values = (*pattern, norms.values().clone()) * 2, a.values().clone()
    tau = torch.tensor(0.5)
    opcheck(ops.bsr_find_tau.default, (*maps, 3), {"valid_ratio": 0.4})
    opcheck(ops.bsr_find_tau.default, (*maps, 3), {"max_error": 0.1})
    opcheck(ops.bsr_error_bound.default, (*maps, 3, tau))
    share = {"share": 0.1, "norm_a": maps[2], "norm_b": maps[2]}
    opcheck(ops.bsr_drop.default, maps[:3], {"below": 0.5})
    opcheck(ops.bsr_drop.default, maps[:3], {"below": 2.0, "symmetric": True, **share})
    if dtype != torch.float16:
        opcheck(ops.bsr_drop.default, maps[:3], {"below": 0.5, "values": values})
    names = ("crow_input", "col_input")
    added = dict(zip(names, pattern, strict=True))
    for options in ({}, {"lists": False}, {"symmetric": True}, added):
        opcheck(ops.bsr_plan.default, (*maps, 3, tau), options)
    plan = sparse.plan(a, a, tau=0.5)[5:10]
    opcheck(ops.bsr_multiply.default, (*plan, *pattern, values, values))
    added = sparse.plan(a, a, tau=0.5, input=a)[5:10]
    given = dict(zip((*names, "values_input"), (*pattern, values), strict=True))
    options = given | {"beta": 2.0, "alpha": -1.0}
    opcheck(ops.bsr_multiply.default, (*added, *pattern, values, values), options)


def test_ops_in_a_graph():
    """A function of plain tensors compiles; the sizes of its result depend on the norms."""
    a = patterns.matrix("random", 4, 4, 32)
    norms = spamm_torch.norm_map(a)

    def product(crow, col, values, norms, tau):
        plan = ops.bsr_plan(crow, col, norms, crow, col, norms, 4, tau)
        return ops.bsr_multiply(*plan, crow, col, values, values)

    parts = [x.clone() for x in (a.crow_indices(), a.col_indices(), a.values(), norms.values())]
    compiled = torch.compile(product, backend="eager", fullgraph=True)
    for tau in (0.1, 1.0):
        found, expected = (f(*parts, torch.tensor(tau)) for f in (compiled, product))
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
