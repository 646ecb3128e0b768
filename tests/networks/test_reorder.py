"""convert_(reorder=True): generated forwards put channels in the order of their norms."""

import copy
import itertools
import pickle

import pytest
import torch
from small_models import Block, is_served, pictures, resnet, trained
from test_convert_errors import refused
from torch import nn
from torch.nn import functional as F

from models.unet import UNet
from spamm_torch import SpAMMConfig, convert_, record_stats, refresh_, revert_
from spamm_torch.networks.capture import capture
from spamm_torch.networks.channel_groups import find_groups
from spamm_torch.networks.fused import fused_of
from spamm_torch.networks.sites import alike_by_shapes, find_sites

NEARLY_NOTHING = SpAMMConfig(tau=1e-30)  # may skip, and skips zeros alone


def relative(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def chain(channels=(3, 64, 128, 96), seed=0):
    """Convolutions whose output channels differ in norm, in no order; then a linear layer."""
    torch.manual_seed(seed)
    layers = []
    for before, after in itertools.pairwise(channels):
        conv = nn.Conv2d(before, after, 3, padding=1)
        scale = torch.logspace(0, -3, after)[torch.randperm(after)]
        conv.weight.data *= scale[:, None, None, None]
        conv.bias.data *= scale
        layers += [conv, nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * channels[-1], 5)).eval()


