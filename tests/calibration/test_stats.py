"""record_stats: what layers skipped, in every form in which they are called."""

import math
import re
import threading

import pytest
import torch
from support import waiting_is_an_error
from tiny import dark_pictures, tiny_network, unchanged
from torch import nn
from torch.nn.utils import parametrize
from torchvision.models.resnet import BasicBlock

import spamm_torch
from spamm_torch import SpAMMConfig, SpAMMConv2d, SpAMMLinear, convert_, record_stats

TAU = 0.5
SKIPS = SpAMMConfig(tau=8.0)  # of the tiny network


def info_of(input, weight, **given):
    """The statistics of what a convolution with these tensors skips."""
    given = {"padding": 1, "tau": TAU, **given}
    return spamm_torch.conv2d(input, weight, return_info=True, **given)[1]


def assert_is(stats, info):
    assert stats.calls == 1
    for name in ("tau", "valid_ratio", "error_bound"):
        assert getattr(stats, name) == pytest.approx(getattr(info, name).item(), rel=1e-6)
    assert (stats.block, stats.pixel_block) == info[3:]


def skipping_network(batch_norm=False):
    """The tiny network, with two convolutions that skip."""
    model = tiny_network(batch_norm=batch_norm)
    for name in ("conv_b", "conv_c"):
        setattr(model, name, SpAMMConv2d.from_dense(getattr(model, name), **SKIPS.to_dict()))
    return model


@pytest.mark.parametrize("is_frozen", [False, True])
def test_layers_set_by_hand(device, is_frozen):
    torch.manual_seed(0)
    conv = SpAMMConv2d(32, 64, 3, padding=1, valid_ratio=0.5)
    linear = SpAMMLinear(64, 40, max_error=0.6, block=32)
    model = nn.Sequential(conv, nn.Flatten(2), linear).to(device)
    if is_frozen:
        for place in (0, 2):
            model[place].freeze_()
    input = dark_pictures(2, channels=32, size=8).to(device)
    expected = model(input)
    with record_stats(model) as stats:
        found = model(input)
    assert torch.equal(found, expected)
    conv, _, linear = model
    assert_is(stats["0"], info_of(input, conv.weight, tau=None, valid_ratio=0.5))
    hidden = conv(input).flatten(2)
    _, info = spamm_torch.linear(hidden, linear.weight, max_error=0.6, block=32, return_info=True)
    assert_is(stats["2"], info)
    assert list(stats) == ["0", "2"]
    assert 0 < stats["0"].valid_ratio < 1
    assert 0 < stats["2"].valid_ratio < 1


def test_several_calls_of_one_layer_count_together(device):
    conv = SpAMMConv2d(32, 64, 3, padding=1, tau=TAU).to(device)
    model = nn.Sequential(conv)
    sizes = ((64, 1), (192, 3))
    inputs = [scale * dark_pictures(count, channels=32).to(device) for count, scale in sizes]
    with record_stats(model) as stats:
        model(inputs[0])
        assert stats["0"].calls == 1  # may be read meanwhile
        model(inputs[1])
    first, second = (info_of(input, conv.weight) for input in inputs)
    ratio = (first.valid_ratio + 3 * second.valid_ratio) / 4  # three times as many products
    assert first.valid_ratio < second.valid_ratio
    assert stats["0"].calls == 2
    assert stats["0"].valid_ratio == pytest.approx(ratio.item(), rel=1e-6)
    bound = math.hypot(first.error_bound.item(), second.error_bound.item())
    assert stats["0"].error_bound == pytest.approx(bound, rel=1e-6)


@torch.no_grad()
def test_nothing_is_left_in_the_model():
    model = skipping_network()
    with unchanged(model):
        with record_stats(model) as stats, pytest.raises(RuntimeError):
            model(torch.ones(1, 5, 8, 8))
        model(dark_pictures())
    assert stats["conv_b"].calls == 0  # what is called outside is not recorded
    assert math.isnan(stats["conv_b"].valid_ratio)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_training_and_compiled_models_are_recorded(device, is_compiled):
    model = nn.Sequential(SpAMMConv2d(32, 32, 3, padding=1, tau=TAU)).to(device)
    called = torch.compile(model, backend="eager") if is_compiled else model
    input = dark_pictures(2, channels=32).to(device)
    called(input)
    with record_stats(called) as stats:
        called(input).sum().backward()
    (found,) = stats.values()
    assert_is(found, info_of(input, model[0].weight))
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("more", [{"padding": "same", "dilation": 2}, {"padding_mode": "reflect"}])
def test_padding_that_torch_makes_and_weights_computed_anew(more):
    conv = SpAMMConv2d(32, 64, 3, tau=TAU, **{"padding": 1, **more})
    parametrize.register_parametrization(conv, "weight", nn.Softplus())
    input = dark_pictures(2, channels=32)
    with record_stats(nn.Sequential(conv)) as stats:
        conv(input)
    mode = "reflect" if "padding_mode" in more else "constant"
    padded = nn.functional.pad(input, [conv.dilation[0]] * 4, mode=mode)
    given = {"padding": 0, "dilation": conv.dilation, "pixel_block": (64, 1, 1)}
    assert_is(stats["0"], info_of(padded, conv.weight, **given))


