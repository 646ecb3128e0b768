"""reproduce.py: small real runs of its tables, how they go on, and what they refuse."""

from functools import partial

import pytest
import torch
from study_tools import digits, write_part

import reproduce
import spamm_torch
from common import results
from common.console import exit_code
from common.measuring import cell
from common.operands import operands
from models.data import ROOT_VARIABLE
from models.vgg13 import CONVOLUTIONS
from tables import paper, table_1, table_2, table_3, table_4, table_5
from tables.table_5 import Group

SIZES = (128, 100)
GROUPS = {
    group.title: group
    for group in (
        Group("conv31", ("conv31",), "conv31", (0.7436, 0.4338)),
        Group("all", CONVOLUTIONS[8:], "conv51", (0.85,)),
        Group("conv31, images shifted", ("conv31",), "conv31", (0.4338,), shifted=True),
    )
}


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    root = tmp_path_factory.mktemp("mnist")
    write_part(root, "t10k", *digits(100))
    return root


@pytest.fixture(scope="module")
def arguments(mnist):
    """Of a run on tiny matrices, a tiny network and tiny images, without --out."""
    given = ("--device", "cpu", "--sizes", *SIZES, "--repeats", 1, "--data", mnist)
    given += ("--checkpoint", mnist / "c.pt", "--width", 2, "--epochs", 1, "--batch", 10)
    return [str(argument) for argument in given]


@pytest.fixture(autouse=True, scope="module")
def small():
    """What does not shrink by options: bandwidth's copy, a model cluster, and VGG13's groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_2, "copy_bandwidth", lambda device, repeats: 1e7)
        patch.setattr(table_4, "MODELS", {"cpu": (8, "STO-3G")})
        patch.setattr(table_5, "GROUPS", GROUPS)
        patch.delenv(ROOT_VARIABLE, raising=False)
        yield


@pytest.fixture(scope="module")
def folder(arguments, tmp_path_factory):
    """All tables by one command."""
    folder = tmp_path_factory.mktemp("tables") / "with space"
    reproduce.main(["all", *arguments, "--out", str(folder)])
    return folder


def tables_of(folder, number, name="cpu"):
    page = results.load(folder / "tables.json")
    [run] = [run for run in page["runs"] if run["name"] == f"table_{number}_{name}"]
    return run["tables"]


def measured(rows, **place):
    """The rows with figures that have these values."""
    return [row for row in rows if not row.get("absent") and place.items() <= row.items()]


def run(capsys, *arguments):
    code = exit_code(lambda: reproduce.main([str(argument) for argument in arguments]))
    captured = capsys.readouterr()
    return code, captured.out.replace("\n", ""), captured.err.splitlines()


# ---- A whole run --------------------------------------------------------------------------------


def test_all_tables_are_on_a_page(folder):
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["tables.json", "tables.md", "tables.png"]
    page = results.load(folder / "tables.json")
    assert [run["name"] for run in page["runs"]] == [f"table_{n}_cpu" for n in reproduce.TABLES]
    text = " ".join((folder / "tables.md").read_text().split())
    for run in page["runs"]:
        assert run["said"] in text
        assert " all --device cpu --sizes 128 100 " in run["header"]["command"]
        assert run["header"]["libraries"]
        for rows in run["tables"].values():
            assert rows
            for row in rows:
                assert not row.get("absent") or " ".join(row["absent"].split()) in text


# ---- Table 1 ------------------------------------------------------------------------------------


def test_thresholds_are_the_papers_within_its_tolerance():
    """Some stand a little off, for the paper's search stops within 1% of the ratio."""
    rows = table_1._rows(torch.device("cpu"), 1024)
    assert [row["ratio"] for row in rows] == list(paper.RATIOS)
    for row in rows:
        assert row["tau"] == pytest.approx(paper.TAU[1024, row["ratio"]], rel=0.01)
        assert row["valid_ratio"] == pytest.approx(row["ratio"], abs=0.005)
        assert row["valid_at_papers"] == pytest.approx(row["ratio"], abs=0.01)
        assert row["paper"] == paper.TAU[1024, row["ratio"]]
        assert row["difference"] == pytest.approx(row["tau"] / row["paper"] - 1)
    assert table_1.said({"thresholds": rows}) == (
        "6 thresholds at the paper's sizes and ratios; the largest difference is +0.68%."
    )


# ---- Table 2 ------------------------------------------------------------------------------------


