"""Pinned norms answer for the weight they were computed from, and for no other."""

import copy
import gc
import re
import subprocess
import weakref
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import load_model, save_model
from support import raises_line
from torch import nn
from torch.func import functional_call

import spamm_torch
from spamm_torch import SpAMMConv2d, SpAMMLinear
from spamm_torch.nn import PinnedNorms

TINY = 1e-6  # of weights whose block products are all skipped


def conv():
    return nn.Conv2d(64, 64, 3, padding=1), torch.randn(8, 64, 6, 6)


def linear():
    return nn.Linear(64, 64), torch.randn(64, 64)


@pytest.fixture(params=[conv, linear], ids=["conv2d", "linear"])
def frozen(request):
    """A frozen layer of tiny weights, its dense twin with the same Parameters, and an input."""
    torch.manual_seed(0)
    dense, input = request.param()
    with torch.no_grad():
        dense.weight.mul_(TINY)
    kind = SpAMMConv2d if isinstance(dense, nn.Conv2d) else SpAMMLinear
    return kind.from_dense(dense, tau=1.0).eval().freeze_(), dense, input


def by_optimiser(module, dense):
    optimiser = torch.optim.Adam(dense.parameters(), lr=0.1, foreach=True)
    module.weight.sum().backward()
    optimiser.step()


def by_another_parameter(module, dense):
    module.weight = nn.Parameter(torch.ones_like(module.weight))