def test_calls_of_other_threads_are_not_counted():
    model = nn.Sequential(SpAMMConv2d(32, 32, 3, padding=1, tau=TAU))
    with record_stats(model) as stats:
        thread = threading.Thread(target=model, args=(dark_pictures(2, channels=32),))
        thread.start()
        thread.join()
    assert stats["0"].calls == 0


def test_the_table():
    model = nn.Sequential(SpAMMConv2d(32, 40, 3, padding=1, tau=TAU), SpAMMLinear(8, 8, tau=0.0))
    with record_stats(model) as stats:
        model[0](dark_pictures(2, channels=32))
    head, first, second = str(stats).splitlines()
    columns = ["layer", "calls", "valid", "tau", "block", "pixel block"]
    assert re.split("  +", head) == [*columns, "error bound"]
    ratio = f"{stats['0'].valid_ratio:.1%}"
    assert first.split()[:6] == ["0", "1", ratio, "0.5", "64x32x64", "64x1x1"]
    assert second.split() == ["1", "0"]


# ---- Settings from what was seen ----------------------------------------------------------------


def residual_network(seed):
    """Blocks of a ResNet whose shortcuts are convolutions."""
    torch.manual_seed(seed)
    blocks = [
        BasicBlock(32, outer, stride, nn.Conv2d(32, outer, 1, stride))
        for outer, stride in ((32, 1), (64, 2))
    ]
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *blocks, nn.Flatten(2)).eval()


@torch.no_grad()
@pytest.mark.parametrize("seed", range(8))
def test_a_tau_that_was_found_is_held_with_its_blocks(seed):
    """In the default blocks of a tau the same number would keep other products, and the number
    that is found, the least product kept, may lie on either side of what the op computes.
    """
    input = dark_pictures(8, seed=seed)
    searching, held = residual_network(seed), residual_network(seed)
    convert_(searching, SpAMMConfig(valid_ratio=0.7))
    with record_stats(searching) as found:
        expected = searching(input)
    assert {stats.pixel_block for stats in found.values()} == {(8, 2, 4)}
    convert_(held, overrides={name: stats.config() for name, stats in found.items()})
    with record_stats(held) as stats:
        torch.testing.assert_close(held(input), expected)
    assert len(stats) == 6
    for name, of_layer in stats.items():
        assert of_layer.valid_ratio == found[name].valid_ratio
        assert 0.5 < of_layer.valid_ratio < 0.9
        assert found[name].config().tau < found[name].tau
        given = of_layer.config()  # of a tau that was given, as it was
        assert given.tau == of_layer.tau == pytest.approx(found[name].config().tau, rel=1e-6)
        assert (given.block, given.pixel_block) == (found[name].block, found[name].pixel_block)


def test_calls_in_several_blocks_have_no_setting():
    model = nn.Sequential(SpAMMConv2d(32, 32, 3, padding=1, valid_ratio=0.5))
    with record_stats(model) as stats:
        line = "^config expects calls of a layer in blocks of one shape; got "
        with pytest.raises(ValueError, match=f"{line}no call$"):
            stats["0"].config()
        for count in (8, 4):
            model(dark_pictures(count, channels=32))
    assert stats["0"].calls == 2
    with pytest.raises(ValueError, match=f"{line}several .batches of several sizes.$"):
        stats["0"].config()


@pytest.mark.parametrize("model", [nn.Linear(4, 4), nn.Conv2d(4, 4, 1)])
def test_a_model_that_skips_nothing_has_an_empty_table(model):
    with record_stats(model) as stats:
        model(torch.ones(1, 4, 4, 4))
    assert dict(stats) == {}
    assert str(stats).splitlines()[1:] == ["no layer of the model skips"]
    line = "^record_stats expects an nn.Module; got NoneType$"
    with pytest.raises(TypeError, match=line), record_stats(None):
        pass


@pytest.mark.cuda
@torch.no_grad()
def test_recording_waits_for_nothing():
    model, input = skipping_network(batch_norm=True).cuda(), dark_pictures().cuda()
    model(input)
    with waiting_is_an_error(), record_stats(model) as stats:
        model(input)
    assert 0 < stats["conv_b"].valid_ratio < 1
