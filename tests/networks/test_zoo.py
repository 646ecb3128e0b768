"""convert_ on networks as people use them: results, identity, training, copies, compilers."""

import copy
import pickle
import re

import pytest
import torch
from small_models import ZOO, ZooCase, detector, output_of
from support import one_thread  # noqa: F401  the fixture is automatic
from torch import nn

import spamm_torch
from spamm_torch import SpAMMConfig, convert_, revert_

# Relative: float32 rounds in other places, and batch norms over few pixels pass that on, enlarged.
# The dense networks are as far from float64.
TOLERANCE = 3e-4
# Skips blocks of zeros at most, but takes norms and asks of each block.
NOTHING_TO_SKIP = SpAMMConfig(tau=1e-30, pixel_block=(64, 1, 1))
# Residuals; concatenations, pools and upsampling; depthwise convolutions; channels that are split.
SMALL = ("resnet18", "unet", "mobilenet_v3_small", "shufflenet_v2_x0_5")
# Inductor takes minutes for the kernels of the others, which are like those of these; of the first
# stage of a ResNet tests/serving/test_freeze.py has the code.
COMPILED = (*SMALL, "vgg13_bn", "resnet50", "googlenet", "efficientnet_b0")


def thorough_but(few, names):
    """The names; all but few are for the tests of every combination."""
    others = [name for name in names if name not in few]
    return [*few, *(pytest.param(name, marks=pytest.mark.thorough) for name in others)]


class Converted:
    """A network of the zoo, dense and converted; engines are those of the table, not measured."""

    def __init__(self, name, config=NOTHING_TO_SKIP, **rest):
        case: ZooCase = ZOO[name]
        self.case, self.pictures = case, case.pictures()
        self.model = case.model()
        self.dense = copy.deepcopy(self.model)
        self.before = identities(self.model)
        self.report = convert_(self.model, config, **rest)
        with torch.no_grad():
            self.expected = output_of(self.dense, self.pictures)


@pytest.fixture(scope="module", params=thorough_but(SMALL, ZOO))
def converted(request):
    """Tests that change the network copy it."""
    return Converted(request.param)


def identities(model):
    """What convert_ must leave as it is: which object stands under which name."""
    found = {name: id(module) for name, module in model.named_modules()}
    found |= {name: id(parameter) for name, parameter in model.named_parameters()}
    return found | {name: value.data_ptr() for name, value in model.state_dict().items()}


def assert_close(output, expected, tolerance=TOLERANCE):
    error = ((output - expected).norm() / expected.norm()).item()
    assert error <= tolerance


def ops_called(call):
    """{name: how often} of the ops that a call runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.key: event.count for event in profile.key_averages()}


def fused_calls(ops):
    """How many calls of the library's convolutions."""
    return sum(ops.get(f"spamm_torch::{name}", 0) for name in ("conv2d", "dense_conv2d"))


# ---- What a conversion is -----------------------------------------------------------------------


@torch.no_grad()
def test_results_are_the_dense_networks(converted):
    output = output_of(converted.model, converted.pictures)
    assert output.shape == converted.expected.shape
    assert output.stride() == converted.expected.stride()
    assert_close(output, converted.expected)


@pytest.mark.parametrize("name", thorough_but(SMALL, ZOO))
@torch.no_grad()
def test_an_example_chooses_engines_and_keeps_results(name):
    """Whichever are the fastest here: a dense network may be left as it was."""
    case = ZOO[name]
    model, pictures = case.model(), case.pictures()
    expected = output_of(model, pictures)
    report = convert_(model, example_input=pictures)
    assert len(report) >= sum(isinstance(module, nn.Conv2d) for module in model.modules())
    assert "measured" in str(report)
    assert_close(output_of(model, pictures), expected)


