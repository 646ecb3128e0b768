"""Arguments that functions of matrices refuse before the first product, and those they take."""

import functools
import math

import numpy as np
import pytest
import torch
from support import (
    one_thread,  # noqa: F401  the fixture is automatic
    refuses,
)

from density.measuring import measure, methods
from density.sources import Problem
from models.files import UserError
from spamm_torch import linalg, sparse

N = 100
CHAIN = torch.diag((-1.0) ** torch.arange(N)).double()
CHAIN += 0.2 * (torch.diag(torch.ones(N - 1), 1) + torch.diag(torch.ones(N - 1), -1))
ABOVE = CHAIN + 5 * torch.eye(N)  # of levels above 0, where those of padding lie below


def ring(sites):
    """Sites with their two neighbours."""
    a = torch.roll(torch.eye(sites, dtype=torch.float64), 1, 0)
    return a + a.mT


FUNCTIONS = {
    "purify": lambda a, **options: linalg.purify(a, N, max_error=1e-8, **options),
    "purify, error": lambda a, **options: linalg.purify(a, N, error=1e-6, **options),
    "inverse_sqrt": lambda a, **options: linalg.inverse_sqrt(a, max_error=1e-9, **options),
    "inverse_factor": lambda a, **options: linalg.inverse_factor(a, max_error=1e-9, **options),
    "sign": lambda a, **options: linalg.sign(a, max_error=1e-9, **options),
    "in_basis": lambda a, **options: linalg.in_basis(a, a, max_error=1e-9, **options),
}
POWERS = {"matrix_power": lambda a, **options: linalg.matrix_power(a, 3, max_error=0.0, **options)}


@pytest.fixture(params=["dense", "block-sparse"])
def put(request):
    """A matrix in a form, and its options; no product may be made of it."""

    def made(a):
        said = {"callback": lambda *_: pytest.fail("a product was made")}
        if request.param == "dense":
            return a, said
        return sparse.from_dense(a, 32), {"size": len(a)} | said

    return made


def with_entry(a, row, column, value):
    a = a.clone()
    a[row, column] = value
    return a


@pytest.mark.parametrize("name", [*FUNCTIONS, *POWERS])
def test_matrices_that_have_no_answer(put, name):
    """The fuzzer draws more of them."""
    nearly = with_entry(ABOVE, 3, 70, 1e-9)
    not_finite = (with_entry(ABOVE, 7, 7, number) for number in (math.nan, math.inf))
    asymmetric = () if name in POWERS else (ABOVE.tril(), nearly, torch.randn(N, N).double())
    for words, matrices in (
        ("expects finite numbers; got NaN or inf", not_finite),
        ("expects a symmetric matrix; got norm(A - A^T) = ", asymmetric),
    ):
        for given, options in map(put, matrices):
            call = functools.partial((FUNCTIONS | POWERS)[name], given, **options)
            refuses(ValueError, call, words)
    words = "in_basis expects finite numbers; got NaN or infinity in z"
    z = with_entry(ABOVE, 3, 4, math.nan)
    refuses(ValueError, lambda: linalg.in_basis(ABOVE, z, max_error=0.0), words)


@pytest.mark.parametrize("name", ["purify", "inverse_sqrt", "inverse_factor", "sign"])
def test_padding_without_a_size(name):
    given = sparse.from_dense(ABOVE, 32)
    words = f"got 28 among 128, which would count as states: give size={N}"
    refuses(ValueError, lambda: FUNCTIONS[name](given), words)
    words = "rows of a behind size=97 must be 0; got another in row 99"
    refuses(ValueError, lambda: FUNCTIONS[name](given, size=97), words)
    padded = sparse.to_dense(FUNCTIONS[name](given, size=N).matrix)
    assert not padded[N:].any()
    assert not padded[:, N:].any()
    whole = torch.block_diag(ABOVE, torch.eye(28).double())
    assert FUNCTIONS[name](sparse.from_dense(whole, 32)).matrix.shape == (128, 128)


