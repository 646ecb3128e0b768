"""reproduce.py: small real runs of its tables, how they go on, and what they refuse."""

import argparse
import json
import shutil
from functools import partial

import pytest
import torch
from tiny_study import digits, one_thread, write_part  # noqa: F401  the fixture is automatic

import plot_results
import reproduce
import spamm_torch
from bench.multi_gpu.model import Machine
from bench.multi_gpu.product import Product
from bench.networks import candidates
from bench.operands import operands
from common.console import exit_code, make_console
from common.errors import UserError
from ergo import table_4 as ergo_squares
from ergo.embedded import FILES, FOLDER
from models.data import ROOT_VARIABLE
from models.vgg13 import CONVOLUTIONS, VGG13
from study.layouts import LAYOUTS
from study.plan import Group
from tables import (
    cusparse,
    paper,
    reports,
    spgemm,
    table_1,
    table_2,
    table_3,
    table_5,
    whole_network,
)
from tables.frame import Run, cell

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
        patch.setattr(ergo_squares, "MODELS", {"cpu": (8, "STO-3G")})
        patch.setattr(table_5, "GROUPS", GROUPS)
        by_dynamo = partial(torch.compile, backend="eager", dynamic=False)  # Inductor takes long
        patch.setattr(candidates, "_compiled", lambda model, **settings: by_dynamo(model))
        patch.delenv(ROOT_VARIABLE, raising=False)
        yield


@pytest.fixture(scope="module")
def folder(arguments, tmp_path_factory):
    """All tables by one command."""
    folder = tmp_path_factory.mktemp("tables") / "with space"
    reproduce.main(["all", *arguments, "--out", str(folder)])
    return folder


def data_of(folder, number):
    return json.loads((folder / f"table_{number}_cpu.json").read_text())


def rows_of(folder, number, **place):
    """(place, row) of the measured cells whose place has these values."""
    return [
        (found["place"], row)
        for found in data_of(folder, number)["cells"]
        if place.items() <= found["place"].items()
        for row in found["rows"]
    ]


def run(capsys, *arguments):
    code = exit_code(lambda: reproduce.main([str(argument) for argument in arguments]))
    captured = capsys.readouterr()
    return code, captured.out.replace("\n", ""), captured.err.splitlines()


# ---- A whole run --------------------------------------------------------------------------------


def test_each_table_leaves_three_files_and_all_of_them_a_page(folder):
    expected = {f"table_{n}_cpu.{kind}" for n in reproduce.TABLES for kind in ("json", "md", "png")}
    assert {path.name for path in folder.iterdir()} == expected | {"tables.md"}
    assert reproduce.TABLES.keys() == reports.REPORTS.keys()
    for path in folder.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_every_cell_is_measured_or_says_why_it_is_not(folder):
    for number in reproduce.TABLES:
        cells = data_of(folder, number)["cells"]
        assert cells
        page = (folder / f"table_{number}_cpu.md").read_text()
        for found in cells:
            assert bool(found["rows"]) != bool(found["absent"])
            if found["absent"]:
                assert found["absent"] in page


def test_the_joined_page_has_what_each_table_says(folder):
    joined = (folder / "tables.md").read_text()
    for number in reproduce.TABLES:
        data = data_of(folder, number)
        report = reports.REPORTS[number]
        assert f"## Table {number}: {report.TITLE} (cpu)" in joined
        assert report.conclusion(data) in joined
        for line in report.beside(data):
            assert line in joined
        for key in ("device", "torch", "libraries", "spamm_torch", "date", "command"):
            assert data["header"][key] in joined
    assert "scripts/reproduce.py all --device cpu --sizes 128 100" in joined


def test_pages_are_what_their_json_files_give(folder, tmp_path):
    for number in reproduce.TABLES:
        shutil.copy(folder / f"table_{number}_cpu.json", tmp_path)
        copy = tmp_path / f"table_{number}_cpu.json"
        plot_results.redraw(copy)
        page = copy.with_suffix(".md").read_text()
        assert page == (folder / f"table_{number}_cpu.md").read_text()
    reports.write_joined(tmp_path)
    assert (tmp_path / "tables.md").read_text() == (folder / "tables.md").read_text()


