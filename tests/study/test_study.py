"""The study: its layouts, accuracy, times and reports, on networks of a second's work."""

import pytest
import torch
from bench_checks import tables_of
from im2col_reference import Im2col
from tiny_study import digits, one_thread, write_part  # noqa: F401  the fixture is automatic
from torch import nn

import spamm_torch
import study_vgg13
from common import results
from common.console import exit_code, make_console
from models.data import ROOT_VARIABLE
from models.vgg13 import CONVOLUTIONS, VGG13
from study.accuracy import HeldRatio, cached_inputs, dense_accuracy, spamm_accuracy
from study.groups import said_of_study
from study.layouts import LAYOUTS, Im2colConv2d, ImageMajor, PixelBlocks, im2col_operands
from study.plan import GROUPS, PAPER
from study.timing import layer_inputs, time_layer

by_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.label)
pixel_layouts = pytest.mark.parametrize(
    "layout",
    [*LAYOUTS[1:], PixelBlocks("in between", 64, (16, 2, 2))],
    ids=lambda layout: layout.label,
)


@pytest.fixture
def conv():
    torch.manual_seed(0)
    return nn.Conv2d(70, 40, 3, padding=1).requires_grad_(False)


@pytest.fixture
def x():
    """Activations as ReLUs leave them, fading to the border; more images than a block holds."""
    torch.manual_seed(1)
    fade = torch.hann_window(8, periodic=False)
    x = torch.randn(67, 70, 8, 8).relu() * (0.1 + fade[:, None] * fade)
    return x.contiguous(memory_format=torch.channels_last)


# ---- Layouts ------------------------------------------------------------------------------------


def test_layouts_are_the_papers_and_the_two_that_the_study_sets_against_it():
    assert [layout.block for layout in LAYOUTS] == [32, 64, 64]
    assert [layout.pixel_block for layout in LAYOUTS[1:]] == [(1, 8, 8), (64, 1, 1)]


def test_im2col_operands_are_torchs_unfold_image_after_image(conv, x):
    a, b = im2col_operands(conv, x)
    unfolded = nn.functional.unfold(x, 3, padding=1)  # (images, Ci * 9, H * W)
    assert torch.equal(a, conv.weight.reshape(40, -1))
    assert torch.equal(b, torch.cat(list(unfolded), dim=1))


def test_the_dense_baseline_is_the_convolution(conv, x):
    torch.testing.assert_close(Im2colConv2d(conv, torch.mm)(x), conv(x), rtol=1e-4, atol=1e-4)


@by_layout
def test_nothing_skipped_is_the_convolution(layout, conv, x):
    torch.testing.assert_close(layout.module(conv, 0.0)(x), conv(x), rtol=1e-4, atol=1e-4)


@pixel_layouts
def test_norm_maps_are_those_of_the_documented_matrices(layout, conv, x):
    x = x[:3] if layout.pixel_block[0] == 1 else x[:, :, :3, :2]
    oracle = Im2col(x, conv.weight, padding=1, block=(64, 64, 64), pixel_block=layout.pixel_block)
    norm_a, norm_b = layout.norm_maps(conv, x)
    expected = spamm_torch.norm_map(oracle.columns[0])
    torch.testing.assert_close(norm_a, spamm_torch.norm_map(oracle.weights[0]))
    torch.testing.assert_close(norm_b, oracle.skip_norm(expected))


def test_the_papers_norm_maps_are_those_of_its_matrices(conv, x):
    norm_a, norm_b = LAYOUTS[0].norm_maps(conv, x)
    assert norm_a.shape == (2, 20)  # 40 x 630 in blocks of 32
    assert norm_b.shape == (20, 134)  # 630 x 4288
    a, b = im2col_operands(conv, x)
    torch.testing.assert_close(norm_a[1, 3], a[32:, 96:128].norm())
    torch.testing.assert_close(norm_b[2, 5], b[64:96, 160:192].norm())


