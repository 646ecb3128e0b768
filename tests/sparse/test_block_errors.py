"""Bad input of block-sparse functions: one line, with what was expected and what came."""

import importlib
import math

import block_patterns as patterns
import pytest
import torch
from support import refuses
from torch.library import opcheck

import spamm_torch
from spamm_torch import _hints, sparse

A = patterns.matrix("random", 3, 3, 32)
X = A.to_dense()
MAP = spamm_torch.norm_map(A)


def bsr(crow, col, edge=(32, 32), size=(96, 96), dtype=torch.float64, **options):
    """A matrix that torch does not check."""
    values = torch.ones(len(col), *edge, dtype=dtype, **options)
    return torch.sparse_bsr_tensor(
        torch.tensor(crow), torch.tensor(col), values, size=size, check_invariants=False
    )


def mm(a=A, b=A, **options):
    return spamm_torch.mm(a, b, **{"tau": 1.0} | options)


def other_map(dtype=torch.float64):
    return spamm_torch.norm_map(patterns.matrix("banded", 3, 3, 32, dtype))


CASES = {
    TypeError: [
        (lambda: mm(X.to_sparse_csr()),
         "expects dense or sparse_bsr; got sparse_csr: spamm_torch.sparse.from_sparse(a, 64)"),
        (lambda: mm(A, X.to_sparse()), "got sparse_coo: spamm_torch.sparse.from_sparse(b, 64)"),
        (lambda: sparse.trace(X.to_sparse_csr()),
         "trace expects sparse_bsr; got sparse_csr: spamm_torch.sparse.from_sparse(a, 64)"),
        (lambda: mm(A, A.float()), "a and b must have one dtype; got float64 and float32"),
        (lambda: mm(bsr([0, 1, 1, 1], [0], dtype=torch.int32)),
         "a must be float16, bfloat16, float32 or float64; got int32"),
        (lambda: mm(drop="a"), "drop must be a number; got 'a'"),
        (lambda: mm(out=X), "mm of block-sparse matrices takes no out; got one"),
        (lambda: mm(devices=[0]), "takes no devices; got one"),
        (lambda: mm(X, X, drop=1.0), "drop is for sparse_bsr operands; got dense ones"),
        (lambda: mm(A, X, drop=1.0), "for a sparse_bsr result; got a dense one"),
        (lambda: spamm_torch.addmm(X, X, X, tau=1.0, plan=1), "plan is for sparse_bsr"),
        (lambda: mm(tau=None, plan=sparse.plan(A, A, tau=1.0), return_info=True),
         "a plan may have been made of other norms: expected no return_info; got True"),
        (lambda: mm(norm_a=MAP.to_dense()),
         "mm expects two dense norm maps, or two of sparse_bsr matrices"),
        (lambda: mm(norm_a=MAP.float()),
         "norm_a must be float64 for float64 operands; got float32"),
        (lambda: spamm_torch.addmm(X, A, A, tau=1.0),
         "expects an input that is sparse_bsr, as the result is; got one that is dense"),
        (lambda: spamm_torch.addmm(A.float(), A, A, tau=1.0),
         "input and the operands must have one dtype"),
        (lambda: spamm_torch.find_tau(MAP, MAP.to_dense(), 0.5), "got strided for norm_b"),
        (lambda: spamm_torch.valid_ratio(MAP, other_map(torch.float32), 1.0),
         "norm_a and norm_b must have one dtype; got float64 and float32"),
        (lambda: sparse.from_dense(A), "a must be a dense (strided) tensor"),
        (lambda: sparse.from_scipy(X), "from_scipy expects a sparse matrix of scipy; got Tensor"),
        (lambda: sparse.transpose(X),
         "expects sparse_bsr; got a dense tensor for a: spamm_torch.sparse.from_dense(a, 64)"),
        (lambda: sparse.trace(3), "a must be a tensor; got int"),
        (lambda: sparse.submatrix(A, torch.tensor([1.0])),
         "rows must be int64 (1-d); got float32 of shape (1,)"),
        (lambda: sparse.submatrix(A, [0, 1]), "rows must be a tensor; got list"),
        (lambda: sparse.to_dense(A, 96), "shape must be two integers, (rows, columns); got 96"),
        (lambda: sparse.to_scipy(A.bfloat16()),
         "to_scipy expects float32 or float64, as scipy has no half types; got bfloat16"),
        (lambda: sparse.identity(2.0), "size must be an integer; got 2.0"),
        (lambda: sparse.from_sparse(X),
         "from_sparse expects a sparse tensor of torch; got a dense one: from_dense"),
        (lambda: sparse.from_sparse(X.int().to_sparse()), "float32 or float64; got int32"),
        (lambda: sparse.plan(A, A, max_error="a", drop=1.0), "max_error must be a number"),
    ],
    ValueError: [
        (lambda: mm(bsr([0, 1], [0], (32, 64), (32, 64)), A),
         "a must have square blocks of 32, 64 or 128; got blocks of 32 x 64"),
        (lambda: mm(bsr([0, 1, 1], [0], size=(64, 64)), bsr([0, 1], [0], (64, 64), (64, 64))),
         "a and b must have blocks of one size; got 32 and 64"),
        (lambda: mm(block=128), "block must be that of the matrices, 32; got 128"),
        (lambda: spamm_torch.mm(A, A), "exactly one of tau, valid_ratio and max_error"),
        (lambda: mm(tau=math.nan), "tau must be a number; got nan"),
        (lambda: mm(drop=math.nan), "drop must be at least 0; got nan"),
        (lambda: sparse.from_dense(X, 48), "block must be 32, 64 or 128; got 48"),
        (lambda: sparse.submatrix(A, torch.tensor([96])),
         "rows must be from 0 to 95; got 96 to 96"),
        (lambda: sparse.submatrix(A, torch.tensor([1, 1])), "rows must be distinct; got 2"),
        (lambda: sparse.identity(-3), "size must be at least 0; got -3"),
        (lambda: sparse.plan(A, A, tau=1.0, drop=-1.0), "drop must be at least 0; got -1.0"),
        (
            lambda: sparse.from_sparse(
                torch.sparse_csr_tensor([0, 1], [9], [1.0], size=(1, 3), check_invariants=False)
            ),
            "columns must be from 0 to 2; got 9 to 9",
        ),
        (lambda: sparse.permute(A, torch.full((96,), 5)),
         "order must hold each number from 0 to 95 once"),
    ],
    RuntimeError: [
        (lambda: mm(A, bsr([0, 1], [0], (64, 64), (64, 64))),
         "a's columns must match b's rows; got shapes (96, 96) and (64, 64)"),
        (lambda: mm(A, X[:95]), "got shapes (96, 96) and (95, 96)"),
        (lambda: mm(A, X[0]), "mm expects two matrices (2-d); got shape (96,) for b"),
        (lambda: mm(torch.stack([X, X]).to_sparse_bsr(32)),
         "mm expects block-sparse matrices (2-d); got shape (2, 96, 96) for a"),
        (lambda: mm(A, X.to("meta")), "run on CPUs and CUDA; got b on meta"),
        (lambda: mm(A.detach().requires_grad_()), "have no gradient here: expected"),
        (lambda: mm(A, X.clone().requires_grad_()), "got b, which requires one"),
        (lambda: mm(patterns.matrix("one", 2, 3, 32), A, symmetric=True),
         "a symmetric product must be square; got 2 block rows and 3 block columns"),
        (lambda: mm(norm_b=other_map()), "norm_b must have the pattern of its matrix, "),
        (lambda: spamm_torch.addmm(bsr([0, 1], [0], size=(32, 96)), A, A, tau=1.0),
         "input must have the product's shape (96, 96); got (32, 96)"),
        (
            lambda: spamm_torch.error_bound(
                MAP, spamm_torch.norm_map(patterns.matrix("one", 2, 2, 32)), 1.0
            ),
            "must be (MB, KB) and (KB, NB); got shapes (3, 3) and (2, 2)",
        ),
        (lambda: sparse.from_dense(X[None], 32),
         "from_dense expects a matrix (2-d); got shape (1, 96, 96)"),
        (lambda: sparse.to_dense(A, (97, 96)), "shape must be at most (96, 96); got (97, 96)"),
        (lambda: sparse.from_sparse(torch.ones(2, 2, 2).to_sparse()),
         "from_sparse expects a sparse matrix (2-d); got shape (2, 2, 2)"),
        (lambda: sparse.from_sparse(torch.ones(2, 2).to_sparse(1)), "with 1 dense dimensions"),
        (lambda: sparse.from_sparse(X.to_sparse().requires_grad_()), "have no gradient here"),
        (lambda: sparse.add(A, patterns.matrix("one", 2, 3, 32)),
         "add expects two matrices of one shape; got (96, 96) and (64, 96)"),
        (lambda: sparse.permute(A, torch.arange(64)),
         "a square matrix and an order of its rows; got shape (96, 96) and 64 indices"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "call", "words"), [(kind, *case) for kind, of in CASES.items() for case in of]
)
def test_one_line(kind, call, words):
    refuses(kind, call, words)


BAD_PATTERNS = {
    "unsorted": ([0, 2, 3, 3], [1, 0, 1], "a's block columns must ascend in each block row"),
    "twice": ([0, 2, 3, 3], [0, 0, 1], "a's block columns must ascend in each block row"),
    "behind": ([0, 2, 3, 3], [0, 1, 7], "a's block columns must be from 0 to 2; got 7"),
    "before": ([0, 2, 3, 3], [0, 1, -7], "a's block columns must be from 0 to 2; got -7"),
    "past the end": ([0, 2, 9, 9], [0, 1, 1], "a's row offsets must go from 0 to 3"),
    "descending": ([0, 5, 3, 3], [0, 1, 1], "a's row offsets must ascend to 3"),
}
FUNCTIONS = {
    "add": lambda a: sparse.add(a, A),
    "diagonal": sparse.diagonal,
    "identity": lambda a: sparse.identity(5, like=a),
    "inner": lambda a: sparse.inner(a, A),
    "mm": mm,
    "norm": sparse.norm,
    "permute": lambda a: sparse.permute(a, torch.arange(96)),
    "plan": lambda a: sparse.plan(a, A, tau=1.0),
    "submatrix": lambda a: sparse.submatrix(a, torch.arange(5)),
    "to_dense": sparse.to_dense,
    "to_scipy": sparse.to_scipy,
    "trace": sparse.trace,
    "transpose": sparse.transpose,
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("pattern", BAD_PATTERNS)
def test_bad_patterns(function, pattern):
    crow, col, words = BAD_PATTERNS[pattern]
    if function == "identity":
        words = words.replace("a's", "like's")
    refuses(RuntimeError, lambda: FUNCTIONS[function](bsr(crow, col)), words)


def test_second_operands_and_patterns_that_change():
    for call in (sparse.add, sparse.inner, mm):
        refuses(RuntimeError, lambda call=call: call(A, bsr([0, 2, 2, 2], [1, 0])), "b's block col")
    a = bsr([0, 2, 3, 3], [0, 1, 1])
    assert sparse.trace(a) == 64
    a.col_indices()[1] = 0
    refuses(RuntimeError, lambda: sparse.trace(a), "a's block columns must ascend")


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        (sparse, "mm", "module 'spamm_torch.sparse' has no attribute 'mm': spamm_torch.mm takes"),
        (sparse, "eye", "identity(size)"),
        (sparse, "from_coo", "sparse.from_sparse"),
        (spamm_torch.linalg, "sqrtm", "inverse_sqrt"),
        (spamm_torch.linalg, "density_matrix", "DensitySolver"),
        (spamm_torch, "convert", "convert_(model)"),
        (spamm_torch, "show_config", "build_info()"),
        (sparse, "nothing", "module 'spamm_torch.sparse' has no attribute 'nothing'"),
    ],
)
def test_names_that_are_tried_first(module, name, words):
    refuses(AttributeError, lambda: getattr(module, name), words)
    assert not hasattr(module, name)


