"""torch.library.opcheck on the ops of block-sparse products."""

import block_patterns as patterns
import pytest
import torch
from torch.library import opcheck

import spamm_torch
from spamm_torch import sparse

ops = torch.ops.spamm_torch


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
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