@by_layout
@pytest.mark.parametrize("ratio", [0.8, 0.5])
def test_a_held_ratio_is_the_knob_valid_ratio(layout, ratio, conv, x):
    """Up to single blocks at the threshold, whose norms the two take in different order."""
    held = HeldRatio(layout, conv, ratio)
    found = held(x)
    if isinstance(layout, ImageMajor):
        expected = Im2colConv2d(
            conv, lambda a, b: spamm_torch.mm(a, b, valid_ratio=ratio, block=layout.block)
        )(x)
    else:
        expected = spamm_torch.SpAMMConv2d.from_dense(
            conv, valid_ratio=ratio, block=layout.block, pixel_block=layout.pixel_block
        )(x)
    differing = (found - expected).abs() > 1e-4
    assert differing.double().mean() < 0.01
    assert (found - conv(x)).abs().max() > 1e-2  # something was skipped
    assert abs(int(held.valid) / held.total - ratio) < 0.01
    assert len(held.taus) == 1


# ---- Accuracy and times -------------------------------------------------------------------------


@pytest.fixture
def model():
    torch.manual_seed(0)
    return VGG13(width=8).eval().requires_grad_(False)


def batches():
    torch.manual_seed(2)
    return [(torch.rand(10, 3, 32, 32), torch.randint(10, (10,))) for _ in range(3)]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.title)
def test_accuracy_without_skipping_is_the_dense_networks(group, model):
    inputs = cached_inputs(model, group.start, batches(), torch.float32)
    dense = dense_accuracy(model, group, inputs)
    whole = sum(int((model(x).argmax(1) == y).sum()) for x, y in batches())
    assert dense == pytest.approx(100 * whole / 30)
    for layout in LAYOUTS:
        found = spamm_accuracy(model, group, layout, 1.0, inputs)
        assert found.percent == dense
        assert found.valid_ratio == 1
        assert set(found.taus) == set(group.layers)


def test_accuracy_counts_the_products_of_all_layers_and_batches(model):
    group = GROUPS[2]
    inputs = cached_inputs(model, group.start, batches(), torch.float32)
    found = spamm_accuracy(model, group, LAYOUTS[0], 0.4, inputs)
    assert found.valid_ratio == pytest.approx(0.4, abs=0.02)
    assert len(found.taus) == 9
    assert all(tau > 0 for tau in found.taus.values())


def test_layer_inputs_are_the_dense_networks(model):
    x = torch.rand(2, 3, 32, 32)
    inputs = layer_inputs(model, CONVOLUTIONS[1:], x)
    assert list(inputs) == list(CONVOLUTIONS[1:])
    for name, found in inputs.items():
        assert torch.equal(found, model.split(name)[0](x))


def test_times_are_taken_of_every_candidate(conv, x):
    settings = [(layout, ratio) for ratio in (0.9, 0.5) for layout in LAYOUTS]
    times = time_layer(conv, x, settings, repeats=2)
    assert len(times) == 3 + len(settings) + 2  # dense ones, layers, the paper's products
    assert all(ms > 0 for ms in times.values())


# ---- The plan -----------------------------------------------------------------------------------


def test_the_plan_covers_the_papers_settings_and_goes_down_to_30_percent():
    titles = {group.title: group for group in GROUPS}
    for layer in ("conv21", "conv31"):
        papers = [ratio for name, ratio in PAPER if name == layer]
        assert len(papers) == 5
        assert list(titles[layer].ratios[:5]) == papers
    for group in GROUPS:
        assert min(group.ratios) == 0.3
        assert list(group.ratios) == sorted(group.ratios, reverse=True)
    assert [group.layers for group in GROUPS].count(CONVOLUTIONS[1:]) == 1
    assert any(group.shifted for group in GROUPS)


# ---- The script ---------------------------------------------------------------------------------


def study(*arguments):
    study_vgg13.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def tiny_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    write_part(root, "t10k", *digits(150))
    return root