class Groups(nn.Module):
    """A grouped convolution between two plain ones, and a batch norm that nothing absorbs."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, padding=1)
        self.grouped = nn.Conv2d(64, 64, 3, padding=1, groups=2)
        self.last = nn.Conv2d(64, 64, 3, padding=1)
        self.norm = nn.BatchNorm2d(64)
        self.plain = nn.Conv2d(64, 64, 3, padding=1)

    def forward(self, x):
        x = self.last(F.relu(self.grouped(self.first(x))))
        return self.plain(self.norm(F.relu(x))).sum(1)


MODELS = {
    "chain": lambda: chain(),
    "resnet": resnet,
    "unet": lambda: trained(UNet(width=32, depth=1)),
    "groups": lambda: trained(Groups()),
    "block": lambda: trained(nn.Sequential(Block(3, 64), Block(64, 64), nn.Flatten())),
}


def islands(model):
    """The only island of a model, with its sites."""
    (island,) = capture(model).islands
    return island, find_sites(island, alike_by_shapes([], []))


# ---- The function is the same -------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("with_example", [True, False])
def test_the_function_is_the_same(name, with_example, measured, device):
    measured([2.0, 3.0, 1.0, 4.0], [3.0, 2.0, 1.0, 4.0])
    limit = 1e-5 if device.type == "cpu" else 5e-3  # torch's own convolutions may take TF32
    model, x = MODELS[name]().to(device), pictures(10).to(device)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with torch.no_grad():
        expected = model(x)
    example = {"example_input": x} if with_example else {}
    report = convert_(model, NEARLY_NOTHING, reorder=True, **example)
    assert any(note.startswith("channels in the order of their norms") for note in report.notes)
    assert is_served(model, x)
    with torch.no_grad():
        assert relative(model(x), expected) < limit
        assert relative(model(x[:3]), expected[:3]) < limit
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[key])
    revert_(model)
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_norms_travel_in_the_order_too(device):
    """In half precision, where layers on Hopper compute the norms of their outputs."""
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    model = chain().to(device, dtype, memory_format=torch.channels_last)
    x = pictures(130).abs().to(device, dtype, memory_format=torch.channels_last)
    layers = {name: SpAMMConfig(valid_ratio=0.9) for name in ("3", "6")}
    with torch.no_grad():
        expected = model(x)
        convert_(model, overrides=layers, reorder=True)
        assert is_served(model, x)
        assert relative(model(x).float(), expected.float()) < 0.05


@pytest.fixture
def ordered():
    """A chain of which all layers skip at half of their products: plain and ordered, and images."""
    model, x = chain(), pictures(66).abs()
    plain, reordered = copy.deepcopy(model), copy.deepcopy(model)
    setting = SpAMMConfig(valid_ratio=0.5, block=32)
    layers = {name: setting for name in ("3", "6")}
    convert_(plain, overrides=layers)
    convert_(reordered, overrides=layers, reorder=True)
    return model, plain, reordered, x


def test_the_same_share_loses_less(ordered):
    model, plain, reordered, x = ordered
    with torch.no_grad():
        expected = model(x)
        lost = relative(plain(x), expected)
        lost_ordered = relative(reordered(x), expected)
    assert lost > 1e-3
    assert lost_ordered < lost / 3
    for converted in (plain, reordered):
        with record_stats(converted) as stats, torch.no_grad():
            converted(x)
        for layer in ("3", "6"):
            assert stats[layer].valid_ratio == pytest.approx(0.5, abs=0.02)


def test_copies_pickles_and_compiled_code_have_the_order(ordered):
    _, _, reordered, x = ordered
    with torch.no_grad():
        expected = reordered(x)
        copies = [copy.deepcopy(reordered), pickle.loads(pickle.dumps(reordered))]
        for same in (*copies, refresh_(copies[0])):
            assert is_served(same, x)
            assert torch.equal(same(x), expected)
        compiled = torch.compile(reordered, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), expected)


@pytest.fixture
def exact():
    """A chain with channels in order that loses nothing, and images."""
    model = chain()
    convert_(model, NEARLY_NOTHING, reorder=True)
    return model, pictures(66)


def test_weights_that_change_are_put_in_order(exact):
    model, x = exact
    other = chain(seed=1)
    model.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert is_served(model, x)
        assert relative(model(x), other(x)) < 1e-5
        for parameter in (*model[3].parameters(), *other[3].parameters()):
            parameter.mul_(0.5)
        assert is_served(model, x)
        assert relative(model(x), other(x)) < 1e-5


@pytest.mark.parametrize("hooked", ["1", "3", "5", "6"])
def test_a_hook_changes_what_is_tied_and_no_result(exact, hooked):
    model, x = exact
    with torch.no_grad():
        expected = model(x)
    seen = []
    model[int(hooked)].register_forward_hook(lambda *_: seen.append(1))
    refresh_(model)
    with torch.no_grad():
        assert relative(model(x), expected) < 1e-5
    assert seen
    assert is_served(model, x)


def test_a_single_image_without_a_batch():
    x = pictures(1)
    trunk = nn.Sequential(*list(chain())[:-2], nn.Flatten(0)).eval()
    convert_(trunk, NEARLY_NOTHING, reorder=True)
    with torch.no_grad():
        assert is_served(trunk, x[0])
        assert relative(trunk(x[0]), revert_(copy.deepcopy(trunk))(x[0])) < 1e-5


# ---- Which channels ------------------------------------------------------------------------------


def test_channels_are_in_the_order_of_what_they_add():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 1), nn.ReLU(), nn.Conv2d(64, 64, 1), nn.Flatten())
    x = pictures(4).abs()
    convert_(model.eval(), overrides={"2": SpAMMConfig(tau=1e-30)}, reorder=True, example_input=x)
    first, second = fused_of(model).operands[0], fused_of(model).operands[3]
    with torch.no_grad():
        values, weight = F.relu(model[0](x)).double(), model[2].weight.double()
        norms = values.square().sum((0, 2, 3)) * weight.square().sum((0, 2, 3))
        order = norms.argsort(descending=True, stable=True)
        assert torch.equal(first, model[0].weight[order])
        rows = second.square().sum((1, 2, 3))
        assert torch.equal(rows, rows.sort(descending=True).values)


def test_groups_of_channels_are_tied_as_values_are():
    island, sites = islands(trained(nn.Sequential(Block(64, 64), Block(64, 64), nn.ReLU())))
    groups = find_groups(island, sites)
    assert not [
        g for g in groups.free() if "conv2" in g.producers[0].name
    ]  # the input has no order
    inner = [group.producers[0].name for group in groups.free()]
    assert inner == ["0.conv1", "1.conv1"]


def test_channels_of_a_residual_stream_have_one_order():
    model = trained(nn.Sequential(Block(3, 64), Block(64, 64), nn.Flatten()))
    island, _ = islands(model)
    sites = find_sites(island, lambda *_: True)
    groups = find_groups(island, sites)
    stream = groups.outputs["0.conv2"].found()
    assert stream is groups.outputs["1.conv2"].found()
    assert stream is groups.outputs["0.downsample.0"].found()
    assert len(groups.exits) == 1


def test_what_is_grouped_or_normalised_apart_keeps_its_order():
    model = trained(Groups())
    island, sites = islands(model)
    groups = find_groups(island, sites)
    assert groups.free() == []


# ---- Bad input and nothing to do -----------------------------------------------------------------


def test_where_nothing_skips_nothing_is_ordered():
    report = convert_(resnet(), reorder=True)
    assert "channels in the order of their norms: 0 of 6 layers" in report.notes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reorder": 1}, ("reorder", "1")),
        ({"reorder": True, "fuse": False}, ("reorder=True", "fuse=False")),
        (
            {"reorder": True, "reference": torch.zeros(1, 3, 16, 16)},
            ("reorder=True", "a reference"),
        ),
    ],
)
def test_options_that_contradict_each_other(options, words):
    kind = TypeError if options["reorder"] is not True else ValueError
    for word in words:
        refused(resnet(), kind, word, **options)