def test_tables_have_lines_of_equal_length(folder):
    for path in folder.glob("*.md"):
        columns = None
        for line in path.read_text().splitlines():
            count = line.count(" | ") if line.startswith("| ") else None
            assert columns is None or count in (None, columns), line
            columns = count


# ---- Table 1 ------------------------------------------------------------------------------------


def test_thresholds_are_the_papers_within_its_tolerance():
    """Some stand a little off, for the paper's search stops within 1% of the ratio."""
    rows = table_1._rows(torch.device("cpu"), 1024, True)
    assert [row["ratio"] for row in rows] == list(paper.RATIOS)
    for row in rows:
        assert row["tau"] == pytest.approx(paper.TAU[1024, row["ratio"]], rel=0.01)
        assert row["valid_ratio"] == pytest.approx(row["ratio"], abs=0.005)
        assert row["valid_at_papers"] == pytest.approx(row["ratio"], abs=0.01)
        assert row["imbalance"] >= row["imbalance_strided"] >= 1
    data = {"cells": [{"place": {"n": 1024}, "rows": rows, "absent": None}]}
    assert "/ 1.434815 (+0.09%)" in "".join(reports.REPORTS[1].beside(data))


def test_v_is_pooled_to_means():
    counts = torch.arange(16).view(4, 4)
    assert table_1._pooled(counts) == (counts / 4).tolist()
    pooled = torch.tensor(table_1._pooled(torch.ones(64, 64)))
    assert pooled.shape == (32, 32)
    torch.testing.assert_close(pooled, torch.full((32, 32), 1 / 64), atol=1e-3, rtol=0)


def test_strided_work_is_what_a_thread_block_of_the_papers_gets():
    work = table_1._strided_sums(torch.arange(8).view(2, 4))
    assert work.tolist() == [0 + 2 + 4 + 6, 1 + 3 + 5 + 7]
    assert table_1._strided_sums(torch.ones(3, 3)).tolist() == [3, 3, 3]
    assert table_1._imbalance(work) == 16 / 14
    assert table_1._imbalance(torch.zeros(3)) == 1


def test_norm_maps_of_strips_are_the_matrixs(monkeypatch):
    monkeypatch.setattr(table_1, "_STRIP", 64)
    a, _ = operands("decay", 200, torch.float32, "cpu")
    found = table_1._norm_map(200, torch.device("cpu"))
    assert torch.equal(found, spamm_torch.norm_map(a, table_1.BLOCK))


# ---- Table 2 ------------------------------------------------------------------------------------


def test_speedups_are_over_the_dense_product_of_the_same_run(folder):
    cases = [
        *(("float32", 32), ("bfloat16", 32), ("float32", 64), ("bfloat16", 64), ("float64", 64)),
        *(("float32", [128, 64, 128]), ("bfloat16", [128, 64, 128])),
    ]
    for precision, block in cases:
        place = {"kind": "one", "precision": precision, "block": block}
        for n in SIZES:
            rows = [row for _, row in rows_of(folder, 2, n=n, **place)]
            assert [row["ratio"] for row in rows] == list(paper.RATIOS)
            for row in rows:
                assert row["speedup"] == pytest.approx(row["dense_ms"] / row["mm_ms"])


def test_block_sparse_products_keep_what_takes_part(folder):
    rows = [row for _, row in rows_of(folder, 2, kind="BSR", precision="float32", n=128)]
    kept = [row["kept"] for row in rows]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > 0
    for row in rows:
        assert row["speedup"] == pytest.approx(row["dense_ms"] / row["ms"])
    reasons = {
        (found["place"]["precision"], found["place"]["n"]): found["absent"]
        for found in data_of(folder, 2)["cells"]
        if found["place"]["kind"] == "BSR" and found["absent"]
    }
    assert reasons["float32", 100] == "needs a multiple of the block, 64; got N = 100"