@pytest.fixture(scope="module")
def finished(tiny_root):
    """One whole run: folder of the results and what it printed."""
    out = tiny_root / "with space" / "results"
    checkpoint = tiny_root / "c.pt"
    console = make_console()
    with console.capture() as printed, pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_vgg13, "make_console", lambda: console)
        patch.delenv(ROOT_VARIABLE, raising=False)
        study(
            *("--width", 2, "--epochs", 1, "--batch", 15, "--repeats", 1, "--device", "cpu"),
            *("--data", tiny_root, "--out", out, "--checkpoint", checkpoint),
        )
    return out, printed.get()


def test_a_run_trains_where_there_is_no_checkpoint_and_writes_three_files(finished):
    out, printed = finished
    assert sorted(path.name for path in out.iterdir()) == [
        "study_cpu.json",
        "study_cpu.md",
        "study_cpu.png",
    ]
    assert "epoch 1 of 1" in printed
    for path in out.iterdir():
        assert str(path) in printed.replace("\n", "")
    assert (out / "study_cpu.png").read_bytes().startswith(b"\x89PNG")


def test_tables_hold_every_setting(finished):
    [run] = results.load(finished[0] / "study_cpu.json")["runs"]
    assert "150 images" in run["header"]["data"]
    assert torch.__version__ in run["header"]["torch"]
    tables = run["tables"]
    dense = {row["title"]: row for row in tables["study, dense"]}
    assert list(dense) == [group.title for group in GROUPS]
    for plan in GROUPS:
        of_dense = dense[plan.title]
        rows = [row for row in tables["study"] if row["title"] == plan.title]
        assert len(rows) == 3 * len(plan.ratios)
        assert set(of_dense["gemms"]) == set(plan.layers)
        for row in rows:
            change = row["accuracy"] - of_dense["dense_accuracy"]
            assert row["accuracy_change"] == pytest.approx(change)
            if plan.shifted:
                assert row["ms"] is None
                continue
            assert row["over_conv"] == pytest.approx(of_dense["conv_ms"] / row["ms"])
            gemm = of_dense["im2col_gemm_ms"] / row["ms"]
            assert row["over_im2col_gemm"] == pytest.approx(gemm)
            assert (row["over_gemm"] is not None) == (row["layout"] == "paper")
            papers = PAPER.get((plan.title, row["ratio"]))
            assert row["paper_speedup"] == (papers and papers.speedup)
    assert dense["conv31"]["gemms"] == {"conv31": [8, 36, 15 * 64]}


def test_tables_are_on_the_page_and_on_the_terminal(finished):
    out, printed = finished
    text = (out / "study_cpu.md").read_text()
    for group in GROUPS:
        assert group.title in printed
        for ratio in group.ratios:
            assert text.count(f"| {group.title} | float32 | {100 * ratio:.4g}% |") == 1
    assert "study_cpu.png" in text


def test_a_second_run_takes_the_checkpoint(finished, tiny_root, capsys, monkeypatch):
    monkeypatch.setattr(study_vgg13, "GROUPS", GROUPS[1:2])
    checkpoint = tiny_root / "c.pt"
    content = checkpoint.read_bytes()
    study(
        *("--device", "cpu", "--repeats", 1, "--dtype", "bfloat16", "float32"),
        *("--checkpoint", checkpoint, "--data", tiny_root, "--out", tiny_root / "2"),
    )
    assert "already trained" in capsys.readouterr().out
    assert checkpoint.read_bytes() == content
    dense = tables_of(tiny_root / "2" / "study_cpu.json")["study, dense"]
    assert [row["precision"] for row in dense] == ["bfloat16", "float32"]


