"""SpAMMChain: what is set on its layers from outside is not passed by."""

import copy

import pytest
import torch
from torch import nn

from spamm_torch import SpAMMConv2d, fuse_

pytestmark = pytest.mark.usefixtures("norms_passed_on")


def conv(in_channels, out_channels):
    return SpAMMConv2d(in_channels, out_channels, 3, padding=1, tau=0.5)


@pytest.fixture
def chain():
    """A model that is one chain: two convolutions with a max pool between them."""
    torch.manual_seed(0)
    model = nn.Sequential(conv(8, 64), nn.MaxPool2d(2), conv(64, 8)).eval()
    fuse_(model)
    return model[0]


@pytest.fixture
def input():
    return torch.randn(64, 8, 6, 6, generator=torch.Generator().manual_seed(1))


def passes_norms_on(chain, input):
    with torch.no_grad():
        return chain._passes_norms_on(input)


def test_a_chain_is_one_call(chain, input):
    assert passes_norms_on(chain, input)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_forward_set_on_a_layer_is_called(chain, input, number):
    layer, original = chain[number], chain[number].forward
    layer.forward = lambda input: original(input) + 1
    with torch.no_grad():
        expected = input
        for each in chain:
            expected = each(expected)
        assert torch.equal(chain(input), expected)
        del layer.forward
        assert not torch.equal(chain(input), expected)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_hooks_on_all_modules_see_the_layers(chain, input, kind):
    seen = []
    register = getattr(nn.modules.module, f"register_module_{kind}")
    handle = register(lambda module, *_: seen.append(type(module)))
    try:
        assert not passes_norms_on(chain, input)
        with torch.no_grad():
            chain(input)
    finally:
        handle.remove()
    assert seen.count(SpAMMConv2d) == (0 if kind == "full_backward_hook" else 2)
    assert passes_norms_on(chain, input)


def test_a_replica_of_data_parallel_runs_its_layers(chain, input):
    replica = chain._replicate_for_data_parallel()
    for name, layer in chain._modules.items():
        replica._modules[name] = copied = layer._replicate_for_data_parallel()
        for parameter, value in layer._parameters.items():  # as nn.parallel.replicate does it
            setattr(copied, parameter, value.detach().clone())
    with torch.no_grad():
        assert torch.equal(replica(input), nn.Sequential(*replica._modules.values())(input))


@pytest.mark.cuda
def test_data_parallel_on_several_devices(chain):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    model = chain.cuda().half()
    input = torch.randn(256, 8, 6, 6, device="cuda").half()
    with torch.no_grad():
        parts = [model(part) for part in input.chunk(torch.cuda.device_count())]
        torch.testing.assert_close(nn.DataParallel(model)(input), torch.cat(parts))


def test_vmap_runs_the_layers(chain, input):
    stacked = torch.stack([input, 2 * input])
    with torch.no_grad():
        expected = torch.stack([chain(input), chain(2 * input)])
        torch.testing.assert_close(torch.func.vmap(chain)(stacked), expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracing_records_the_layers(chain, input):
    with torch.no_grad():
        traced = torch.jit.trace(chain, input, check_trace=False)
        torch.testing.assert_close(traced(2 * input), chain(2 * input))


# ---- fuse_ --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["0", "1"])
def test_a_layer_with_a_forward_of_its_own_is_left(name):
    model = nn.Sequential(conv(8, 8), nn.ReLU(), conv(8, 8)).eval()
    layer = model._modules[name]
    original = layer.forward
    layer.forward = lambda input: original(input) * 3
    input = torch.randn(2, 8, 6, 6)
    with torch.no_grad():
        expected = model(input)
        left = [(f.name, f.detail) for f in fuse_(model) if f.action == "left"]
        assert left == [(name, "has a forward of its own")]
        assert torch.equal(model(input), expected)


def test_a_linear_layer_with_a_forward_of_its_own_is_left():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    model[0].forward = lambda input: input - 1
    fuse_(model)
    input = torch.rand(2, 4)
    assert torch.equal(model(input), torch.zeros_like(input))


def test_a_sequential_with_a_forward_of_its_own_is_left():
    model = nn.Sequential(conv(8, 8), nn.ReLU()).eval()
    model.forward = lambda input: model[1](model[0](input)) + 1
    before = copy.copy(model._modules)
    fuse_(model)
    assert model._modules == before