def test_block_sparse_products_are_verified(monkeypatch):
    monkeypatch.setitem(table_2.TOLERANCE, "float32", -1.0)
    a, b = operands("decay", 64, torch.float32, "cpu")
    norms = spamm_torch.norm_map(a)
    with pytest.raises(RuntimeError, match=r"^wrong result: expected an error of at most -1"):
        table_2._bsr_call(a, b, norms > 0, norms, "float32")


def test_the_model_speaks_of_more_devices():
    """Where work is all that takes time, P devices are P times as fast but for the imbalance."""
    product = Product("decay", "float32", 1024, [torch.device("cpu")])
    machine = Machine(*(1e30, 1e30, 0.0, 0.0, 0.0, 0.0), gammas=(("decay", 0.0, 1e-3),))
    rows = table_2.predicted(product, machine)
    assert [row["parts"] for row in rows] == [4, 8] * len(paper.RATIOS)
    for row in rows:
        assert row["speedup_of_one"] == pytest.approx(row["parts"] / row["work_imbalance"])
        assert 0 < row["sent"] <= 1


def test_the_papers_cells_are_measured_first():
    names = list(table_2.cells(frame_of("cuda")))
    assert len(names) == 6 * (2 * 2 + 2 + 2 + 2 + 2 + 2)
    assert names[:4] == [
        *("float32, block 32, N = 1024", "float32, block 64, N = 1024"),
        *("float16, block 32, N = 1024", "float16, block 64, N = 1024"),
    ]
    assert names[24] == "two GPUs, float32, N = 1024"
    assert names[-1] == "BSR, float16, N = 32768"


@pytest.mark.parametrize(("asked", "large"), [(7, 3), (2, 2)])
def test_large_products_take_fewer_rounds(asked, large):
    run = frame_of("cuda", repeats=asked)
    assert [table_2._repeats(run, n) for n in (8192, 16384)] == [asked, large]


def frame_of(kind, repeats=1):
    options = argparse.Namespace(sizes=None)
    return Run(torch.device(kind), (), repeats, options, make_console())


def found(rows, **place):
    return {"place": place, "rows": rows, "absent": None}


def test_several_gpus_stand_beside_one():
    """More than were measured are one device's speedup times the model's factor."""
    case = {"precision": "float16", "n": 8192}
    one = {"ratio": 0.05, "speedup": 6.0, "share_of_floor": 0.5, "dense_ms": 12.0, "mm_ms": 2.0}
    two = [{"ratio": 0.05, "layout": "0", "speedup": 6.5}]
    two.append(two[0] | {"layout": "S", "speedup": 9.0})
    by_model = {"ratio": 0.05, "parts": 4, "speedup_of_one": 2.5}
    cells = [
        found([one | {"speedup": 5.0}], kind="one", block=32, **case),
        found([one], kind="one", block=64, **case),
        found(two, kind="two", **case),
        found([by_model], kind="model", **case),
    ]
    lines = reports.REPORTS[2].beside({"cells": cells})
    assert "| 5% | 7.00 / 5.00 / 6.00 (50%) |" in lines
    assert "| type | N | ratio | 1 | 2, layout 0 | 2, layout S | 4, model |" in lines
    assert "| float16 | 8192 | 5% | 6.00 | 6.50 | 9.00 | 15.0 |" in lines
    below = "- float16, N = 8192, 5%: 6.00 here, 7.0 in the paper; at the floor it would be 12.0"
    assert f"{below} (torch.mm 12 ms, mm 2 ms)" in lines
    cells[1]["rows"] = [one | {"speedup": 7.1}]
    assert not any(
        line.startswith(below[:30]) for line in reports.REPORTS[2].beside({"cells": cells})
    )
    cells[1]["rows"] = [one]
    assert reports.REPORTS[2].conclusion({"cells": cells}) == (
        "Speedup over the dense product above the paper's: float16, block 32: 0 of 1 cells; "
        "float16, block 64: 0 of 1 cells."
    )


