"""Tables 4 and 5: what they measure, and what they conclude."""

import pytest
import torch
from torch import nn

import spamm_torch
from models.files import UserError
from models.vgg13 import CONVOLUTIONS, VGG13
from models.water import matrices
from models.water.matrices import load
from models.water.model import model_density, model_fock, overlap, water_cluster
from tables import table_4, table_5
from tables.table_5 import GROUPS, LAYOUTS, HeldRatio, im2col_conv, im2col_operands

by_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.label)


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


def test_im2col_operands_are_torchs_unfold_image_after_image(conv, x):
    a, b = im2col_operands(conv, x)
    unfolded = nn.functional.unfold(x, 3, padding=1)  # (images, Ci * 9, H * W)
    assert torch.equal(a, conv.weight.reshape(40, -1))
    assert torch.equal(b, torch.cat(list(unfolded), dim=1))
    torch.testing.assert_close(im2col_conv(conv, x), conv(x), rtol=1e-4, atol=1e-4)


@by_layout
def test_nothing_skipped_is_the_convolution(layout, conv, x):
    torch.testing.assert_close(layout.run(conv, x, tau=0.0), conv(x), rtol=1e-4, atol=1e-4)


@by_layout
@pytest.mark.parametrize("ratio", [0.8, 0.5])
def test_a_held_ratio_keeps_what_its_threshold_keeps(layout, ratio, conv, x):
    held = HeldRatio(layout, conv, ratio)
    found = held(x)
    [tau] = held.taus
    torch.testing.assert_close(found, layout.run(conv, x, tau=tau.item()))
    assert (found - conv(x)).abs().max() > 1e-2  # something was skipped
    assert table_5.valid_share([held]) == pytest.approx(ratio, abs=0.01)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return VGG13(width=8).eval().requires_grad_(False)


def batches():
    torch.manual_seed(2)
    return [(torch.rand(10, 3, 32, 32), torch.randint(10, (10,))) for _ in range(3)]


@pytest.mark.parametrize("title", [title for title, of in GROUPS.items() if not of.shifted])
def test_accuracy_without_skipping_is_the_dense_networks(title, model):
    group = GROUPS[title]
    inputs = table_5.cached_inputs(model, group.start, batches())
    whole = sum(int((model(x).argmax(1) == y).sum()) for x, y in batches())
    for layout in LAYOUTS:
        percent, replaced = table_5.spamm_accuracy(model, group, layout, 1.0, inputs)
        assert percent == pytest.approx(100 * whole / 30)
        assert table_5.valid_share(replaced.values()) == 1
        assert set(replaced) == set(group.layers)


def test_accuracy_counts_the_products_of_all_layers_and_batches(model):
    group = GROUPS["conv12 to conv52"]
    inputs = table_5.cached_inputs(model, group.start, batches())
    _, replaced = table_5.spamm_accuracy(model, group, LAYOUTS[0], 0.4, inputs)
    assert table_5.valid_share(replaced.values()) == pytest.approx(0.4, abs=0.02)
    assert len(replaced) == 9
    assert all(min(layer.taus) > 0 for layer in replaced.values())


def test_layer_inputs_are_the_dense_networks(model):
    x = torch.rand(2, 3, 32, 32)
    inputs = table_5.layer_inputs(model, CONVOLUTIONS[1:], x)
    assert list(inputs) == list(CONVOLUTIONS[1:])
    for name, found in inputs.items():
        assert torch.equal(found, model.split(name)[0](x))


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
    said = table_5.said({"study": rows})
    assert "in float32 1.67x as fast (by position, 50% of the block products kept, -0.50" in said
    assert table_5.said({"study": rows[2:]}).endswith("in float32 no setting.")


# ---- Table 4: squares of a cluster's matrices, their errors, what is skipped ---------------------


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
