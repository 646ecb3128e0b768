"""SpAMMConv2d and SpAMMLinear: torch's modules with a setting, and the way there and back."""

import copy
import pickle

import pytest
import torch
from golden import assert_kept, assert_refused
from torch import fx, nn
from torch.profiler import ProfilerActivity, profile

import spamm_torch
from spamm_torch import SpAMMConv2d, SpAMMLinear

# (class, dense class, shape arguments, setting that skips a part, input shape)
CONV = (SpAMMConv2d, nn.Conv2d, (4, 40, 3), {"tau": 18.0, "pixel_block": (1, 8, 8)}, (3, 4, 9, 9))
LINEAR = (SpAMMLinear, nn.Linear, (96, 40), {"tau": 100.0, "block": 32}, (40, 96))
each_module = pytest.mark.parametrize("case", [CONV, LINEAR], ids=["conv2d", "linear"])


def uneven(shape, device="cpu", dtype=torch.float32):
    """Input whose rows and images differ in size, so that a threshold skips some of them."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values *= torch.linspace(0.1, 4, shape[0]).view(-1, *(1,) * (len(shape) - 1))
    return values.to(device, dtype)


def make(case, device="cpu", **changes):
    """A module with known weights, and an input of which it skips a part."""
    module_class, _, arguments, setting, shape = case
    torch.manual_seed(0)
    module = module_class(*arguments, device=device, **(changes or setting))
    return module, uneven(shape, device)


def functional(module, input):
    """The module's product by the functional form, with its weights as they are now."""
    knobs = {name: getattr(module, name) for name in ("tau", "valid_ratio", "max_error")}
    if isinstance(module, nn.Linear):
        return spamm_torch.linear(input, module.weight, module.bias, block=module.block, **knobs)
    names = ("weight", "bias", "stride", "padding", "dilation", "groups")
    knobs |= {"block": module.block, "pixel_block": module.pixel_block}
    return spamm_torch.conv2d(input, *(getattr(module, name) for name in names), **knobs)


def pickled(module):
    """Gives what is read of what it is written as."""
    return pickle.loads(pickle.dumps(module))


def targets(traced):
    """The functions that a traced module calls."""
    return [node.target for node in traced.graph.nodes if node.op == "call_function"]


def skips_a_part(module, input):
    """Tells whether the result is neither the dense one, rounding apart, nor nothing but bias."""
    dense = module.to_dense()(input)
    error = (module(input) - dense).norm() / dense.norm()
    return 1e-4 < error < 0.5


# ---- The layers compute what the functions do ---------------------------------------------------


@each_module
@pytest.mark.parametrize(
    "setting", [{}, {"valid_ratio": 0.6, "block": 32}, {"max_error": 0.3, "block": 32}]
)
def test_forward_is_the_function(device, case, setting):
    """It is one node of torch.fx, too."""
    module, input = make(case, device, **setting)
    output = module(input)
    assert torch.equal(output, functional(module, input))
    assert skips_a_part(module, input)
    function = spamm_torch.linear if isinstance(module, nn.Linear) else spamm_torch.conv2d
    for layer in (module, copy.deepcopy(module).eval().freeze_()):
        traced = pickled(fx.symbolic_trace(layer))
        traced.graph.lint()
        assert targets(traced).count(function) == 1
        assert torch.equal(traced(input), output)
        assert torch.equal(traced(input[:2]), module(input[:2]))
    module.weight.data *= 0.5  # norms are never stale
    assert torch.equal(module(input), functional(module, input))


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's own, about a copy it makes
@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [0, (2, 1), "same", "valid"])
@pytest.mark.parametrize("batched", [True, False])
def test_padding_modes(device, padding_mode, padding, batched):
    dense = nn.Conv2d(
        4, 6, (2, 3), padding=padding, padding_mode=padding_mode, dilation=(1, 2), device=device
    ).double()
    input = torch.randn(2, 4, 8, 9, device=device, dtype=torch.float64)
    input = input if batched else input[0]
    module = SpAMMConv2d.from_dense(dense, tau=0.0)
    torch.testing.assert_close(module(input), dense(input))
    assert torch.equal(fx.symbolic_trace(module)(input), module(input))


def test_every_argument(device):
    geometry = (3, 2), (2, 1), (1, 2), (1, 2), 3
    rest = False, "circular", device, torch.float64
    conv = SpAMMConv2d(6, 9, *geometry, *rest, tau=0.0)
    linear = SpAMMLinear(7, 5, False, device, torch.float64, tau=0.0)
    shapes = [(linear, shape) for shape in ((7,), (3, 7), (2, 3, 7), (0, 7))]
    for module, shape in [(conv, (2, 6, 9, 8)), *shapes]:
        assert module.bias is None
        input = torch.randn(shape, device=device, dtype=torch.float64)
        torch.testing.assert_close(module(input), module.to_dense()(input))


@each_module
def test_gradients_are_those_of_the_dense_layer(device, case):
    module, input = make(case, device)
    dense = copy.deepcopy(module).to_dense()
    gradients = []
    for layer in (module, dense):
        leaf = input.clone().requires_grad_()
        layer(leaf).backward(torch.ones_like(layer(input)))
        gradients.append([leaf.grad, layer.weight.grad, layer.bias.grad])
    torch.testing.assert_close(*gradients)