@pytest.mark.cuda
@pytest.mark.multi_gpu
def test_two_gpus(mnist, tmp_path):
    arguments = ["2", "3", "5", "--device", "cuda", "--sizes", "256", "--repeats", "1"]
    arguments += ["--data", str(mnist), "--checkpoint", str(tmp_path / "c.pt")]
    arguments += ["--width", "2", "--epochs", "1", "--batch", "10", "--out", str(tmp_path)]
    reproduce.main(arguments)
    for number in (2, 5):
        cells = json.loads((tmp_path / f"table_{number}_cuda.json").read_text())["cells"]
        two = [found for found in cells if found["place"]["kind"] == "two"]
        assert two
        assert all(row["speedup"] > 0 for found in two for row in found["rows"])
        assert not any(found["absent"] for found in two)
    cells = json.loads((tmp_path / "table_3_cuda.json").read_text())["cells"]
    assert all(row["speedup_two"] > 0 for found in cells for row in found["rows"][1:])


# ---- Table 3 ------------------------------------------------------------------------------------


def test_errors_of_both_products_agree(folder):
    for place, row in rows_of(folder, 3):
        if "peer" in row:
            target, sparse_ms = row["error"], row["ms"]
            assert row["nonzeros"] == pytest.approx(place["nonzeros"], abs=0.02)
            assert row["peer"] in row["peers"]
            assert min(row["conversion_ms"], row["dense_ms"], sparse_ms) > 0
        else:
            assert 0 <= row["error"] <= target
            assert row["speedup"] == pytest.approx(sparse_ms / row["ms"])


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


def test_shares_of_sizes_that_the_paper_has_not_are_those_of_its_smaller_one():
    assert table_3.shares_of(8192) == [0.5959, 0.2695, 0.0212]
    assert table_3.shares_of(1024) == table_3.shares_of(100) == [0.5213, 0.2437, 0.1091]


def test_a_sparse_product_that_fails_says_why(monkeypatch):
    def too_large(csr):
        raise MemoryError("no memory for 9 TiB")

    def fails(how):
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried {how}. GPU 0 has 5 GiB")

    def refused(csr):
        raise RuntimeError("CUDA error: insufficient resources when calling `cusparseF( handle)`")

    ways = {
        "large": too_large,
        "MKL": spgemm._by_torch,
        "second": lambda csr: {", whole": partial(fails, 1), ", in parts": lambda: csr @ csr},
        "neither": lambda csr: {"": partial(fails, 8), ", in parts": partial(fails, 9)},
        "refused": refused,
    }
    monkeypatch.setattr(spgemm, "peers", lambda device: ways)
    a = torch.eye(64)
    calls, absent = spgemm.calls(a, a.double(), a.device)
    assert list(calls) == ["MKL", "second, in parts"]
    assert all(of.ms > 0 and torch.equal(of.call().to_dense(), a) for of in calls.values())
    for_products = "(for 64 products of entries)"
    assert absent == {
        "large": "no memory for 9 TiB",
        "neither": f"does not fit in memory: CUDA out of memory. Tried 9 {for_products}",
        "refused": f"cusparseF has insufficient resources {for_products}",
    }
    _, absent = spgemm.calls(a, 2 * a.double(), a.device)
    assert absent["MKL"].startswith("wrong result: expected an error of at most 1e-05; got 0.5")


def test_where_a_sparse_product_takes_long_the_others_are_not_tried(monkeypatch):
    ways = dict.fromkeys(("first", "second"), spgemm._by_torch)
    monkeypatch.setattr(spgemm, "peers", lambda device: ways)
    monkeypatch.setattr(spgemm, "_LONGEST_MS", 0.0)
    a = torch.eye(64)
    calls, absent = spgemm.calls(a, a.double(), a.device)
    assert list(calls) == ["first"]
    assert absent["second"].startswith("not tried: a product took ")


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
    assert spgemm.count_products(spgemm.to_csr(sparse)) == (nonzero @ nonzero).sum()