CHANGES = {
    "state of the dense twin": lambda module, dense: dense.load_state_dict(
        {name: value + 1 for name, value in dense.state_dict().items()}
    ),
    "optimiser": by_optimiser,
    "initialisation": lambda module, dense: nn.init.normal_(dense.weight),
    "copy of an average": lambda module, dense: dense.weight.detach().copy_(torch.ones(())),
    "inference mode": torch.inference_mode()(lambda module, dense: dense.weight.add_(1)),
    "another parameter": by_another_parameter,
    "another memory": lambda module, dense: setattr(
        module.weight, "data", torch.ones_like(module.weight)
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_weight_has_norms_of_its_own(frozen, change):
    module, dense, input = frozen
    with torch.no_grad():
        bias_alone = module(input)
    change(module, dense)
    assert not module.is_frozen
    assert "frozen" not in module.extra_repr()
    output = module(input)
    assert not torch.equal(output, bias_alone)
    assert torch.equal(output, copy.deepcopy(module).unfreeze_()(input))
    assert module.freeze_().is_frozen
    assert torch.equal(module(input), output)


def test_a_copy_pins_norms_of_its_own_weight(frozen):
    module, dense, input = frozen
    nn.init.normal_(dense.weight)  # the pinned norms are those of another weight
    twin = copy.deepcopy(module)
    assert twin.is_frozen
    assert torch.equal(twin(input), module(input))
    assert copy.deepcopy(twin.unfreeze_())._pinned is None


def test_a_weight_that_was_replaced_is_let_go(frozen):
    module, dense, _ = frozen
    weight = weakref.ref(module.weight)
    by_another_parameter(module, dense)
    del dense.weight
    gc.collect()
    assert weight() is None
    assert not module.is_frozen


def test_weights_of_inference_mode_are_not_pinned():
    with torch.inference_mode():
        model = nn.Sequential(SpAMMConv2d(64, 64, 3, tau=1.0)).eval()
        model[0].weight.mul_(TINY)
    assert not model[0].freeze_().is_frozen
    input = torch.randn(2, 64, 6, 6)
    with torch.inference_mode():
        model[0].weight.div_(TINY)
        assert torch.equal(model(input), model[0].unfreeze_()(input))


def test_subclasses_of_tensor_are_not_pinned():
    with torch._subclasses.FakeTensorMode():
        module = SpAMMConv2d(8, 8, 3, tau=1.0).eval().freeze_()
        assert not module.is_frozen
        assert module(torch.empty(2, 8, 5, 5)).shape == (2, 8, 3, 3)


def test_a_threshold_is_no_parameter():
    module = SpAMMLinear(8, 8, tau=nn.Parameter(torch.tensor(0.5)).detach())
    assert list(module.state_dict()) == ["weight", "bias"]
    module.tau = torch.tensor(0.25)
    assert module.tau == 0.25
    module.tau = torch.tensor(0.25, requires_grad=True)
    with raises_line(RuntimeError, "tau must not require a gradient"):
        module(torch.ones(1, 8))


def test_threads_may_freeze_while_others_call(frozen):
    module, _, input = frozen
    with torch.no_grad():
        expected = module(input)

        def call():
            with torch.no_grad():
                return [module(input) for _ in range(20)]

        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(call) for _ in range(3)]
            for _ in range(20):
                module.freeze_()
            results = [result for called in calls for result in called.result()]
    assert all(torch.equal(result, expected) for result in results)


def is_pinned(module, input):
    """Tells whether norms of an earlier weight are used: one that grew since is skipped as before.

    It grows through ``.data``, of which no version counter tells.
    """
    with torch.no_grad():
        module.weight.data /= TINY
        pinned = torch.equal(module(input), module(input * 0))  # the bias alone
        module.weight.data *= TINY
    return pinned


def test_pinned_norms_rest_where_autocast_casts_the_weight(device, frozen):
    module, _, input = frozen
    module, input = module.to(device).freeze_(), input.to(device)
    with torch.autocast(device.type, torch.bfloat16):
        assert not is_pinned(module, input)
    module.bfloat16()
    with torch.autocast(device.type, torch.bfloat16):
        assert is_pinned(module, input.bfloat16())


def in_a_model(module):
    """Trains it deep in a model."""
    return nn.Sequential(nn.Sequential(module)).train()[0][0]


@pytest.mark.parametrize("undo", [lambda m: m.train(), lambda m: m.unfreeze_(), in_a_model])
def test_training_and_unfreezing_undo_it(frozen, undo):
    module, _, input = frozen
    assert undo(module) is module
    assert not is_pinned(module, input)


def test_loading_and_casting_pin_again(frozen):
    module, _, input = frozen
    model = nn.Sequential(module.eval())
    for of, options in ((module, {}), (module, {"assign": True}), (model, {})):
        assert is_pinned(module, input)
        state = {name: value / TINY for name, value in of.state_dict().items()}
        of.load_state_dict(state, **options)
        assert torch.equal(module(input), copy.deepcopy(module).unfreeze_()(input))
        of.load_state_dict({name: value * TINY for name, value in state.items()}, **options)
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        module.to(dtype)
        assert is_pinned(module, input.to(dtype))


# ---- Compiled, exported, replicated -------------------------------------------------------------


def test_compiled_code_guards_that_the_weight_is_the_same_tensor(frozen):
    module, dense, input = frozen
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        bias_alone = compiled(input)
        assert torch.equal(bias_alone, module(input))
        by_another_parameter(module, dense)
        output = compiled(input)
        assert torch.equal(output, module(input))
        assert not torch.equal(output, bias_alone)
        nn.init.normal_(module.weight)
        assert torch.equal(compiled(input), module(input))


def test_programs_compute_norms_of_the_weights_they_are_given(frozen):
    """A compiled functional_call, and exported programs."""
    module, dense, input = frozen
    weights = {name: value + 1 for name, value in dense.state_dict().items()}
    call = lambda weights, input: functional_call(module, weights, (input,))  # noqa: E731
    with torch.no_grad():
        expected = call(weights, input)
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(weights, input), expected)
        for strict in (False, True):
            exported = torch.export.export(module, (input,), strict=strict).module()
            exported.load_state_dict(weights)
            torch.testing.assert_close(exported(input), expected)


def test_a_replica_of_data_parallel_has_norms_of_its_own(frozen):
    module, _, input = frozen
    replica = module._replicate_for_data_parallel()
    replica.weight = torch.ones_like(module.weight)  # as nn.parallel.replicate sets it
    replica.bias = module.bias.detach()
    with torch.no_grad():
        assert torch.equal(replica(input), copy.deepcopy(replica).unfreeze_()(input))


@pytest.mark.cuda
def test_freezing_waits_for_the_weight():
    """Norms, and the weight before them, are there when freeze_ returns."""
    module = SpAMMConv2d(64, 64, 3, tau=0.5, device="cuda").eval()
    torch.cuda._sleep(10**8)
    with torch.no_grad():
        module.weight.mul_(2)
    module.freeze_()
    assert torch.cuda.current_stream().query()


