"""A converted model lives on: it is trained, moved, loaded, copied, compiled and reverted."""

import copy
import gc
import linecache
import pickle
import re

import pytest
import torch
from small_models import (
    ZOO,
    ZooCase,
    assert_same,
    detector,
    is_served,
    output_of,
    pictures,
    resnet,
    state_of,
    trained,
)
from support import captured, one_thread  # noqa: F401  the fixture is automatic
from torch import nn

import spamm_torch
from spamm_torch import SpAMMConfig, SpAMMConv2d, convert_, refresh_, revert_
from spamm_torch.networks.install import fused_of

EXACT = SpAMMConfig(max_error=1e-6)


@pytest.fixture(params=[None, EXACT], ids=["dense", "spamm"])
def pair(request):
    """A converted model, whose dense layers read packed weights on a CPU, and what it was."""
    model = resnet().to(memory_format=torch.channels_last)
    original = copy.deepcopy(model)
    convert_(model, request.param)
    assert is_served(model, pictures())
    return model, original


# ---- When the generated forward is taken --------------------------------------------------------


def test_the_own_forward_runs_where_the_generated_one_would_be_wrong(pair):
    model, original = pair
    x = pictures()
    assert not is_served(model, x, scale=torch.tensor(2.0))
    assert is_served(model, x, scale=None)
    assert is_served(model, x=x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not is_served(model, x)
    with torch.no_grad():
        expected = original(x, torch.tensor(2.0))
        torch.testing.assert_close(model(x, torch.tensor(2.0)), expected)
    model.layer1[0].bn1.train()
    assert not is_served(model, x)
    model.layer1[0].bn1.eval()
    assert is_served(model, x)


def test_the_own_forward_runs_where_a_gradient_is_wanted(pair):
    model, original = pair
    x = pictures().requires_grad_()
    for m in (model, original):
        m(x).square().sum().backward()
    gradients = dict(original.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-3, atol=1e-3)
    model.requires_grad_(False)
    assert model(pictures()).requires_grad is False
    assert model(x).requires_grad


class Marked(torch.Tensor):
    """A tensor that others give a meaning of their own."""


def test_the_own_forward_runs_for_tensors_of_other_kinds(pair):
    model, _ = pair
    assert not is_served(model, pictures().as_subclass(Marked))
    per_image = torch.func.vmap(lambda image: model(image.unsqueeze(0)).squeeze(0))
    with torch.no_grad():
        torch.testing.assert_close(per_image(pictures()), model(pictures()), rtol=1e-4, atol=1e-4)


# ---- Folded weights follow ----------------------------------------------------------------------


@torch.no_grad()
def test_what_a_call_folds_anew_is_not_written_where_other_threads_read(pair):
    model, original = pair
    model(pictures())
    operands = filter(lambda tensor: tensor is not None, fused_of(model).operands)
    before = [tensor for tensor in operands if not tensor.is_mkldnn]
    values = [tensor.clone() for tensor in before]
    for m in (model, original):
        m.conv1.weight.mul_(2)
        m.layer1[0].bn1.weight.neg_()
    assert_same(model, original)
    assert all(map(torch.equal, before, values))
    assert is_served(model, pictures())


def test_generated_code_goes_with_its_model():
    def files():
        gc.collect()
        return {name for name in linecache.cache if name.startswith("<spamm_torch generated")}

    before = files()
    model = resnet()
    convert_(model)
    assert fused_of(model).forward.__code__.co_filename in files() - before
    del model
    assert files() <= before


def test_a_setting_that_is_changed_counts():
    model = resnet()
    convert_(model, EXACT)
    with torch.no_grad():
        before = model(pictures())
        for module in model.modules():
            if isinstance(module, SpAMMConv2d):
                module.max_error = 1e9
        assert not is_served(model, pictures())
        assert not torch.allclose(model(pictures()), before)


def test_tensors_made_in_inference_mode_prove_nothing():
    with torch.inference_mode():
        model = resnet()
    original = copy.deepcopy(model)
    convert_(model)
    with torch.inference_mode():
        assert_same(model, original)


def test_hooks_on_layers_that_are_still_called_cost_nothing(pair):
    """tests/networks/test_changes.py has the others."""
    model, original = pair
    seen = []
    for name in ("", "fc"):
        model.get_submodule(name).register_forward_hook(lambda *_: seen.append(1))
    assert is_served(model, pictures())
    assert len(seen) == 2
    assert_same(model, original)
    handle = model.layer2[0].register_forward_hook(lambda *_: seen.append(2))
    assert not is_served(model, pictures())
    for _ in range(2):  # with the hook, and without it
        refresh_(model)
        assert is_served(model, pictures())
        assert_same(model, original)
        handle.remove()


# ---- Copies -------------------------------------------------------------------------------------


def test_replicas_and_traces(pair):
    model, original = pair
    assert_same(torch.fx.symbolic_trace(model, {"scale": None}), original)
    if torch.cuda.is_available():  # where it sends models and batches
        model, original = model.cuda(), original.cuda()
    x = pictures().to(next(original.parameters()).device)
    assert_same(nn.DataParallel(model), original, x, tolerance=1e-2)
    replica = model._replicate_for_data_parallel()  # its layers are elsewhere: nothing is fused
    assert not is_served(replica, x)


def test_distributed_data_parallel(pair, tmp_path):
    model, original = pair
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
        assert is_served(parallel.eval(), pictures())
        parallel.train()
        original.train()
        for m in (parallel, original):
            optimizer = torch.optim.SGD(m.parameters(), 0.01)
            m(pictures()).square().sum().backward()
            optimizer.step()
        assert_same(parallel.eval(), original.eval(), tolerance=1e-3)
    finally:
        torch.distributed.destroy_process_group()


# ---- Compiled -----------------------------------------------------------------------------------


def test_compiled_whole(pair):
    model, original = pair
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=keep)
    assert_same(compiled, original)
    (graph,) = graphs
    text = str(graph.graph)
    assert text.count("spamm_torch.dense_conv2d") + text.count("spamm_torch.conv2d") == 6
    assert "batch_norm" not in text
    for m in (model, original):
        nn.init.ones_(m.bn1.bias)
    assert_same(model, original)  # folded anew, in other memory
    for m in (model, original):
        m.conv1.weight.data.mul_(2)
    refresh_(model)
    assert_same(compiled, original)
    assert len(graphs) == 1