@pytest.mark.parametrize("products", [1, 3000, 10**9])
def test_slices_of_rows_make_the_whole_product(sparse, products, device):
    sparse = sparse.to(device)
    csr = spgemm.to_csr(sparse)
    parts = spgemm.slices(csr, products)
    assert len(parts) == 1 if products == 10**9 else len(parts) > 5
    assert sum(len(part) for part in parts) == len(sparse)
    whole = spgemm.stacked([part @ csr for part in parts])
    torch.testing.assert_close(whole.to_dense(), (csr @ csr).to_dense())
    row = (sparse != 0).sum().item()  # more products than any row has
    nonzero = (sparse != 0).double()
    for part in parts:
        assert ((part.to_dense() != 0).double() @ nonzero).sum() <= products + row


@pytest.mark.cuda
@pytest.mark.parametrize("algorithm", cusparse.ALGORITHMS)
def test_algorithms_of_cusparse(sparse, algorithm):
    csr = spgemm.to_csr(sparse.cuda())
    found = cusparse.multiply(csr, csr, algorithm)
    expected = csr @ csr
    assert len(found.values()) == len(expected.values())
    torch.testing.assert_close(found.to_dense(), expected.to_dense())


@pytest.mark.cuda
def test_every_peer_of_cuda_multiplies():
    a, _ = operands("decay", 256, torch.float32, "cuda")
    a[a < table_3.truncation(a, 0.5)] = 0
    calls, absent = spgemm.calls(a, a.double() @ a.double(), a.device)
    assert not absent
    first_ways = [name.replace(", chunks of 20.00%", "") for name in calls]
    assert first_ways == list(spgemm.peers(a.device))


def test_what_cusparse_gets_where_its_default_refuses(monkeypatch, sparse, device):
    sparse = sparse.to(device)
    assert list(spgemm._by_torch_on_cuda(spgemm.to_csr(sparse))) == [""]
    monkeypatch.setattr(spgemm, "_MOST_PRODUCTS", 100)
    ways = spgemm._by_torch_on_cuda(spgemm.to_csr(sparse))
    assert list(ways) == ["", ", A in 1 slices of rows"]
    product = ways[", A in 1 slices of rows"]()
    torch.testing.assert_close(product.to_dense(), sparse @ sparse)
    chunks = spgemm._by_chunks(spgemm.to_csr(sparse))
    assert len(chunks) == 3
    assert all(name.startswith(", chunks of 0.") for name in chunks)


@pytest.mark.cuda
def test_what_cusparse_refuses_names_the_function():
    with pytest.raises(RuntimeError, match=r"^\w[\w ]* in cusparseSetStream$"):
        cusparse._call("cusparseSetStream", None, None)


# ---- Table 5 ------------------------------------------------------------------------------------


def test_groups_of_layers(folder):
    groups = [row for _, row in rows_of(folder, 5, kind="group")]
    assert [group["title"] for group in groups] == list(GROUPS)
    for group, plan in zip(groups, GROUPS.values(), strict=True):
        assert {setting["asked_ratio"] for setting in group["settings"]} == set(plan.ratios)
        for setting in group["settings"]:
            change = setting["accuracy"] - group["dense_accuracy"]
            assert setting["accuracy_change"] == pytest.approx(change)
            assert (setting["ms"] is None) == plan.shifted
    page = (folder / "table_5_cpu.md").read_text()
    assert "| conv31 | float32 | 43.38% | -1.1 | 7.5 | 4.8 / 8.1 / 12.4 |" in page
    assert "Network: vgg13, width 2, epochs 1, batch 10, seed 0. Images: MNIST t10k" in page