@torch.no_grad()
def test_batch_norms_are_folded(converted):
    """Those behind convolutions, which is all of them in most networks."""
    ops = ops_called(lambda: converted.model(converted.pictures))
    assert fused_calls(ops) > 0
    assert ops.get("aten::batch_norm", 0) == converted.case.batch_norms_left


def test_objects_names_and_keys_stay(converted):
    assert identities(converted.model) == converted.before
    assert list(converted.model.state_dict()) == list(converted.dense.state_dict())
    kinds = zip(converted.model.modules(), converted.dense.modules(), strict=True)
    assert all(isinstance(module, type(dense)) for module, dense in kinds)


def test_every_convolution_has_a_row_with_a_reason(converted):
    rows = {row.name.partition("#")[0]: row for row in converted.report}
    for name, module in converted.model.named_modules():
        if isinstance(module, nn.Conv2d):
            assert rows[name].action in ("spamm", "dense", "left")
            assert rows[name].reason or rows[name].action == "spamm"
            assert name in str(converted.report)


def test_revert_restores_every_bit(converted):
    model = copy.deepcopy(converted.model)
    revert_(model)
    for module, dense in zip(model.modules(), converted.dense.modules(), strict=True):
        assert type(module) is type(dense)
        assert module.__dict__.keys() == dense.__dict__.keys()
    with torch.no_grad():
        assert torch.equal(output_of(model, converted.pictures), converted.expected)
    for name, value in model.state_dict().items():
        assert torch.equal(value, converted.dense.state_dict()[name]), name


@torch.no_grad()
def test_other_batches_and_sizes(converted):
    """A plan of one example serves pictures of any number, size and memory format."""
    size = converted.case.size
    for shape in ((3, size, size), (1, size + 32, size)):
        generator = torch.Generator().manual_seed(3)
        pictures = torch.randn(shape[0], 3, *shape[-2:], generator=generator)
        assert_close(output_of(converted.model, pictures), output_of(converted.dense, pictures))


# ---- Training, state, copies --------------------------------------------------------------------


