"""The backend of torch.compile: results, engines, late changes, and what a model goes through."""

import pytest
import torch
import torchvision
from processes import python
from support import one_thread, raises_line  # noqa: F401  the fixture is automatic
from torch import nn

from spamm_torch import explain


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def varied(model):
    """The model in eval mode, with batch norms that change what they get."""
    generator = torch.Generator().manual_seed(3)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            for tensor, least, most in (
                (norm.running_mean, -0.2, 0.2),
                (norm.running_var, 0.5, 1.5),
                (norm.weight.data, 0.7, 1.3),
                (norm.bias.data, -0.2, 0.2),
            ):
                tensor.uniform_(least, most, generator=generator)
    return model.eval()


def network(name, **options):
    torch.manual_seed(0)
    return varied(getattr(torchvision.models, name)(weights=None, **options))


def pictures(size=64, count=2, seed=1):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def compiled(model, inner="eager", measure=False, **options):
    given = {"inner": inner, "measure": measure}
    return torch.compile(model, backend="spamm_torch", fullgraph=True, options=given, **options)


def relative_error(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


def test_import_leaves_the_compiler_alone():
    unwanted = "'torch._dynamo', 'torch._inductor', 'torchvision'"
    code = f"import sys, spamm_torch; print([m for m in ({unwanted}) if m in sys.modules])"
    assert python("-c", code, check=True).stdout.strip() == "[]"


def test_backend_is_known_by_its_name():
    code = "import spamm_torch, torch; print('spamm_torch' in torch._dynamo.list_backends())"
    assert python("-c", code, check=True).stdout.strip() == "True"


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "densenet121"])
@torch.no_grad()
def test_network_gives_what_it_gave(name):
    model, images = network(name), pictures()
    expected = model(images)
    assert relative_error(compiled(model)(images), expected) < 1e-5
    report = explain(model)
    convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    assert len(report) == convolutions
    assert {row.action for row in report} == {"dense"}


@torch.no_grad()
def test_resnet_absorbs_all_that_follows():
    model = network("resnet18")
    compiled(model)(pictures())
    report = explain(model)
    assert report["layer1.0.conv1"].absorbed == ("bn", "relu")
    assert report["layer1.0.conv2"].absorbed == ("bn", "add", "relu")
    assert report["layer2.0.downsample.0"].absorbed == ("bn",)


@pytest.mark.inductor
@torch.no_grad()
def test_inductor_computes_the_rest():
    model = network("resnet18").to(memory_format=torch.channels_last)
    images = pictures().to(memory_format=torch.channels_last)
    run = compiled(model, "inductor")
    assert relative_error(run(images), model(images)) < 1e-5
    model.conv1.weight.mul_(2)  # the packed copies follow
    assert relative_error(run(images), model(images)) < 1e-5