def test_the_whole_network_stands_beside_the_compiled_one(folder):
    data = data_of(folder, 5)
    [network] = [of for of in data["cells"] if of["place"]["kind"] == "network"]
    assert network["place"]["title"] == "all"
    named = [(row["candidate"], row["ratio"]) for row in network["rows"]]
    assert named == [("dense", None), ("compiled", None), ("SpAMM", 1.0), ("SpAMM", 0.85)]
    assert all(row["ms"] > 0 for row in network["rows"])
    for row, ms in zip(network["rows"], (6.0, 4.0, 3.0, 2.0), strict=True):
        row["ms"] = ms
    lines = reports.REPORTS[5].beside(data)
    assert "| as it is | float32 | 6 | 1.00 | 0.67 |" in lines
    assert "| SpAMM in all, all | float32 | 3 | 2.00 | 1.33 |" in lines
    assert "| SpAMM in all, 85% | float32 | 2 | 3.00 | 2.00 |" in lines
    network["rows"][1] |= {"ms": None, "absent": "no compiler"}
    lines = reports.REPORTS[5].beside(data)
    assert "| torch.compile, default | float32 | not measured: no compiler |  |  |" in lines
    assert "| SpAMM in all, 85% | float32 | 2 | 3.00 |  |" in lines


def test_a_wrong_network_of_ours_is_refused(monkeypatch):
    """Fused, it must be what its layers are one by one."""
    torch.manual_seed(0)
    fuse = spamm_torch.fuse_

    def wrong(network):
        network[-1].bias.data += 1
        fuse(network)

    monkeypatch.setattr(spamm_torch, "fuse_", wrong)
    group, layout = Group("conv52", ("conv52",), "conv52", (0.5,)), LAYOUTS[2]
    pictures = torch.rand(4, 3, 32, 32)
    with pytest.raises(UserError, match=r"wrong result of the fused network at ratio 1\.0: "):
        whole_network.measure(VGG13(width=2).eval(), torch.float32, pictures, group, layout, 1)


def test_two_gpus_stand_beside_one(folder):
    data = data_of(folder, 5)
    for of in data["cells"]:
        if (of["place"]["kind"], of["place"]["title"]) == ("two", "conv31"):
            of |= found([{"ratio": 0.4338, "ms": 1.0, "speedup": 7.77}], **of["place"])
    [line] = [line for line in reports.REPORTS[5].beside(data) if "43.38% | -1.1" in line]
    assert line.endswith(" | 7.77 |")


def test_the_papers_layers_and_all_are_centred_and_shifted():
    groups = table_5._groups()
    centred = [title for title, group in groups.items() if not group.shifted]
    assert centred == ["conv21", "conv31", "conv12 to conv52"]
    assert [f"{title}, images shifted" for title in centred] == list(groups)[3:]
    assert groups["conv21"].ratios == (0.9747, 0.9684, 0.85, 0.829, 0.6341)


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
    journal = tmp_path / "table_3_cpu.partial.json"
    assert errors == [
        f"interrupted: finished groups are in {journal}; the same command goes on from there"
    ]
    assert journal.exists()
    assert not (tmp_path / "table_3_cpu.json").exists()

    code, _, errors = run(capsys, *command, "--repeats", 2)
    assert code == 1
    assert errors[0].startswith("error: expected repeats 1, as in the unfinished run in ")

    interrupted_at(None)
    code, printed, _ = run(capsys, *command)
    assert code == 0
    assert f"resumed from {tmp_path / 'table_1_cpu.partial.json'} at 2 of 2" in printed
    assert f"resumed from {journal} at 1 of 6" in printed
    assert calls == [(3, 128)] * 2 + [(3, 100)] * 3
    assert not list(tmp_path.glob("*.partial.json"))

    interrupted_at(None)
    assert run(capsys, "1", *arguments, "--out", tmp_path, "--fresh")[0] == 0
    assert calls == [(1, 128), (1, 100)]
    assert "## Table 3" in (tmp_path / "tables.md").read_text()