@pytest.mark.cuda
def test_freezing_in_a_captured_graph_is_refused(monkeypatch):
    module = SpAMMConv2d(8, 8, 3, tau=0.5, device="cuda").eval().freeze_()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="freeze_ expects that no CUDA graph is captured"):
        PinnedNorms.of(module.weight, module._pinned.norms)


@pytest.mark.cuda
def test_moving_a_weight_by_data_is_noticed():
    module = SpAMMConv2d(64, 64, 3, padding=1, tau=0.5).eval().freeze_()
    module.weight.data = module.weight.data.cuda()
    module.bias.data = module.bias.data.cuda()
    input = torch.randn(4, 64, 6, 6, device="cuda")
    assert not module.is_frozen
    assert torch.equal(module(input), copy.deepcopy(module)(input))


# ---- Packed by AOTInductor -----------------------------------------------------------------------


SERVE = Path(__file__).parents[2] / "build/example-cpp/serve"


def first_stage():
    """ResNet-18's stem and first two residual blocks under a head: what Inductor compiles soon."""
    whole = torchvision.models.resnet18(weights=None)
    stem = (whole.conv1, whole.bn1, whole.relu, whole.maxpool, whole.layer1)
    return nn.Sequential(*stem, whole.avgpool, nn.Flatten(), nn.Linear(64, 10))


def serve(*files):
    return subprocess.run([SERVE, *files], capture_output=True, text=True)


def resnet50():
    return torchvision.models.resnet50(weights=None)


@pytest.mark.inductor
@pytest.mark.parametrize("make", [first_stage, pytest.param(resnet50, marks=pytest.mark.thorough)])
def test_a_package_runs_in_python_and_in_cpp_and_holds_no_copies(make, tmp_path):
    """With the program of examples/cpp, which `make test` has built. Each convolution is one call
    of the library; Inductor adds the max pool and the mean.
    """
    torch.manual_seed(0)
    network, pictures = make().eval(), torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        before = network(pictures)
        module = torch.export.export(network, (pictures,)).module()
        fused = spamm_torch.fuse(module, inner="eager")
        expected = fused(pictures)
        torch.testing.assert_close(expected, before, rtol=1e-3, atol=1e-4)
        program = torch.export.export(fused, (pictures,))
    path = tmp_path / "network.pt2"
    with torch._inductor.config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    result = torch._inductor.aoti_load_package(str(path))(pictures)
    torch.testing.assert_close(result, expected)

    with zipfile.ZipFile(path) as package:
        names = [of for of in package.namelist() if of.endswith((".cpp", ".json"))]
        text = "\n".join(package.read(of).decode() for of in names)
    convolutions = sum(isinstance(m, nn.Conv2d) for m in network.modules())
    assert len(re.findall(r'"spamm_torch::(?:dense_)?conv2d"', text)) == convolutions
    kernels = set(re.findall(r"cpp_fused_(\w+)_\d+", text))
    assert convolutions > 20 or kernels == {"max_pool2d_with_indices", "mean"}

    torch.save(pictures, tmp_path / "pictures.pt")
    run = serve(path, tmp_path / "pictures.pt", tmp_path / "result.pt")
    assert run.returncode == 0, run.stderr
    torch.testing.assert_close(torch.load(tmp_path / "result.pt"), expected)


def test_the_program_says_what_it_cannot_read(tmp_path):
    run = serve("no.pt2", "no.pt", tmp_path / "no")
    assert run.returncode == 1
    assert "no.pt2" in run.stderr


def test_safetensors_both_ways(tmp_path):
    """Keys are those of the dense network: each loads the other's file."""
    dense, converted = first_stage(), first_stage()
    spamm_torch.convert_(converted, tau=0.0)
    for source, target in ((dense, converted), (converted, dense)):
        nn.init.normal_(source[0].weight)
        save_model(source, tmp_path / "network.safetensors")
        load_model(target, tmp_path / "network.safetensors", strict=True)
        for x, y in zip(source.parameters(), target.parameters(), strict=True):
            assert torch.equal(x, y)