def test_an_interrupted_run_goes_on_with_the_groups_that_are_missing(
    finished, tiny_root, capsys, monkeypatch
):
    """Stopped in the third of four groups; then with other settings; then as before."""
    out = tiny_root / "interrupted"
    options = ["--device", "cpu", "--checkpoint", tiny_root / "c.pt", "--data", tiny_root]
    options += ["--out", out]
    journal = out / "study_cpu.partial.json"
    whole, studied = study_vgg13.study_group, []

    def interrupt(group, *rest):
        if len(studied) == 2:
            raise KeyboardInterrupt
        studied.append(group.title)
        return whole(group, *rest)

    monkeypatch.setattr(study_vgg13, "study_group", interrupt)
    code, _, errors = run(capsys, *options, "--repeats", 1)
    assert code == 130
    assert errors == [
        f"interrupted: finished groups are in {journal}; the same command goes on from there"
    ]
    assert [path.name for path in out.iterdir()] == [journal.name]

    code, _, errors = run(capsys, *options, "--repeats", 2)
    assert code == 1
    assert errors == [
        f"error: expected repeats 1, as in the unfinished run in {journal}; got 2: give the same "
        "options, or measure anew with --fresh"
    ]

    def record(group, *rest):
        studied.append(group.title)
        return whole(group, *rest)

    monkeypatch.setattr(study_vgg13, "study_group", record)
    code, printed, _ = run(capsys, *options, "--repeats", 1)
    assert code == 0
    assert "resumed from" in printed
    assert studied == [group.title for group in GROUPS]
    dense = tables_of(out / "study_cpu.json")["study, dense"]
    assert [row["title"] for row in dense] == studied
    assert not journal.exists()


# ---- The conclusion -----------------------------------------------------------------------------


def test_the_conclusion_is_the_fastest_setting_that_loses_little():
    def row(layout, ratio, change, speedup):
        place = {"title": "conv12 to conv52", "precision": "float32", "layout": layout}
        return place | {"valid_ratio": ratio, "accuracy_change": change, "over_conv": speedup}

    rows = [
        row("by position", 0.7, 0.05, 1.28),
        row("by position", 0.5, -0.5, 1.67),
        row("by position", 0.3, -7.0, 2.4),
        row("paper", 0.7, -15.0, 0.6),
    ]
    said = said_of_study(rows)
    assert "in float32 1.67x as fast (by position, 50% of the block products kept, -0.50" in said
    assert said_of_study(rows[2:]).endswith("in float32 no setting.")


# ---- Bad input ----------------------------------------------------------------------------------


def run(capsys, *arguments):
    code = exit_code(lambda: study(*arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err.splitlines()


def test_a_folder_that_cannot_be_written_fails_before_any_work(capsys, tmp_path):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "results"
    code, printed, errors = run(capsys, "--out", out, "--checkpoint", tmp_path / "c.pt")
    assert code == 1
    assert printed == ""
    assert len(errors) == 1
    assert str(out) in errors[0]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_missing_data(capsys, tmp_path):
    code, _, errors = run(
        capsys,
        *("--data", tmp_path / "none", "--out", tmp_path / "out"),
        *("--checkpoint", tmp_path / "c.pt"),
    )
    assert code == 1
    assert len(errors) == 1
    assert str(tmp_path / "none") in errors[0]
    assert not (tmp_path / "c.pt").exists()


def test_a_damaged_checkpoint(capsys, tmp_path, tiny_root):
    checkpoint = tmp_path / "c.pt"
    checkpoint.write_bytes(b"no checkpoint")
    code, _, errors = run(
        capsys, "--checkpoint", checkpoint, "--data", tiny_root, "--out", tmp_path / "out"
    )
    assert code == 1
    assert len(errors) == 1
    assert str(checkpoint) in errors[0]
    assert checkpoint.read_bytes() == b"no checkpoint"


def test_tf32_is_cudas(capsys, tmp_path):
    code, _, errors = run(capsys, "--device", "cpu", "--dtype", "tf32", "--out", tmp_path)
    assert code == 1
    assert errors == ["error: expected --device cuda for --dtype tf32; got cpu"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none(capsys, tmp_path):
    code, _, errors = run(capsys, "--device", "cuda", "--out", tmp_path)
    assert code == 1
    assert len(errors) == 1
    assert "--device cuda" in errors[0]