def test_speedups_are_over_the_dense_product_of_the_same_run(folder):
    cases = [
        *(("float32", 32), ("bfloat16", 32), ("float32", 64), ("bfloat16", 64), ("float64", 64)),
        *(("float32", [128, 64, 128]), ("bfloat16", [128, 64, 128])),
    ]
    for precision, block in cases:
        place = {"precision": precision, "block": block}
        for n in SIZES:
            rows = measured(tables_of(folder, 2)["speedups"], n=n, **place)
            assert [row["ratio"] for row in rows] == list(paper.RATIOS)
            for row in rows:
                assert row["speedup"] == pytest.approx(row["dense_ms"] / row["mm_ms"])


@pytest.mark.cuda
@pytest.mark.multi_gpu
def test_several_gpus(mnist, tmp_path):
    arguments = ["2", "3", "5", "--device", "cuda", "--sizes", "256", "--repeats", "1"]
    arguments += ["--data", str(mnist), "--checkpoint", str(tmp_path / "c.pt")]
    arguments += ["--width", "2", "--epochs", "1", "--batch", "10", "--out", str(tmp_path)]
    reproduce.main(arguments)
    tables = {number: tables_of(tmp_path, number, "cuda") for number in (2, 3, 5)}
    for rows in (tables[2]["speedups, several GPUs"], tables[5]["study, several GPUs"]):
        assert rows
        assert all(row["speedup"] > 0 for row in rows)
    assert all(row["speedup_2"] > 0 for row in tables[3]["at equal error"])


# ---- Table 3 ------------------------------------------------------------------------------------


def test_errors_of_both_products_agree(folder):
    tables = tables_of(folder, 3)
    fastest = {}
    for row in measured(tables["sparse products"]):
        at = row["n"], row["share"]
        fastest[at] = min(fastest.get(at, row["ms"]), row["ms"])
        assert row["nonzeros"] == pytest.approx(row["share"], abs=0.02)
        assert min(row["conversion_ms"], row["dense_ms"], row["ms"]) > 0
    assert len(tables["at equal error"]) == 2 * 3 * len(SIZES)
    for row in tables["at equal error"]:
        assert 0 <= row["error"] <= row["sparse_error"]
        assert row["peer_ms"] == fastest[row["n"], row["share"]]
        assert row["speedup"] == pytest.approx(row["peer_ms"] / row["ms"])


def test_the_threshold_is_the_largest_with_that_error():
    a, b = operands("decay", 256, torch.float32, "cpu")
    exact = a.double() @ b.double()
    norms = spamm_torch.norm_map(a, 32)

    def lost(tau):
        """What skipping loses, from the blocks themselves."""
        blocks = a.double().unflatten(0, (-1, 32)).unflatten(2, (-1, 32)).transpose(1, 2)
        kept = (norms[:, :, None] * norms >= tau).double()
        product = torch.einsum("iknm,kjml,ikj->injl", blocks, blocks, kept).reshape(256, 256)
        return (exact - product).norm().item()

    for target in (20.0, 80.0):
        found = table_3._at_error(a, b, exact, target, 32)
        assert found["error"] == pytest.approx(lost(found["tau"]), rel=1e-5)
        above = (norms[:, :, None] * norms).flatten().unique()
        above = above[above > found["tau"] * (1 + 1e-5)]
        assert found["error"] <= target < lost(above[1].item())


def test_truncation_keeps_the_nearest_share():
    a = torch.tensor([[4.0, 3.0, 3.0, 2.0], [2.0, 2.0, 2.0, 1.0]])
    kept = lambda share: int((a >= table_3.truncation(a, share)).sum())  # noqa: E731
    assert [kept(of / 8) for of in (1, 2, 3, 4, 6, 7, 8)] == [1, 3, 3, 3, 7, 7, 8]


def fails(error):
    raise error


MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried 9. GPU 0 has 5 GiB")
REFUSED = RuntimeError("CUDA error: insufficient resources when calling `cusparseF( handle)`")
FOR_PRODUCTS = "(for 64 products of entries)"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (MemoryError("no memory for 9 TiB"), "no memory for 9 TiB"),
        (MEMORY, f"does not fit in memory: CUDA out of memory. Tried 9 {FOR_PRODUCTS}"),
        (REFUSED, f"cusparseF has insufficient resources {FOR_PRODUCTS}"),
    ],
)
def test_a_sparse_product_that_fails_says_why(monkeypatch, error, why):
    a = torch.eye(64)
    failing = {"": partial(fails, error)}
    monkeypatch.setattr(table_3, "ways", lambda csr: failing)
    assert table_3.calls(a, a.double(), a.device) == ({}, {table_3.PEERS["cpu"]: why})
    monkeypatch.setattr(table_3, "ways", lambda csr: failing | {", in parts": lambda: csr @ csr})
    [(name, of)] = table_3.calls(a, a.double(), a.device)[0].items()
    assert name == table_3.PEERS["cpu"] + ", in parts"
    assert of.ms > 0
    assert torch.equal(of.call().to_dense(), a)