def test_products_that_padding_does_not_matter_to():
    given = sparse.from_dense(ABOVE, 32)
    found = linalg.in_basis(given, given, max_error=0.0).matrix
    torch.testing.assert_close(sparse.to_dense(found, (N, N)), ABOVE @ ABOVE @ ABOVE)
    assert linalg.matrix_power(given, 2, max_error=0.0).matrix.shape == (128, 128)
    words = f"give size={N}"
    refuses(ValueError, lambda: linalg.matrix_power(given, 0, max_error=0.0), words)


def test_asymmetry_by_rounding_is_in_the_bound():
    a = with_entry(ABOVE, 3, 4, ABOVE[3, 4] + 1e-12)
    for name in ("inverse_factor", "inverse_sqrt"):
        exact, found = (FUNCTIONS[name](x) for x in (ABOVE, a))
        assert found.total_bound > exact.total_bound
    exact, found = (FUNCTIONS["purify"](x) for x in (ABOVE, a))
    assert torch.equal(found.matrix, found.matrix.mT)
    assert found.total_bound > exact.total_bound
    assert torch.linalg.vector_norm(exact.matrix - found.matrix) <= found.total_bound


# ---- Nothing that is wrong ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "s",
    [torch.zeros(64, 64), -torch.eye(64), torch.eye(64).index_fill(0, torch.tensor(5), 0)],
    ids=["zero", "negative", "singular"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["inverse_sqrt", "inverse_factor"])
@pytest.mark.parametrize("max_error", [0.0, 1e-4, 1e-10])
def test_overlaps_that_have_no_inverse(s, dtype, name, max_error):
    whole, function = torch.block_diag(torch.eye(64), s).to(dtype), getattr(linalg, name)
    for a, options in ((whole, {}), (sparse.from_dense(whole, 32), {"size": 128})):
        with pytest.raises(linalg.NotConverged, match="expected a positive definite matrix"):
            function(a, max_error=max_error, **options)


def test_states_that_have_no_gap():
    """Rings with two states at the Fermi level, levels of four states each, cut in half, and all
    states but one at a level.
    """
    q = torch.linalg.qr(torch.randn(N, N, generator=torch.Generator().manual_seed(0)).double())[0]
    levels = (q * torch.arange(25.0).double().repeat_interleave(4)) @ q.mT
    complete = torch.eye(N).double() - 1
    for h in (ring(N), -ring(N), (levels + levels.mT) / 2, complete):
        for options in ({"max_error": 1e-8}, {"schedule": linalg.loose_then_tight(1e-7)}):
            with pytest.raises(linalg.NotConverged, match=f"a gap above the {N // 2} occ"):
                linalg.purify(h, N, **options)
    of = Problem("ring", ring(8), 8, 8), methods([1e-9], None, 4)
    with pytest.raises(UserError, match=r"a gap above the 4 occupied states; got"):
        measure(ring(8), *of, repeats=1, block=32, progress=print)


def test_a_power_of_one_is_a_copy():
    for a in (ABOVE, sparse.from_dense(ABOVE, 32)):
        found = linalg.matrix_power(a, 1, max_error=0.0).matrix
        values = (a, found) if a is ABOVE else (a.values(), found.values())
        assert torch.equal(*values)
        assert values[0].data_ptr() != values[1].data_ptr()


@pytest.mark.parametrize(("scale", "power"), [(1e99, 6), (1e149, 7), (1e-149, 7)])
def test_bounds_where_powers_overflow(scale, power):
    a = torch.randn(34, 34, generator=torch.Generator().manual_seed(0)).double() * scale
    found = linalg.matrix_power(a, power, max_error=1e-3)
    assert not math.isnan(found.error_bound)
    assert not math.isnan(found.total_bound)
    assert found.matrix.isfinite().all() or found.total_bound == math.inf


def test_another_default_device():
    torch.set_default_device("meta")
    try:
        found = [function(ABOVE).matrix for function in (FUNCTIONS | POWERS).values()]
        found.append(linalg.matrix_power(ABOVE, 0, max_error=0.0).matrix)
        n = len(ABOVE)  # arrays of numpy have no device
        solver = linalg.DensitySolver(np.eye(n), positions=np.arange(3.0 * n).reshape(n, 3))
        assert abs(solver(np.diag(np.arange(1.0 * n)), 2).density.trace() - 2) < 1e-8
    finally:
        torch.set_default_device(None)
    assert {x.device.type for x in found} == {"cpu"}
