"""convert_(order_batch=True): the generated forward takes its batches in order of likeness."""

import copy
import pickle

import pytest
import torch
from small_models import resnet
from test_convert_errors import refused
from torch import nn

from spamm_torch import OrderedBatch, SpAMMConfig, convert_, refresh_, revert_
from spamm_torch.networks.fused import ORDER

SKIPS = SpAMMConfig(valid_ratio=0.5)
LAYER = "layer1.0.conv2"


def batch(count=150, size=16, edge=5):
    """A bright square somewhere in each picture."""
    pictures = torch.zeros(count, 3, size, size)
    corners = torch.randint(0, size - edge + 1, (count, 2))
    for picture, (top, left) in zip(pictures, corners.tolist(), strict=True):
        picture[:, top : top + edge, left : left + edge] = 1 + torch.rand(edge, edge)
    return pictures


@pytest.fixture
def converted(measured):
    """A model of which one layer skips, as it was, converted, and converted with order_batch."""
    measured([1.0, 2.0, 3.0], [3.0, 1.0, 1.0, 1.0])
    torch.manual_seed(0)
    model, images = resnet(), batch()
    plain, ordered = copy.deepcopy(model), copy.deepcopy(model)
    convert_(plain, overrides={LAYER: SKIPS}, example_input=images)
    report = convert_(ordered, overrides={LAYER: SKIPS}, example_input=images, order_batch=True)
    assert "batches are not ordered: no layer skips" not in report.notes
    return model, plain, ordered, images


def test_results_are_those_of_an_ordered_batch(converted):
    model, plain, ordered, images = converted
    assert list(ordered.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        expected = OrderedBatch(plain)(images)
        assert torch.equal(ordered(images), expected)
        assert not torch.equal(plain(images), expected)
        copies = copy.deepcopy(ordered), pickle.loads(pickle.dumps(ordered))
        for same in (*copies, refresh_(copies[0])):
            assert torch.equal(same(images), expected)
        compiled = torch.compile(ordered, fullgraph=True, backend="eager")
        assert torch.equal(compiled(images), expected)


def test_reverting_forgets_the_order(converted):
    model, _, ordered, images = converted
    revert_(ordered)
    with torch.no_grad():
        assert torch.equal(ordered(images), model(images))
    assert ordered.__dict__.keys() == model.__dict__.keys()


def test_converting_anew_forgets_the_order(converted):
    _, plain, ordered, images = converted
    convert_(ordered, overrides={LAYER: SKIPS}, example_input=images)
    with torch.no_grad():
        assert torch.equal(ordered(images), plain(images))


def test_where_nothing_skips_nothing_is_ordered(measured):
    measured([1.0, 2.0, 3.0], [3.0, 1.0, 1.0, 1.0])
    report = convert_(resnet(), example_input=batch(4), order_batch=True)
    assert "batches are not ordered: no layer skips" in report.notes


def test_blocks_of_one_image_need_no_order(measured):
    measured([1.0, 2.0, 3.0], [3.0, 1.0, 1.0, 1.0])
    model, setting = resnet(), SpAMMConfig(valid_ratio=0.5, pixel_block=(1, 8, 8))
    report = convert_(model, overrides={LAYER: setting}, example_input=batch(4), order_batch=True)
    assert report.notes[-1] == "batches are not ordered: all blocks are of one image"
    assert ORDER not in model.__dict__


def test_a_forward_that_hooks_took_away_leaves_no_order(converted):
    _, _, ordered, _ = converted
    assert ORDER in ordered.__dict__
    layers = [layer for layer in ordered.modules() if not list(layer.children())]
    hooks = [layer.register_forward_hook(lambda *_: None) for layer in layers]
    refresh_(ordered)
    for hook in hooks:
        hook.remove()
    revert_(ordered)
    assert ORDER not in ordered.__dict__


def test_bad_models():
    class Untraceable(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = resnet()

        def forward(self, x):
            return self.body(x) if x.sum() > 0 else self.body(-x)

    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.relu = nn.Conv2d(32, 32, 3), nn.ReLU()

        def forward(self, x):
            return self.relu(self.conv(x)).sum(0)

    options = {"overrides": {"body." + LAYER: SKIPS}, "order_batch": True}
    message = "a model that has a generated forward as a whole; got Untraceable"
    refused(Untraceable().eval(), ValueError, message, example_input=batch(4), **options)
    options["overrides"] = {"conv": SKIPS}
    message = "a result must have the batch of 4 as first dimension; got shape (32, 3, 3)"
    images = torch.rand(4, 32, 5, 5)
    refused(Summed().eval(), ValueError, message, example_input=images, **options)
    message = "order_batch must be True or False; got 64"
    refused(resnet(), TypeError, message, example_input=batch(4), order_batch=64)