def test_a_wrong_sparse_product_is_none():
    a = torch.eye(64)
    found, absent = table_3.calls(a, 2 * a.double(), a.device)
    [why] = absent.values()
    assert not found
    assert why.startswith("wrong result: expected an error of at most 1e-05; got 0.5")


@pytest.fixture
def sparse():
    """A matrix in which some rows hold nothing."""
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(100, 100, generator=generator)
    a[a < 0.7] = 0
    a[:3] = a[50:60] = 0
    return a


def test_products_of_entries_are_counted(sparse):
    nonzero = (sparse != 0).double()
    assert table_3.count_products(table_3.to_csr(sparse)) == (nonzero @ nonzero).sum()


@pytest.mark.parametrize("products", [1, 3000, 10**9])
def test_slices_of_rows_make_the_whole_product(sparse, products, device):
    sparse = sparse.to(device)
    csr = table_3.to_csr(sparse)
    parts = table_3.slices(csr, products)
    assert len(parts) == 1 if products == 10**9 else len(parts) > 5
    assert sum(len(part) for part in parts) == len(sparse)
    whole = table_3.stacked([part @ csr for part in parts])
    torch.testing.assert_close(whole.to_dense(), (csr @ csr).to_dense())
    row = (sparse != 0).sum().item()  # more products than any row has
    nonzero = (sparse != 0).double()
    for part in parts:
        assert ((part.to_dense() != 0).double() @ nonzero).sum() <= products + row


@pytest.mark.cuda
def test_cusparse_multiplies():
    a, _ = operands("decay", 256, torch.float32, "cuda")
    a[a < table_3.truncation(a, 0.5)] = 0
    calls, absent = table_3.calls(a, a.double() @ a.double(), a.device)
    assert list(calls) == [table_3.PEERS["cuda"]]
    assert not absent


@pytest.mark.cuda
def test_what_cusparse_gets_where_its_default_refuses(monkeypatch, sparse):
    sparse = sparse.cuda()
    assert list(table_3.ways(table_3.to_csr(sparse))) == [""]
    monkeypatch.setattr(table_3, "_MOST_PRODUCTS", 100)
    ways = table_3.ways(table_3.to_csr(sparse))
    assert list(ways) == ["", ", A in 1 slices of rows"]
    product = ways[", A in 1 slices of rows"]()
    torch.testing.assert_close(product.to_dense(), sparse @ sparse)


# ---- Table 5 ------------------------------------------------------------------------------------


def test_groups_of_layers(folder):
    tables = tables_of(folder, 5)
    dense = {row["title"]: row for row in tables["study, dense"]}
    assert list(dense) == list(GROUPS)
    for title, plan in GROUPS.items():
        rows = measured(tables["study"], title=title)
        assert {row["ratio"] for row in rows} == set(plan.ratios)
        for row in rows:
            assert row["images"] == "MNIST t10k"
            change = row["accuracy"] - dense[title]["dense_accuracy"]
            assert row["accuracy_change"] == pytest.approx(change)
            assert (row["ms"] is None) == plan.shifted
    text = (folder / "tables.md").read_text()
    assert "| conv31 | 43.38% | -1.1 | 4.8x |" in text


# ---- Going on -----------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on(tmp_path, capsys, monkeypatch, arguments):
    """Stopped in the second cell of the second table: neither the first table is measured again."""
    whole, calls = {1: table_1._rows, 3: table_3._rows}, []

    def interrupted_at(stop):
        def rows(number, *of, **place):
            if len(calls) == stop:
                raise KeyboardInterrupt
            calls.append((number, place["n"]))
            return whole[number](*of, **place)

        calls.clear()
        for table, number in ((table_1, 1), (table_3, 3)):
            monkeypatch.setattr(table, "_rows", partial(rows, number))

    command = ["1", "3", *arguments, "--out", tmp_path]
    interrupted_at(3)
    code, _, errors = run(capsys, *command)
    assert code == 130
    journal = tmp_path / "tables_cpu.partial.json"
    assert errors == [
        f"interrupted: finished groups are in {journal}; the same command goes on from there"
    ]
    assert journal.exists()
    page = results.load(tmp_path / "tables.json")
    assert [run["name"] for run in page["runs"]] == ["table_1_cpu"]

    code, _, errors = run(capsys, *command, "--repeats", 2)
    assert code == 1
    assert errors[0].startswith("error: expected repeats 1, as in the unfinished run in ")

    interrupted_at(None)
    code, printed, _ = run(capsys, *command)
    assert code == 0
    assert f"resumed from {journal} at 2 of 2" in printed
    assert f"resumed from {journal} at 1 of 6" in printed
    assert calls == [(3, 128)] * 2 + [(3, 100)] * 3
    assert not list(tmp_path.glob("*.partial.json"))

    interrupted_at(None)
    assert run(capsys, "1", *arguments, "--out", tmp_path, "--fresh")[0] == 0
    assert calls == [(1, 128), (1, 100)]
    assert "- table_3_cpu: " in (tmp_path / "tables.md").read_text()


