"""``torch.fx.symbolic_trace`` through functions and modules: one node a call, equal results."""

import inspect
import pickle
from pathlib import Path

import matrices
import pytest
import torch
from support import python
from torch import fx, nn
from torch.profiler import ProfilerActivity, profile
from torchvision.models.feature_extraction import create_feature_extractor

import spamm_torch
from spamm_torch import SpAMMConv2d, SpAMMLinear

ops = spamm_torch


def targets(traced):
    return [node.target for node in traced.graph.nodes if node.op == "call_function"]


class Network(nn.Module):
    """Convolutions of several settings, a linear layer, and branches as people write them."""

    def __init__(self, frozen=False):
        super().__init__()
        tau = torch.tensor(0.5)
        self.first = SpAMMConv2d(3, 40, 3, padding="same", tau=0.0, relu=True)
        self.second = SpAMMConv2d(40, 40, 3, padding=1, padding_mode="reflect", tau=tau)
        self.third = SpAMMConv2d(40, 8, 1, max_error=0.1, pixel_block=(1, 8, 8))
        self.head = SpAMMLinear(8, 5, valid_ratio=0.6, block=32)
        self.eval()
        if frozen:
            for module in (self.first, self.second, self.third, self.head):
                module.freeze_()

    def forward(self, input):
        features = self.first(input)
        features = torch.relu(features + self.second(features))
        return self.head(self.third(features).mean((2, 3)))


@pytest.fixture
def image(device):
    return matrices.normal(4, 3, 12, 10, device=device)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model(device, image, frozen):
    model = Network(frozen).to(device)
    traced = fx.symbolic_trace(model)
    assert targets(traced).count(ops.conv2d) == 3
    assert targets(traced).count(ops.linear) == 1
    traced.graph.lint()
    assert torch.equal(traced(image), model(image))
    assert torch.equal(traced(image[:2]), model(image[:2]))


def test_operands_are_a_nodes_arguments_and_settings_its_keywords():
    traced = fx.symbolic_trace(lambda a, b: ops.mm(b=b, a=a, tau=1.0, block=32))
    (node,) = (node for node in traced.graph.nodes if node.op == "call_function")
    assert [operand.name for operand in node.args] == ["a", "b"]
    assert (node.kwargs["tau"], node.kwargs["block"]) == (1.0, 32)


def test_a_traced_model_is_pickled_and_trained(device, image):
    model = Network().to(device).train()
    traced = pickle.loads(pickle.dumps(fx.symbolic_trace(model)))
    model(image).sum().backward()
    traced(image).sum().backward()
    expected = dict(model.named_parameters())
    for name, parameter in traced.named_parameters():
        if device.type == "cpu":
            assert torch.equal(parameter.grad, expected[name].grad)
        else:  # cuDNN's gradients may differ from call to call
            torch.testing.assert_close(parameter.grad, expected[name].grad)


def test_features_by_torchvision(device, image):
    model = Network().to(device)
    extractor = create_feature_extractor(model, {"relu": "features", "head": "scores"})
    found = extractor(image)
    first = model.first(image)
    assert torch.equal(found["features"], torch.relu(first + model.second(first)))
    assert torch.equal(found["scores"], model(image))


def test_functions(device):
    def products(a, b, bias):
        norm_a, norm_b = ops.norm_map(a), ops.norm_map(b)
        tau = ops.find_tau(norm_a, norm_b, 0.5)
        bound = ops.find_tau(norm_a, norm_b, max_error=0.1)
        return (
            ops.mm(a, b, tau=tau, norm_a=norm_a),
            ops.mm(a, b, valid_ratio=0.5, return_info=True)[1].error_bound,
            ops.addmm(bias, a, b, tau=bound, beta=2),
            ops.bmm(a.unsqueeze(0), b.unsqueeze(0), max_error=0.1),
            ops.linear(a, b.t(), bias, valid_ratio=0.5),
            ops.valid_counts(norm_a, norm_b, tau),
            ops.valid_ratio(norm_a, norm_b, tau),
            ops.error_bound(norm_a, norm_b, tau),
        )

    a, b = matrices.normal(70, 150, device=device), matrices.normal(150, 70, seed=1, device=device)
    bias = matrices.normal(70, seed=2, device=device)
    traced = fx.symbolic_trace(products)
    assert set(targets(traced)) >= {
        *(ops.norm_map, ops.find_tau, ops.mm, ops.addmm, ops.bmm),
        *(ops.linear, ops.valid_counts, ops.valid_ratio, ops.error_bound),
    }
    for found, expected in zip(traced(a, b, bias), products(a, b, bias), strict=True):
        assert torch.equal(found, expected)


def test_a_subclass_with_a_torch_function_of_its_own(device):
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    a = torch.ones(40, 40, device=device)
    found = spamm_torch.mm(a.as_subclass(Watched), a, tau=0.0)
    assert spamm_torch.mm in seen
    assert torch.equal(found.as_subclass(torch.Tensor), a @ a)


# ---- Profiles ------------------------------------------------------------------------------------


REPOSITORY = Path(__file__).resolve().parents[2]
STAGES = {f"spamm_torch::{name}" for name in ("norm_map", "find_tau", "multiply")}


def product(device, dtype):
    a = torch.arange(128.0 * 128).reshape(128, 128).cos().to(device, dtype)
    return spamm_torch.mm(a, a.t(), valid_ratio=0.5)


def convolution(device, dtype, **knob):
    x = torch.arange(64.0 * 64 * 16).reshape(64, 64, 4, 4).cos().to(device, dtype)
    weight = torch.arange(64.0 * 64 * 9).reshape(64, 64, 3, 3).sin().to(device, dtype)
    knob = knob or {"valid_ratio": 0.5}
    return spamm_torch.conv2d(x, weight, padding=1, **knob)


def names_in_profile(call):
    call()  # what is set up in the first call
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        call()
    return {event.key for event in found.key_averages()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_stages_stand_in_torchs_profile(device, dtype):
    assert names_in_profile(lambda: product(device, dtype)) >= STAGES | {"spamm_torch::spamm"}
    found = names_in_profile(lambda: convolution(device, dtype))
    assert found >= STAGES | {"spamm_torch::conv2d"}
    held = names_in_profile(lambda: convolution(device, dtype, tau=1.0))
    assert held & STAGES == STAGES - {"spamm_torch::find_tau"}  # nothing is searched


def test_nvtx_changes_no_result(device, tmp_path):
    """In a process of its own: the variable is read when the library is loaded."""
    path = tmp_path / "found.pt"
    code = "\n".join(map(inspect.getsource, (product, convolution)))
    code = f"""import sys, torch, spamm_torch
{code}
place = torch.device(sys.argv[1]), torch.float32
torch.save([product(*place), convolution(*place)], sys.argv[2])"""
    python("-c", code, device, path, cwd=REPOSITORY, check=True, SPAMM_TORCH_NVTX="1")
    expected = product(device, torch.float32), convolution(device, torch.float32)
    for found, result in zip(torch.load(path), expected, strict=True):
        assert torch.equal(found, result)