@each_module
def test_compiles_without_graph_breaks(device, case):
    module, input = make(case, device)
    for layer in (module, copy.deepcopy(module).eval().freeze_()):
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(input), layer(input))
        compiled(input).sum().backward()
    module.tau = torch.tensor(0.0, device=device)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(input), module.to_dense()(input), rtol=1e-4, atol=1e-4)
    assert torch.equal(fx.symbolic_trace(module)(input), module(input))


# ---- From dense and back ------------------------------------------------------------------------


@each_module
def test_from_dense_and_back_share_the_parameters(device, case):
    module_class, dense_class, arguments, setting, shape = case
    dense = dense_class(*arguments, device=device, dtype=torch.float64).eval()
    dense.weight.requires_grad_(False)
    dense.register_forward_hook(lambda *_: pytest.fail("hooks are not copied"))
    module = module_class.from_dense(dense, **setting)
    back = module.to_dense()
    for twin in (module, back):
        assert twin.weight is dense.weight
        assert twin.bias is dense.bias
        assert not twin.training
        assert twin(uneven(shape, device, torch.float64)).dtype == torch.float64
    assert type(back) is dense_class
    assert module_class.from_dense(dense.train(), **setting).training
    assert module.to_dense().extra_repr() == dense.extra_repr()
    other = module_class.from_dense(module, tau=0.0)
    assert (other.weight is dense.weight, other.tau) == (True, 0.0)


@each_module
def test_state_dicts_load_strictly_both_ways(case):
    """The initialisation is torch's."""
    module_class, dense_class, arguments, setting, _ = case
    torch.manual_seed(3)
    dense = dense_class(*arguments)
    torch.manual_seed(3)
    module = module_class(*arguments, **{**setting, "tau": torch.tensor(2.0)}).freeze_()
    assert list(module.state_dict()) == list(dense.state_dict()) == ["weight", "bias"]
    assert torch.equal(dense.weight, module.weight)
    assert torch.equal(dense.bias, module.bias)
    nn.init.normal_(module.weight)
    dense.load_state_dict(module.state_dict(), strict=True)
    assert torch.equal(dense.weight, module.weight)
    with torch.no_grad():
        dense.weight.add_(1)
    module.load_state_dict(dense.state_dict(), strict=True)
    assert torch.equal(dense.weight, module.weight)


# Modules that compute in another way than the classes that they come from.
OTHER = {"forward": lambda self, input: input}
Scaled = type("Scaled", (nn.Conv2d,), OTHER)
ScaledSpAMM = type("ScaledSpAMM", (SpAMMConv2d,), OTHER)


def test_what_is_refused():
    """Bad settings, of which tests/products/test_errors.py has every rule, and modules that
    from_dense would change.
    """
    assert_refused("refused: modules", globals())


# ---- Copies, casts, moves -----------------------------------------------------------------------


@each_module
@pytest.mark.parametrize("tau", ["float", "tensor"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
@pytest.mark.parametrize("frozen", [False, True])
def test_copies_are_whole_and_independent(device, case, tau, duplicate, frozen):
    module, input = make(case, device)
    if tau == "tensor":
        module.tau = torch.tensor(module.tau, device=device)
    if frozen:
        module.eval().freeze_()
    expected = module(input)
    twin = duplicate(module)
    assert torch.equal(twin(input), expected)
    assert twin.extra_repr() == module.extra_repr()
    with torch.no_grad():
        module.weight.zero_()
    module.tau = 0.0
    assert torch.equal(twin(input), expected)


@each_module
def test_a_tensor_tau_keeps_its_dtype_and_moves_with_the_module(case):
    module, input = make(case)
    tau = torch.tensor(1.23456789, dtype=torch.float64)
    module.tau = tau
    expected = functional(module.half(), input.half())
    assert torch.equal(module(input.half()), expected)
    assert torch.equal(module.tau, tau)
    module.float().eval().freeze_().to("meta")
    assert module(input.to("meta")).shape == expected.shape
    module.to_empty(device="cpu")
    assert module.tau == tau


@pytest.mark.cuda
@each_module
def test_moving_to_cuda_takes_tau_and_pinned_norms_along(case):
    module, input = make(case)
    module.tau = torch.tensor(module.tau)
    module.eval().freeze_().cuda()
    assert module.tau.is_cuda
    output = module(input.cuda())
    assert torch.equal(output, functional(module, input.cuda()))


def test_repr_shows_the_setting():
    conv = SpAMMConv2d(3, 8, 3, tau=torch.tensor(0.25), block=32, pixel_block=(1, 4, 8))
    layers = conv, copy.deepcopy(conv).freeze_(), SpAMMLinear(4, 5, valid_ratio=0.5)
    assert_kept("layers", [repr(x) for x in (*layers, SpAMMConv2d(3, 8, 3, max_error=0.1))])


# ---- Profiles ------------------------------------------------------------------------------------


STAGES = {f"spamm_torch::{name}" for name in ("norm_map", "find_tau", "multiply")}


def names_in_profile(call):
    call()  # what is set up in the first call
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        call()
    return {event.key for event in found.key_averages()}


def test_stages_stand_in_torchs_profile(device):
    module, input = make(LINEAR, device, valid_ratio=0.5)
    assert names_in_profile(lambda: module(input)) >= STAGES | {"spamm_torch::spamm"}
    module, input = make(CONV, device, valid_ratio=0.5)
    assert names_in_profile(lambda: module(input)) >= STAGES | {"spamm_torch::conv2d"}
    module.tau, module.valid_ratio = 1.0, None
    held = names_in_profile(lambda: module(input))
    assert held & STAGES == STAGES - {"spamm_torch::find_tau"}  # nothing is searched
