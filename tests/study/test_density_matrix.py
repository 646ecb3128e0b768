"""The command examples/density_matrix.py: a small real run, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch
from processes import forked, python
from study_tools import assert_rows

import density_matrix
from common import results
from density import sources
from models.water import matrices
from models.water.overlap import BASES

SCRIPT = Path(density_matrix.__file__)


def solve(folder, *arguments, ranks=1):
    """The record of a run, and the density matrix that it writes."""
    path, given = folder / "density.npz", ("--device", "cpu", "--repeats", 1, *arguments)
    given = [str(argument) for argument in (*given, "--out", folder, "--density", path)]
    if ranks > 1:
        run = forked(SCRIPT, *given, ranks=ranks, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        assert run.returncode == 0, run.stderr
    else:
        density_matrix.main(given)
    [run] = results.load(folder / "density_matrix.json")["runs"]
    return run, torch.from_numpy(np.load(path)["density"])


def test_the_numbers(tmp_path):
    """A run over a chain, with two budgets."""
    run, _ = solve(tmp_path, "--chain", 200, "--max-errors", 1e-8, 1e-6)
    sizes = {"functions": 200, "electrons": 200, "atoms": 200, "block": 32}
    assert sizes.items() <= run["header"].items()
    assert (
        "examples/density_matrix.py --device cpu --repeats 1 --chain 200"
        in (run["header"]["command"])
    )
    assert_rows(run["tables"])
    methods, steps = run["tables"]["density matrix"], {}
    for row in run["tables"]["density matrix, iterations"]:
        steps.setdefault(row["method"], []).append(row)
    text = (tmp_path / "density_matrix.md").read_text()
    for method in methods:
        of_method = steps.get(method["method"], [])
        assert len(of_method) == method["iterations"]
        bounds = {row["max_error"] for row in of_method}
        if method["series"] == "constant":
            assert bounds == {method["max_error"]}
        if method["series"] in ("scheduled", "float32 first"):
            assert bounds == {method["max_error"], method["first_max_error"]}
            assert abs(method["energy_error"]) < 3 * method["max_error"]
            assert method["most_valid"] == max(row["valid_ratio"] for row in of_method)
            assert [row["precision"] for row in of_method[-4:]] == ["float64"] * 4
        first = {row["precision"] for row in of_method[:-4]}
        assert method["series"] != "float32 first" or first == {"float32"}
        assert method["energy_error"] == (method["energy"] - methods[0]["energy"]) / 200
        begin = f"| Chain of 200 sites, gap 0.2 | {method['method']} | {method['seconds']:.4g} | "
        assert begin in text
    assert methods[0]["series"] == "eigh"
    assert "| float32 1.6e-6, last four float64 1e-8 |" in text


def test_the_density_matrix_of_real_matrices(tmp_path, capsys):
    """In the given basis, as ergo's own, whose last cycle stopped before 1e-4."""
    _, found = solve(tmp_path, "--ergo", "--max-errors", "1e-9")
    assert "the given density matrix differs by" in capsys.readouterr().out
    problem = sources.embedded("default")
    expected = problem.density
    assert torch.linalg.vector_norm(found - expected) < 1e-4 * torch.linalg.vector_norm(expected)
    assert (found * problem.overlap).sum().item() == pytest.approx(problem.electrons, abs=1e-6)


@pytest.mark.parametrize("source", [("--waters", "20"), ("--ergo", "water 6-31G")])
def test_block_sparse_matrices(source, tmp_path):
    """The same problem, whole and in blocks: the same energies, and the same density matrix."""
    densities = []
    for storage in ("--sparse", "--no-sparse"):
        run, density = solve(tmp_path, *source, "--max-errors", "1e-9", storage)
        densities.append(density)
        rows = {row["series"]: row for row in run["tables"]["density matrix"]}
        assert ("dense storage" in rows) == (storage == "--sparse")
        assert abs(rows["float32 first"]["energy_error"]) < 3e-9
        assert rows["float32 first"]["idempotency"] < 1e-5
    torch.testing.assert_close(*densities, rtol=0, atol=1e-4)


def test_shards_over_processes(tmp_path):
    """From S and F to the density matrix, which has the bits of one process."""
    densities, methods = [], []
    for processes in (1, 2):
        given = ("--waters", "40", "--sparse", "--max-errors", "1e-8")
        run, density = solve(tmp_path, *given, ranks=processes)
        assert run["header"]["processes"] == processes
        densities.append(density)
        methods.append(run["tables"]["density matrix"])
    assert torch.equal(*densities)
    for one, two in zip(*methods, strict=True):
        for name in ("energy", "idempotency", "electron_error", "iterations"):
            assert two[name] == pytest.approx(one[name], rel=1e-9, abs=1e-9), (one["method"], name)


def test_large_matrices_are_block_sparse():
    for words, sparse, block, without in (
        (("--chain", "9998"), False, 32, 0),
        (("--chain", "10000"), True, 64, 3),
        (("--chain", "10000", "--no-sparse"), False, 32, 0),
        (("--chain", "10", "--sparse", "--block", "128"), True, 128, 0),
    ):
        options = density_matrix.parse(["--device", "cpu", *words])
        density_matrix.decide(options, options.chain)
        assert (options.sparse, options.block, len(options.without)) == (sparse, block, without)


def test_it_runs_with_torch_alone(tmp_path):
    """Without numpy and matplotlib, as after pip install: no picture."""
    code = (
        "import sys, runpy; sys.modules |= dict.fromkeys(('numpy', 'matplotlib')); "
        f"sys.argv[0] = {str(SCRIPT)!r}; sys.path[0] = {str(SCRIPT.parent)!r}; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    arguments = ("--device", "cpu", "--chain", 64, "--repeats", 1, "--out", tmp_path)
    run = python("-W", "ignore", "-c", code, *arguments, OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stderr
    assert "no picture: matplotlib is not installed" in run.stdout
    assert "float32 5e-7, last four float64 1e-9" in run.stdout
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"density_matrix.json", "density_matrix.md"}
    assert "png" not in (tmp_path / "density_matrix.md").read_text()
    assert results.load(tmp_path / "density_matrix.json")["runs"]


def test_matrices_of_ergo_and_of_a_model():
    problem, of = sources.embedded("default"), matrices.load("default")
    assert torch.equal(problem.fock, of.fock)
    assert torch.equal(problem.overlap, of.overlap)
    assert (problem.electrons, problem.atoms) == (of.electrons, of.atoms)
    problem = sources.waters(4, "STO-3G", 0)
    assert (problem.atoms, problem.electrons, len(problem.fock)) == (12, 40, 28)
    assert tuple(BASES) == sources.BASES