def test_a_damaged_journal(tmp_path, capsys, arguments):
    """Of the last table asked for: found before the first is measured."""
    journal = tmp_path / "table_2_cpu.partial.json"
    journal.write_text("{")
    code, _, errors = run(capsys, "1", "2", *arguments, "--out", tmp_path)
    assert code == 1
    assert errors == [
        f"error: expected groups of an unfinished run; got something else in {journal}: measure "
        "anew with --fresh"
    ]
    assert [path.name for path in tmp_path.iterdir()] == [journal.name]
    assert journal.read_text() == "{"


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
    assert "table 1: 1 cells failed; the same command tries these again" in printed
    assert [found["absent"] for found in data_of(tmp_path, 1)["cells"]] == ["MemoryError", None]
    code, printed, _ = run(capsys, *command)
    assert code == 0
    assert "cells failed" not in printed
    assert [found["absent"] for found in data_of(tmp_path, 1)["cells"]] == [None, None]
    assert calls == [128, 100, 128]
    assert not list(tmp_path.glob("*.partial.json"))


@pytest.mark.parametrize("groups", [{"N = 128": 3}, {"N = 128": {"rows": []}}])
def test_a_journal_of_other_cells(groups, tmp_path, capsys, monkeypatch, arguments):
    def interrupted(*of, **place):
        if place["n"] == 100:
            raise KeyboardInterrupt
        return []

    monkeypatch.setattr(table_1, "_rows", interrupted)
    command = ["1", *arguments, "--out", tmp_path]
    assert run(capsys, *command)[0] == 130
    journal = tmp_path / "table_1_cpu.partial.json"
    journal.write_text(json.dumps(json.loads(journal.read_text()) | {"groups": groups}))
    code, _, errors = run(capsys, *command)
    assert code == 1
    assert errors == [
        f"error: expected groups of an unfinished run; got something else in {journal}: measure "
        "anew with --fresh"
    ]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"table": 7}', '{"table": 1, "cells": 3}'])
def test_damaged_results_in_the_folder(content, tmp_path, capsys, arguments):
    path = tmp_path / "table_2_old.json"
    path.write_text(content)
    code, _, errors = run(capsys, "1", *arguments, "--out", tmp_path)
    assert code == 1
    assert errors == [
        f"error: expected a table's results as JSON; got something else in {path}: remove it, or "
        "name another folder with --out"
    ]
    assert [path.name for path in tmp_path.iterdir()] == [path.name]


# ---- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["6", "0", "x", "1,2"])
def test_an_unknown_table(word, tmp_path, capsys):
    code, printed, errors = run(capsys, "1", word, "--out", tmp_path / "out")
    assert code == 1
    known = ", ".join(map(str, reproduce.TABLES))
    assert errors == [f"error: expected tables {known} or all; got {word}"]
    assert not printed
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").touch()
    code, printed, errors = run(capsys, "1", "--device", "cpu", "--out", tmp_path / "file" / "out")
    assert code == 1
    assert not printed
    [line] = errors
    assert str(tmp_path / "file" / "out") in line


