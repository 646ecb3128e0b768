"""Table 5: its layouts, its accuracy, its times and its plan."""

import pytest
import torch
from torch import nn

from models.vgg13 import CONVOLUTIONS, VGG13
from tables import table_5
from tables.layouts import LAYOUTS, im2col_conv, im2col_operands
from tables.table_5 import GROUPS, HeldRatio

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