def test_no_hint_hides_a_name():
    for name, hints in _hints._HINTS.items():
        assert not set(hints) & set(dir(importlib.import_module(name)))


@pytest.mark.cuda
def test_two_devices():
    words = "must be on the same device; got cpu and cuda:0"
    for call in (lambda: mm(A, A.cuda()), lambda: mm(A, X.cuda()), lambda: sparse.add(A, A.cuda())):
        refuses(RuntimeError, call, words)
    words = "norm_a must be on the operands' device cuda:0; got cpu"
    refuses(RuntimeError, lambda: mm(A.cuda(), A.cuda(), norm_a=MAP), words)


# ---- Plans --------------------------------------------------------------------------------------


def test_plans_of_others_are_refused():
    b = patterns.matrix("banded", 3, 3, 32)
    plan, added = sparse.plan(A, A, tau=1.0), sparse.plan(A, A, tau=1.0, input=A)

    def refused(words, *operands, kind=RuntimeError, **options):
        call = spamm_torch.mm if len(operands) == 2 else spamm_torch.addmm
        refuses(kind, lambda: call(*operands, **options), words)

    stored = f"of the pattern of a: expected {A._nnz()} stored blocks in 3 x 3; got 7 in"
    refused(stored, b, A, plan=plan)
    refused("plan must be of the pattern of b: expected", A, b, plan=plan)
    refused("plan must be of the pattern of input: expected", b, A, A, plan=added)
    refused("plan must be one of addmm, with its input; got another", A, A, A, plan=plan)
    refused("plan must be one of mm, without input; got another", A, A, plan=added)
    refused("plan must have the call's symmetric, True; got", A, A, plan=plan, symmetric=True)
    own = "a plan has its own threshold: expected no tau; got"
    refused(own, A, A, plan=plan, tau=1.0, kind=ValueError)
    refused("plan must be one of spamm_torch.sparse.plan; got int", A, A, plan=1, kind=TypeError)
    turned = patterns.of_blocks(patterns.stored_in(A, 32).mT, A.values())
    refused("3 x 3, in other places", turned, A, plan=plan)
    a = patterns.of_blocks(torch.eye(3).bool(), torch.rand(3, 32, 32))
    plan = sparse.plan(a, a, tau=0.0)
    a.col_indices()[1] = 2
    refused("pattern of a: expected 3 stored blocks in 3 x 3; got 3 in", a, a, plan=plan)


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
        return torch.ops.spamm_torch.bsr_multiply(*(parts | changed).values(), symmetric=symmetric)

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


# ---- Compiled ------------------------------------------------------------------------------------


ops = torch.ops.spamm_torch


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
