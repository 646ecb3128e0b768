"""Bad input of block-sparse functions: one line, with what was expected and what came."""

import math

import block_patterns as patterns
import pytest
import torch

import spamm_torch
from spamm_torch import sparse

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
    "csr": (
        lambda: mm(X.to_sparse_csr()),
        TypeError,
        "expects dense or sparse_bsr; got sparse_csr: a.to_sparse_bsr(64), or call to_dense()",
    ),
    "coo beside bsr": (
        lambda: mm(A, X.to_sparse()),
        TypeError,
        "got sparse_coo: b.to_sparse_bsr(64)",
    ),
    "columns of blocks": (lambda: mm(A, X.to_sparse_bsc(32)), TypeError, "got sparse_bsc: b."),
    "oblong blocks": (
        lambda: mm(bsr([0, 1], [0], (32, 64), (32, 64)), A),
        ValueError,
        "a must have square blocks of 32, 64 or 128; got blocks of 32 x 64",
    ),
    "small blocks": (lambda: mm(X.to_sparse_bsr(16)), ValueError, "got blocks of 16 x 16"),
    "two blocks": (
        lambda: mm(A, bsr([0, 1], [0], (64, 64), (64, 64))),
        RuntimeError,
        "a's columns must match b's rows; got shapes (96, 96) and (64, 64)",
    ),
    "blocks that differ": (
        lambda: mm(bsr([0, 1, 1], [0], size=(64, 64)), bsr([0, 1], [0], (64, 64), (64, 64))),
        ValueError,
        "a and b must have blocks of one size; got 32 and 64",
    ),
    "another block": (
        lambda: mm(block=128),
        ValueError,
        "block must be that of the matrices, 32; got 128",
    ),
    "unsorted columns": (
        lambda: mm(bsr([0, 2, 2, 2], [1, 0])),
        RuntimeError,
        "a's block columns must ascend in each block row, each once; got 1 before 0",
    ),
    "repeated columns": (
        lambda: mm(A, bsr([0, 0, 2, 2], [1, 1])),
        RuntimeError,
        "b's block columns must ascend in each block row, each once; got 1 before 1",
    ),
    "columns outside": (
        lambda: mm(bsr([0, 1, 1, 1], [3])),
        RuntimeError,
        "a's block columns must be from 0 to 2; got 3 in block row 0",
    ),
    "offsets": (
        lambda: mm(bsr([0, 2, 1, 1], [0])),
        RuntimeError,
        "a's row offsets must ascend to 1; got",
    ),
    "last offset": (
        lambda: mm(bsr([0, 0, 0, 2], [0])),
        RuntimeError,
        "a's row offsets must go from 0 to 1, its stored blocks; got 0 to 2",
    ),
    "dtypes": (
        lambda: mm(A, A.float()),
        TypeError,
        "a and b must have one dtype; got float64 and float32",
    ),
    "integers": (
        lambda: mm(bsr([0, 1, 1, 1], [0], dtype=torch.int32)),
        TypeError,
        "a must be float16, bfloat16, float32 or float64; got int32",
    ),
    "shapes": (
        lambda: mm(A, patterns.matrix("one", 2, 3, 32)),
        RuntimeError,
        "a's columns must match b's rows; got shapes (96, 96) and (64, 96)",
    ),
    "dense shapes": (lambda: mm(A, X[:95]), RuntimeError, "got shapes (96, 96) and (95, 96)"),
    "a vector": (
        lambda: mm(A, X[0]),
        RuntimeError,
        "mm expects two matrices (2-d); got shape (96,) for b",
    ),
    "a batch": (
        lambda: mm(torch.stack([X, X]).to_sparse_bsr(32)),
        RuntimeError,
        "mm expects block-sparse matrices (2-d); got shape (2, 96, 96) for a",
    ),
    "meta": (lambda: mm(A, X.to("meta")), RuntimeError, "run on CPUs and CUDA; got b on meta"),
    "gradient": (
        lambda: mm(A.detach().requires_grad_()),
        RuntimeError,
        "have no gradient here: expected",
    ),
    "dense gradient": (
        lambda: mm(A, X.clone().requires_grad_()),
        RuntimeError,
        "got b, which requires one",
    ),
    "no knob": (
        lambda: spamm_torch.mm(A, A),
        ValueError,
        "exactly one of tau, valid_ratio and max_error",
    ),
    "two knobs": (lambda: mm(max_error=1.0), ValueError, "got tau and max_error"),
    "nan": (lambda: mm(tau=math.nan), ValueError, "tau must be a number; got nan"),
    "negative drop": (lambda: mm(drop=-1.0), ValueError, "drop must be at least 0; got -1.0"),
    "nan drop": (lambda: mm(drop=math.nan), ValueError, "drop must be at least 0; got nan"),
    "no number": (lambda: mm(drop="a"), TypeError, "drop must be a number; got 'a'"),
    "out": (lambda: mm(out=X), TypeError, "mm of block-sparse matrices takes no out; got one"),
    "devices": (lambda: mm(devices=[0]), TypeError, "takes no devices; got one"),
    "drop of dense": (
        lambda: mm(X, X, drop=1.0),
        TypeError,
        "drop is for sparse_bsr operands; got dense ones",
    ),
    "drop of mixed": (
        lambda: mm(A, X, drop=1.0),
        TypeError,
        "for a sparse_bsr result; got a dense one",
    ),
    "plan of dense": (
        lambda: spamm_torch.addmm(X, X, X, tau=1.0, plan=1),
        TypeError,
        "plan is for sparse_bsr",
    ),
    "no square": (
        lambda: mm(patterns.matrix("one", 2, 3, 32), A, symmetric=True),
        RuntimeError,
        "a symmetric product must be square; got 2 block rows and 3 block columns",
    ),
    "dense map": (
        lambda: mm(norm_a=MAP.to_dense()),
        TypeError,
        "mm expects two dense norm maps, or two of sparse_bsr matrices",
    ),
    "map of another": (
        lambda: mm(norm_b=other_map()),
        RuntimeError,
        "norm_b must have the pattern of its matrix, ",
    ),
    "map of another type": (
        lambda: mm(norm_a=MAP.float()),
        TypeError,
        "norm_a must be float64 for float64 operands; got float32",
    ),
    "dense input": (
        lambda: spamm_torch.addmm(X, A, A, tau=1.0),
        TypeError,
        "expects an input that is sparse_bsr, as the result is; got one that is dense",
    ),
    "sparse input": (
        lambda: spamm_torch.addmm(A, X, A, tau=1.0),
        TypeError,
        "an input that is dense",
    ),
    "input's shape": (
        lambda: spamm_torch.addmm(bsr([0, 1], [0], size=(32, 96)), A, A, tau=1.0),
        RuntimeError,
        "input must have the product's shape (96, 96); got (32, 96)",
    ),
    "input's dtype": (
        lambda: spamm_torch.addmm(A.float(), A, A, tau=1.0),
        TypeError,
        "input and the operands must have one dtype",
    ),
    "mixed maps": (
        lambda: spamm_torch.find_tau(MAP, MAP.to_dense(), 0.5),
        TypeError,
        "got strided for norm_b",
    ),
    "maps' shapes": (
        lambda: spamm_torch.error_bound(
            MAP, spamm_torch.norm_map(patterns.matrix("one", 2, 2, 32)), 1.0
        ),
        RuntimeError,
        "must be (MB, KB) and (KB, NB); got shapes (3, 3) and (2, 2)",
    ),
    "maps' types": (
        lambda: spamm_torch.valid_ratio(MAP, other_map(torch.float32), 1.0),
        TypeError,
        "norm_a and norm_b must have one dtype; got float64 and float32",
    ),
    "edge": (lambda: sparse.from_dense(X, 48), ValueError, "block must be 32, 64 or 128; got 48"),
    "cube": (
        lambda: sparse.from_dense(X[None], 32),
        RuntimeError,
        "from_dense expects a matrix (2-d); got shape (1, 96, 96)",
    ),
    "sparse from dense": (
        lambda: sparse.from_dense(A),
        TypeError,
        "a must be a dense (strided) tensor",
    ),
    "no scipy": (
        lambda: sparse.from_scipy(X),
        TypeError,
        "from_scipy expects a sparse matrix of scipy; got Tensor",
    ),
    "dense transpose": (
        lambda: sparse.transpose(X),
        TypeError,
        "expects sparse_bsr; got a dense tensor for a: spamm_torch.sparse.from_dense(a, 64)",
    ),
    "no tensor": (lambda: sparse.trace(3), TypeError, "a must be a tensor; got int"),
    "crop": (
        lambda: sparse.to_dense(A, (97, 96)),
        RuntimeError,
        "shape must be at most (96, 96); got (97, 96)",
    ),
    "sum of two shapes": (
        lambda: sparse.add(A, patterns.matrix("one", 2, 3, 32)),
        RuntimeError,
        "add expects two matrices of one shape; got (96, 96) and (64, 96)",
    ),
    "sum of two types": (
        lambda: sparse.add(A, A.float()),
        TypeError,
        "a and b must have one dtype",
    ),
    "no index": (
        lambda: sparse.submatrix(A, torch.tensor([96])),
        ValueError,
        "rows must be from 0 to 95; got 96 to 96",
    ),
    "two of one index": (
        lambda: sparse.submatrix(A, torch.tensor([1, 1])),
        ValueError,
        "rows must be distinct; got 2",
    ),
    "floats": (
        lambda: sparse.submatrix(A, torch.tensor([1.0])),
        TypeError,
        "rows must be int64 (1-d); got float32 of shape (1,)",
    ),
    "short order": (
        lambda: sparse.permute(A, torch.arange(64)),
        RuntimeError,
        "a square matrix and an order of its rows; got shape (96, 96) and 64 indices",
    ),
    "no order": (
        lambda: sparse.permute(A, torch.full((96,), 5)),
        ValueError,
        "order must hold each number from 0 to 95 once",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line(name):
    call, kind, words = CASES[name]
    with pytest.raises(kind) as caught:
        call()
    line = str(caught.value).partition("\nException raised from")[0]
    assert words in line
    assert "\n" not in line


@pytest.mark.cuda
def test_two_devices():
    words = r"must be on the same device; got cpu and cuda:0"
    for call in (lambda: mm(A, A.cuda()), lambda: mm(A, X.cuda()), lambda: sparse.add(A, A.cuda())):
        with pytest.raises(RuntimeError, match=words):
            call()
    with pytest.raises(
        RuntimeError, match=r"norm_a must be on the operands' device cuda:0; got cpu"
    ):
        mm(A.cuda(), A.cuda(), norm_a=MAP)


# ---- Plans --------------------------------------------------------------------------------------


def refuses(words, *operands, kind=RuntimeError, **options):
    call = spamm_torch.mm if len(operands) == 2 else spamm_torch.addmm
    with pytest.raises(kind) as caught:
        call(*operands, **options)
    assert words in str(caught.value)


def test_plans_of_others_are_refused():
    b = patterns.matrix("banded", 3, 3, 32)
    plan, added = sparse.plan(A, A, tau=1.0), sparse.plan(A, A, tau=1.0, input=A)
    stored = f"of the pattern of a: expected {A._nnz()} stored blocks in 3 x 3; got 7 in"
    refuses(stored, b, A, plan=plan)
    refuses("plan must be of the pattern of b: expected", A, b, plan=plan)
    refuses("plan must be of the pattern of input: expected", b, A, A, plan=added)
    refuses("plan must be one of addmm, with its input; got another", A, A, A, plan=plan)
    refuses("plan must be one of mm, without input; got another", A, A, plan=added)
    refuses("plan must have the call's symmetric, True; got", A, A, plan=plan, symmetric=True)
    own = "a plan has its own threshold: expected no tau; got"
    refuses(own, A, A, plan=plan, tau=1.0, kind=ValueError)
    refuses("plan must be one of spamm_torch.sparse.plan; got int", A, A, plan=1, kind=TypeError)
    turned = patterns.of_blocks(patterns.stored_in(A, 32).mT, A.values())
    refuses("3 x 3, in other places", turned, A, plan=plan)


def test_the_op_refuses_lists_that_lead_elsewhere():
    """What Python never passes: nothing is read or written outside of the matrices."""
    upper = torch.ones(3, 3).triu().bool()
    a = patterns.of_blocks(upper, torch.rand(6, 32, 32, dtype=torch.float64))
    plan = sparse.plan(a, a, tau=0.0)
    crow, col, values = a.crow_indices(), a.col_indices(), a.values()

    def multiply(**changed):
        parts = dict(zip(("crow", "col", "first", "slots_a", "slots_b"), plan[5:], strict=True))
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