def train_a_step(model, pictures):
    """The gradients of a step, which it makes; in training mode, dropout from a seed."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        output = output_of(model, pictures)
        (output / output.detach().norm()).square().sum().backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    optimizer.step()
    model.eval()
    return gradients


def test_a_step_of_training(converted):
    """Gradients are the dense network's, and what was folded follows the new weights.

    In float64: over two images batch norms magnify float32's rounding to percents of a gradient.
    """
    model, dense = (copy.deepcopy(net).double() for net in (converted.model, converted.dense))
    pictures = converted.pictures.double()
    gradients, expected = (train_a_step(net, pictures) for net in (model, dense))
    assert_close(gradients, expected, 1e-6)
    dense.load_state_dict(model.state_dict(), strict=True)
    with torch.no_grad():
        trained = output_of(dense, pictures)
        assert_close(output_of(model, pictures), trained, 1e-9)
    assert (trained - converted.expected).norm() > 10 * TOLERANCE * trained.norm()


@pytest.mark.strength(1)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@torch.no_grad()
def test_copies_are_converted_and_their_own(converted, copied):
    model = copied(converted.model)
    output = output_of(converted.model, converted.pictures)
    assert torch.equal(output_of(model, converted.pictures), output)
    ops = [ops_called(lambda m=m: m(converted.pictures)) for m in (model, converted.model)]
    assert fused_calls(ops[0]) == fused_calls(ops[1])
    for parameter in model.parameters():
        parameter.mul_(1.5)
    assert not torch.allclose(output_of(model, converted.pictures), output)
    assert torch.equal(output_of(converted.model, converted.pictures), output)


# ---- Compilers ----------------------------------------------------------------------------------

_KERNEL = re.compile(r"^cpp_fused_(\w+)_\d+ = async_compile", re.MULTILINE)
# The names of kernels that move data and compute nothing. A convolution is a call and no kernel:
# its name in a kernel's says that the kernel writes in the memory format that the call takes.
_MOVING = re.compile(r"(_|to|clone|copy|permute|transpose|contiguous|view|(dense_)?conv2d)+")


@pytest.mark.parametrize("converted", thorough_but(SMALL[:2], ZOO), indirect=True)
@torch.no_grad()
def test_one_graph(converted):
    """Nothing breaks the graph that a compiler gets."""
    torch._dynamo.reset()
    compiled = torch.compile(converted.model, fullgraph=True, dynamic=False, backend="eager")
    assert_close(output_of(compiled, converted.pictures), converted.expected)


@pytest.mark.inductor
@pytest.mark.thorough
@pytest.mark.parametrize("name", COMPILED)
@torch.no_grad()
def test_compiled_without_copies(name):
    of = Converted(name)
    torch._dynamo.reset()
    compiled = torch.compile(of.model, fullgraph=True, dynamic=False)
    output, codes = torch._inductor.utils.run_and_get_code(output_of, compiled, of.pictures)
    assert_close(output, of.expected)
    eager = fused_calls(ops_called(lambda: of.model(of.pictures)))
    calls = re.findall(r"torch\.ops\.spamm_torch\.(?:dense_)?conv2d\.default\(", "".join(codes))
    assert len(calls) == eager
    kernels = [kernel for code in codes for kernel in _KERNEL.findall(code)]
    assert not list(filter(_MOVING.fullmatch, kernels))
    assert name != "resnet18" or len(kernels) == 2  # the max pool, the mean


@pytest.mark.parametrize("converted", thorough_but(SMALL[2:3], ZOO), indirect=True)
@torch.no_grad()
def test_export(converted):
    program = torch.export.export(converted.model, (converted.pictures,))
    assert_close(output_of(program.module(), converted.pictures), converted.expected)
    assert set(program.state_dict) <= set(converted.dense.state_dict())


# ---- Other networks and settings ----------------------------------------------------------------


@torch.no_grad()
def test_a_detector(measured):
    """Control flow that depends on data: its parts are converted one by one."""
    model, pictures = detector()
    measured([1.0, 2.0, 3.0], [3.0, 1.0, 2.0])
    dense = copy.deepcopy(model)
    report = convert_(model, example_input=(pictures,))
    assert any(row.absorbed for row in report)
    features, expected = (m.backbone(torch.stack([pictures[1]] * 2)) for m in (model, dense))
    assert features.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(features[name], value)
    for found, of_dense in zip(model(pictures), dense(pictures), strict=True):
        assert len(of_dense["boxes"]) > 0
        torch.testing.assert_close(found, of_dense, rtol=1e-3, atol=1e-3)
    revert_(model)
    for found, of_dense in zip(model(pictures), dense(pictures), strict=True):
        for name, value in of_dense.items():
            assert torch.equal(found[name], value)


@torch.no_grad()
def test_what_is_skipped_is_what_the_layers_skip():
    """The fused network against the same layers one by one: batch norms fold into the weights, so
    the plain VGG13 is the one to compare."""
    from models.vgg13 import VGG13

    torch.manual_seed(0)
    model = VGG13(width=32).eval().to(memory_format=torch.channels_last)
    fade = torch.hann_window(32) ** 2
    pictures = torch.rand(64, 3, 32, 32) * fade * fade[:, None]
    setting = {"tau": 0.3, "pixel_block": (64, 1, 1)}
    by_hand = copy.deepcopy(model)
    dense = model(pictures)
    report = convert_(model, SpAMMConfig(**setting))
    names = [row.name for row in report if row.action == "spamm"]
    assert len(names) == 9  # all but the first, whose three channels do not fill a block
    for name in names:
        conv = by_hand.get_submodule(name)
        by_hand.set_submodule(name, spamm_torch.SpAMMConv2d.from_dense(conv, **setting))
    expected = by_hand(pictures)
    assert (expected - dense).norm() > 1e-3 * dense.norm()  # something is skipped
    assert_close(model(pictures), expected)
