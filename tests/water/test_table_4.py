"""What Table 4 measures: squares of a cluster's matrices, their errors, what is skipped."""

import pytest
import torch

import spamm_torch
from models.errors import UserError
from models.water import matrices
from models.water.matrices import load
from models.water.model import model_density, model_fock, overlap, water_cluster
from tables import table_4

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(table_4, "MODELS", dict.fromkeys(("cpu", "cuda"), (8, "STO-3G")))


def test_matrices_are_those_of_the_source(device):
    embedded, model = table_4.sources(CPU)
    assert (embedded.waters, model.waters) == (36, 8)
    known = load()
    for name in matrices.MATRICES:
        found = table_4.matrix_of(embedded, name, device)
        assert found.device.type == device.type
        assert torch.equal(found.cpu(), getattr(known, name))
    cluster = water_cluster(8)
    s = overlap(cluster, "STO-3G")
    assert torch.equal(table_4.matrix_of(model, "overlap", CPU), s)
    assert torch.equal(table_4.matrix_of(model, "fock", CPU), model_fock(cluster, "STO-3G", s))
    density = table_4.matrix_of(model, "density", CPU)
    assert (density * s).sum().item() == pytest.approx(80)
    with pytest.raises(RuntimeError, match="ergo made those in data/ergo"):
        table_4.matrix_of(model, "core_hamiltonian", CPU)


def test_the_density_of_a_fock_matrix_is_ergos():
    known = load()
    found = model_density(known.fock, known.overlap, known.electrons)
    torch.testing.assert_close(found, known.density, rtol=0, atol=1e-5)
    twice = found @ known.overlap @ found
    torch.testing.assert_close(twice, 2 * found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("precision", table_4.PRECISIONS)
@pytest.mark.parametrize("name", matrices.MATRICES)
def test_errors_and_bounds(device, precision, name):
    a = table_4.matrix_of(table_4.sources(device)[0], name, device)
    rows = table_4.measure(a, precision, 1)
    places = [(row["block"], row["tau"]) for row in rows]
    assert places == [(block, tau) for block in (32, 64) for tau in (1e-10, 1e-8, 1e-6, 1e-4, 1e-2)]
    rounded = a.to(getattr(torch, precision))
    exact = rounded.double() @ rounded.double()
    for row in rows:
        norms = spamm_torch.norm_map(rounded, row["block"]).double()
        kept = ~(norms[:, :, None] * norms[None] < row["tau"])
        assert row["valid_ratio"] == pytest.approx(kept.double().mean().item())
        found = spamm_torch.mm(rounded, rounded, tau=row["tau"], block=row["block"])
        assert row["error"] == pytest.approx((found.double() - exact).norm().item(), rel=1e-6)
        assert row["norm"] == pytest.approx(exact.norm().item())
        assert row["speedup"] == pytest.approx(row["dense_ms"] / row["ms"])
        assert row["speedup_unskipped"] == pytest.approx(row["unskipped_ms"] / row["ms"])
        if precision == "float64":
            assert row["error"] <= row["bound"] + 1e-12 * row["norm"]
    assert any(0 < row["valid_ratio"] < 1 for row in rows)


def test_a_wrong_product_is_refused(monkeypatch):
    wrong = spamm_torch.mm
    monkeypatch.setattr(spamm_torch, "mm", lambda a, b, **rest: 1.01 * wrong(a, b, **rest))
    with pytest.raises(UserError, match=r"wrong result in float64, block 32, tau 1e-10: .*; got"):
        table_4.measure(load().overlap, "float64", 1)