def test_missing_images_are_found_before_the_first_table(tmp_path, capsys):
    out = tmp_path / "out"
    code, _, errors = run(
        capsys, "all", "--device", "cpu", "--data", tmp_path / "none", "--out", out
    )
    assert code == 1
    [line] = errors
    assert str(tmp_path / "none") in line
    assert not list(out.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--sizes", "0"), "an integer of 1 or more; got 0"),
        (("--repeats", "x"), "an integer of 1 or more; got x"),
        (("--device", "foo"), "'foo' (choose from"),
    ],
)
def test_options_out_of_range(arguments, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        reproduce.main([*arguments, "--out", str(tmp_path / "out")])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_wrong_result_ends_the_run(tmp_path, capsys, monkeypatch, arguments):
    monkeypatch.setitem(table_3.TOLERANCE, "float32", -1.0)
    code, _, errors = run(capsys, "3", *arguments, "--out", tmp_path)
    assert code == 1
    [line] = errors
    assert line.startswith("error: wrong result at N = 128, block 32, tau ")
    assert not list(tmp_path.iterdir())


def test_a_cell_that_fails_is_one_that_says_why():
    def fails(n):
        raise RuntimeError(f"out of memory\nat {n}")

    failed = {"place": {"n": 3}, "rows": [], "absent": "out of memory", "may_pass": True}
    assert cell(fails, n=3)() == failed


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

    assert cell(fails, n=3)()["may_pass"] is passes


# ---- Table 4 ------------------------------------------------------------------------------------


def test_table_4_squares_all_matrices_of_both_clusters(folder):
    cells = data_of(folder, 4)["cells"]
    places = [
        (found["place"]["origin"], found["place"]["matrix"], found["place"]["precision"])
        for found in cells
    ]
    assert len(set(places)) == len(places) == 16
    absent = {place for place, found in zip(places, cells, strict=True) if found["absent"]}
    assert absent == {("model", "core_hamiltonian", kind) for kind in ("float64", "float32")}
    for found in cells:
        assert {(row["block"], row["tau"]) for row in found["rows"]} == (
            set()
            if found["absent"]
            else {(b, tau) for b in (32, 64) for tau in paper.SQUARES[1][1]}
        )


def test_table_4_stands_beside_the_papers():
    rows = [
        {"block": 32, "tau": tau, "norm": 755.0, "error": 3e-5, "dense_error": 0.0, "bound": 4e-5}
        | {"valid_ratio": 0.25, "dense_ms": 8.0, "speedup": speedup, "speedup_unskipped": 1.5}
        for tau, speedup in ((1e-6, 4.0), (1e-2, 10.0))
    ]
    place = {"origin": "/a/b/waters_2.npz", "waters": 2, "basis": "STO-3G", "n": 14}
    place |= {"matrix": "fock", "precision": "float64"}
    missing = {"place": place | {"matrix": "density"}, "rows": [], "absent": "no memory"}
    data = {"cells": [{"place": place, "rows": rows, "absent": None}, missing]}
    report = reports.REPORTS[4]
    assert report.conclusion(data) == (
        "N = 14, float64, tau = 1e-06, over torch.mm: F 4x at 25.0% valid (error 3e-05)."
    )
    lines = report.beside(data)
    title = "F, 2 waters, STO-3G (waters_2.npz)"
    assert "| paper's no. 1 | 13656 |  |  | 755 |  | 9e-05 | 1.5 |" in lines
    assert f"| {title} | 14 | float64 | 32 | 755 | 0 | 3e-05 | 3e-05 |" in lines
    assert "| paper's mean, 1 GPU | 13656 |  | 32 |  |  | 3.0 |" in lines
    assert f"| {title} | 14 | float64 | 32 | 8 | 4 (1.5) | 10 (1.5) |" in lines
    assert lines[-1].startswith("- D, 2 waters, STO-3G (waters_2.npz), float64: not measured: no m")
    assert report.conclusion({"cells": [missing]}) == "No matrix was measured."
    for origin, shown in (("model", "of model F"), ("embedded", "ergo")):
        missing["place"]["origin"] = origin
        assert report.beside(data)[-1].startswith(f"- D, 2 waters, STO-3G ({shown}), float64: not")
    for cells in ([missing], data["cells"]):
        assert report.picture({"header": {"device": "cpu"}, "cells": cells}).startswith(b"\x89PNG")


def test_table_4_takes_matrices_of_ergo(arguments, tmp_path, capsys):
    given = ("4", *arguments, "--out", tmp_path / "out", "--matrices")
    code, _, error = run(capsys, *given, tmp_path / "none.npz")
    assert code == 1
    assert error == [
        f"error: expected matrices of ergo in {tmp_path}/none.npz; there is no such file"
    ]
    pair = FOLDER / FILES["pair 6-31G**"]
    assert run(capsys, *given, pair)[0] == 0
    of_file = rows_of(tmp_path / "out", 4, origin=str(pair))
    assert {place["matrix"] for place, _ in of_file} == {"overlap", "core_hamiltonian"}
    assert "needs Hartree-Fock" in (tmp_path / "out" / "table_4_cpu.md").read_text()