def test_cells_that_failed_are_tried_again(tmp_path, capsys, monkeypatch, arguments):
    """Those for want of memory, and only those: the others are not measured again."""
    whole, calls = table_1._rows, []

    def rows(*of, n, **place):
        calls.append(n)
        if calls == [128]:
            raise MemoryError
        return whole(*of, n=n, **place)

    monkeypatch.setattr(table_1, "_rows", rows)
    command = ["1", *arguments, "--out", tmp_path]
    code, printed, _ = run(capsys, *command)
    assert code == 0
    assert "1 cells failed; the same command tries these again" in printed
    reasons = [row["absent"] for row in tables_of(tmp_path, 1)["thresholds"]]
    assert reasons == ["MemoryError", *[None] * len(paper.RATIOS)]
    code, printed, _ = run(capsys, *command)
    assert code == 0
    assert "cells failed" not in printed
    assert len(measured(tables_of(tmp_path, 1)["thresholds"])) == 2 * len(paper.RATIOS)
    assert calls == [128, 100, 128]
    assert not list(tmp_path.glob("*.partial.json"))


# ---- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["6", "0", "x", "1,2"])
def test_an_unknown_table(word, tmp_path, capsys):
    code, printed, errors = run(capsys, "1", word, "--out", tmp_path / "out")
    assert code == 1
    known = ", ".join(map(str, reproduce.TABLES))
    assert errors == [f"error: expected tables {known} or all; got {word}"]
    assert not printed
    assert not (tmp_path / "out").exists()


def test_missing_images_are_found_before_the_first_table(tmp_path, capsys):
    out = tmp_path / "out"
    code, _, errors = run(
        capsys, "all", "--device", "cpu", "--data", tmp_path / "none", "--out", out
    )
    assert code == 1
    [line] = errors
    assert str(tmp_path / "none") in line
    assert not list(out.iterdir())


def test_a_wrong_result_ends_the_run(tmp_path, capsys, monkeypatch, arguments):
    monkeypatch.setitem(table_3.TOLERANCE, "float32", -1.0)
    code, _, errors = run(capsys, "3", *arguments, "--out", tmp_path)
    assert code == 1
    [line] = errors
    assert line.startswith("error: wrong result at N = 128, block 32, tau ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (FileNotFoundError(2, "No such file or directory", "g++"), True),
        (RuntimeError("needs 2 GPUs; got 1"), False),
        (NotImplementedError(), False),
    ],
)
def test_what_another_run_may_measure(error, passes):
    def fails(n):
        raise error

    [row] = cell("thresholds", fails, n=3)()["thresholds"]
    assert row.get("may_pass", False) is passes


# ---- Table 4 ------------------------------------------------------------------------------------


def test_table_4_squares_all_matrices_of_both_clusters(folder):
    tables = tables_of(folder, 4)
    cells = {}
    for row in tables["squares"]:
        cells.setdefault((row["origin"], row["matrix"], row["precision"]), []).append(row)
    assert len(cells) == 16
    absent = {place for place, rows in cells.items() if rows[0]["absent"]}
    assert absent == {("model", "core_hamiltonian", kind) for kind in ("float64", "float32")}
    settings = {(block, tau) for block in (32, 64) for tau in paper.SQUARES[1][1]}
    for place, rows in cells.items():
        if place not in absent:
            assert {(row["block"], row["tau"]) for row in rows} == settings
    text = (folder / "tables.md").read_text()
    assert "| 1 | 755 | 0 | 1e-06 | 9e-05 | 0.011 | 1.5 |" in text
    assert "| mean |  | 1.3x |  |  | 1.7x | 3.0x |" in text
