"""Driving ergo: what comes back, and one line for whatever goes wrong."""

import shutil
import warnings

import fake_ergo
import numpy as np
import pytest
import torch

import make_ergo_matrices
from common.console import exit_code
from models.errors import UserError
from models.water import matrices, program
from models.water.geometry import water_cluster
from models.water.matrices import load

needs_ergo = pytest.mark.skipif(shutil.which("ergo") is None, reason="needs the program ergo")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    return fake_ergo.install(tmp_path, monkeypatch)


def run(**options):
    return program.run(water_cluster(1), "STO-3G", **options)


def assert_is_embedded(found, tolerance):
    """That an ErgoRun is what is embedded for one water in STO-3G."""
    known = load("water STO-3G")
    for name in matrices.MATRICES:
        difference = np.abs(getattr(found, name) - getattr(known, name).numpy()).max()
        assert difference <= tolerance * getattr(known, name).abs().max(), name
    assert found.energy == pytest.approx(known.energy, abs=tolerance)
    assert found.order.tolist() == known.ergo_order.tolist()


def test_files_come_back_in_the_clusters_order(fake):
    told = []
    found = run(progress=told.append)
    assert_is_embedded(found, 1e-9)
    assert found.cycles == 8
    assert found.version == "3.8"
    assert told == ["cycle 1: -70.1 hartree", "cycle 2: -74.9 hartree"]
    assert found.order.tolist() != list(range(7))  # or nothing was put in order


def test_without_scf_ergo_is_ended_when_both_matrices_are_there(fake):
    fake.path("F_matrix_8.mtx").unlink()
    fake.path("D_matrix_7.mtx").unlink()
    fake.then("time.sleep(600)")
    found = run(scf=False)
    assert found.fock is found.density is found.energy is found.cycles is None
    assert torch.from_numpy(found.core_hamiltonian).allclose(
        load("water STO-3G").core_hamiltonian, atol=1e-8
    )


@needs_ergo
def test_ergo_itself():
    assert_is_embedded(run(), 1e-6)


def without_convergence(fake):
    fake.edit("ergoscf.out", "RESC CONVERGED after   8 iterations.", "INSC cycle 100")
    fake.edit("ergoscf.out", "RESC FINAL", "ERSC max number of iterations reached\nINSC")


def fock(change):
    """A change of the text of the Fock matrix."""

    def apply(fake):
        path = fake.path("F_matrix_8.mtx")
        path.write_bytes(change(path.read_bytes()))

    return apply


def head(lines):
    return fock(lambda text: b"\n".join(text.splitlines()[:lines]))


def written(name, matrix):
    return lambda fake: fake_ergo.write_matrix(fake.path(name), matrix)


def places(text):
    return lambda fake: fake.path("basis_func_coords.m").write_text(f"x = [\n{text}\n];\n")


def missing(name):
    return lambda fake: fake.path(name).unlink()


def edited(*change):
    return lambda fake: fake.edit(*change)


DAMAGED = "{}; it is damaged".format
OTHER_SIZE = "expected 7 functions in H_core_matrix.mtx of ergo; got 6"
BAD = [
    (without_convergence, "ergo's SCF to converge.*max number of iterations reached"),
    (missing("ergoscf.out"), "ergo's SCF to converge.*no log"),
    (missing("D_matrix_7.mtx"), "D_matrix_7.mtx; there is no such file"),
    (fock(lambda text: text[: len(text) // 2]), DAMAGED("F_matrix_8.mtx")),
    (head(3), DAMAGED("F_matrix_8.mtx")),  # no entry
    (head(2), DAMAGED("F_matrix_8.mtx")),  # comments alone
    (fock(lambda text: text + b"\xff\xfe"), DAMAGED("F_matrix_8.mtx")),
    (edited("S_matrix.mtx", "2 1 ", "2 1 nan\n%"), DAMAGED("S_matrix.mtx")),
    (edited("H_core_matrix.mtx", "\n2 1 ", "\n8 1 "), DAMAGED("H_core_matrix.mtx")),
    (edited("S_matrix.mtx", "symmetric", "general"), "S_matrix.mtx to open with"),
    (written("H_core_matrix.mtx", np.eye(6)), OTHER_SIZE),
    (written("S_matrix.mtx", np.eye(7)), "expected ergo's overlaps to be exact"),
    (missing("basis_func_coords.m"), "expected ergo to write basis_func_coords.m"),
    (places("\n".join(["0 0 9"] * 7)), "basis_func_coords.m; got other places"),
    (places("no numbers here"), "cannot read basis_func_coords.m"),
    (lambda fake: fake.then(fake_ergo.KILLED), "signal 9 ended it"),
]


@pytest.mark.parametrize(("change", "line"), BAD, ids=range(len(BAD)))
def test_what_goes_wrong_is_one_line(fake, change, line):
    change(fake)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a second line on the terminal
        with pytest.raises(UserError, match=line) as raised:
            run()
    assert "\n" not in str(raised.value)


def test_ergo_fails_before_the_matrices(fake):
    fake.path("ergoscf.out").write_text("ERIN error opening file 'STO-3G'\n")
    with pytest.raises(UserError, match=r"S and H_core; it failed: error opening file 'STO-3G'$"):
        run(scf=False)


def test_no_ergo(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    out = tmp_path / "out"
    assert exit_code(lambda: make_ergo_matrices.main(["--out", str(out)])) == 1
    assert capsys.readouterr().err.startswith("error: expected the program ergo on PATH")
    assert not out.exists()


@pytest.mark.parametrize("scf", [True, False])
def test_the_command_writes_a_file(fake, tmp_path, scf):
    arguments = ["--waters", "1", "--basis", "STO-3G", "--out", str(tmp_path / "out")]
    make_ergo_matrices.main(arguments if scf else [*arguments, "--no-scf"])
    found = matrices.read(tmp_path / "out" / "waters_1_sto-3g.npz")
    known = load("water STO-3G")
    assert found.core_hamiltonian.allclose(known.core_hamiltonian, atol=1e-8)
    if scf:
        assert found.density.allclose(known.density, atol=1e-8)
        assert found.energy == known.energy
    else:
        assert found.fock is found.density is found.energy is None


def test_the_command_leaves_nothing_behind_a_failure(fake, tmp_path):
    fake.path("D_matrix_7.mtx").unlink()
    arguments = ["--waters", "1", "--basis", "STO-3G", "--out", str(tmp_path / "out")]
    assert exit_code(lambda: make_ergo_matrices.main(arguments)) == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_bad_options(capsys):
    for arguments in (["--waters", "0"], ["--basis", "6-31++G"], ["--seed", "-1"]):
        with pytest.raises(SystemExit):
            make_ergo_matrices.parse(arguments)
        assert "got" in (error := capsys.readouterr().err) or "invalid choice" in error