def test_compiled_with_other_tensors(pair):
    model, original = pair
    other = {"layer1.0.bn1.bias": original.layer1[0].bn1.bias.detach() + 0.5}
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def call(tensors, x):
        return torch.func.functional_call(model, tensors, (x,))

    with torch.no_grad():
        expected = torch.func.functional_call(original, other, (pictures(),))
        torch.testing.assert_close(call(other, pictures()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pair", [EXACT], indirect=True)
def test_compiled_for_training(pair):
    model, original = pair
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    model.train()
    original.train()
    x = pictures()
    torch.testing.assert_close(compiled(x), original(x), rtol=1e-3, atol=1e-3)


@pytest.mark.strength(1)
@pytest.mark.parametrize("strict", [False, True])
def test_exported(pair, strict):
    """An export puts equal settings of another identity into the layers."""
    model, original = pair
    with torch.no_grad():
        program = torch.export.export(model, (pictures(),), strict=strict)
    assert is_served(model, pictures())
    targets = [str(node.target) for node in program.graph.nodes]
    assert sum("spamm_torch" in target for target in targets) == 6
    assert not any("batch_norm" in target for target in targets)
    assert_same(program.module(), original)
    for m in (model, original):
        nn.init.ones_(m.bn1.bias)
    with torch.no_grad():
        program = torch.export.export(model, (pictures(),), strict=strict)
    assert_same(program.module(), original)


@pytest.mark.cuda
@torch.no_grad()
def test_a_captured_graph_reads_what_refresh_writes():
    model = resnet().cuda().half()
    convert_(model)
    x = pictures().cuda().half()
    graph, result = captured(lambda: model(x))
    for _ in range(3):  # each call folds anew, in other memory than the graph reads
        model.bn1.bias.add_(1)
        expected = model(x)
    graph.replay()
    assert not torch.equal(result, expected)
    refresh_(model)
    graph.replay()
    assert torch.equal(result, expected)


# ---- Reverting ----------------------------------------------------------------------------------


def test_a_part_is_reverted_by_itself():
    model = nn.Sequential(resnet(), resnet())
    convert_(model[0])
    convert_(model[1], EXACT)
    revert_(model[1])
    assert is_served(model[0], pictures())
    assert not any(isinstance(module, SpAMMConv2d) for module in model.modules())


def test_another_class_on_top_is_refused():
    model = resnet()
    convert_(model, EXACT)
    conv = model.layer1[0].conv1
    torch.nn.utils.parametrizations.weight_norm(conv)
    before = state_of(model)
    for function in (revert_, refresh_, convert_):
        with pytest.raises(RuntimeError, match=r"got layer1.0.conv1, which is Parametrized"):
            function(model)
        assert state_of(model) == before
    nn.utils.parametrize.remove_parametrizations(conv, "weight")
    revert_(model)
    assert type(conv) is nn.Conv2d


@torch.no_grad()
def test_parameters_that_were_replaced_are_not_written():
    """Folded weights of a layer without a batch norm are the Parameter's own memory."""
    model = trained(nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 1)))
    convert_(model)
    assert is_served(model, pictures(channels=16))
    held = model.state_dict()
    before = {name: tensor.clone() for name, tensor in held.items()}
    model.load_state_dict({name: 2 * tensor for name, tensor in held.items()}, assign=True)
    expected = nn.Sequential(*(copy.deepcopy(layer) for layer in model))
    torch.testing.assert_close(model(pictures(channels=16)), expected(pictures(channels=16)))
    for name, tensor in held.items():
        assert torch.equal(tensor, before[name])


@torch.no_grad()
def test_loading_through_a_wrapper_keeps_the_memory_of_operands():
    """The memory that a captured graph reads is written anew, not freed."""
    model = trained(resnet())
    wrapper = nn.Sequential(model)
    convert_(model)
    model(pictures())
    fused = fused_of(model)
    operands = [operand for operand in fused.operands if operand is not None]
    wrapper.load_state_dict({name: 2 * x for name, x in wrapper.state_dict().items()})
    refresh_(model)
    assert fused_of(model) is fused
    addresses = {operand.data_ptr() for operand in fused.operands if operand is not None}
    assert all(operand.data_ptr() in addresses for operand in operands)


# ---- Networks as people use them -----------------------------------------------------------------

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
    """The names that convert_ must leave as they are: which object stands under which name."""
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
    """The number of calls of the library's convolutions."""
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
    """Also of a model that was converted again, and again in another way."""
    model = copy.deepcopy(converted.model)
    convert_(model)
    convert_(model, EXACT, fuse=False)
    for _ in range(2):
        assert revert_(model) is model
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
