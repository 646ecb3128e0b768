"""A converted model lives on: it is trained, moved, cast, loaded, copied, compiled and reverted."""

import copy
import gc
import linecache

import pytest
import torch
from small_models import assert_same, is_served, pictures, resnet, state_of, trained
from support import captured
from torch import nn
from torch.nn import functional as F

from spamm_torch import SpAMMConfig, SpAMMConv2d, convert_, refresh_, revert_
from spamm_torch.networks.install import fused_of

EXACT = SpAMMConfig(max_error=1e-6)


@pytest.fixture(params=[None, EXACT], ids=["dense", "spamm"])
def pair(request):
    """A converted model, and what it was."""
    model = resnet()
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
    before = [tensor for tensor in fused_of(model).operands if tensor is not None]
    values = [tensor.clone() for tensor in before]
    for m in (model, original):
        m.conv1.weight.mul_(2)
        m.layer1[0].bn1.weight.neg_()
    assert_same(model, original)
    assert all(map(torch.equal, before, values))
    assert is_served(model, pictures())


@torch.no_grad()
def test_statistics_without_a_counter_are_not_folded():
    model = trained(nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)))
    original = copy.deepcopy(model)
    convert_(model)
    for m in (model, original):
        m[1].num_batches_tracked = None
        F.batch_norm(pictures(channels=8), m[1].running_mean, m[1].running_var, training=True)
    assert not is_served(model, pictures(channels=8))
    assert_same(model, original, pictures(channels=8))


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


def test_reverted_bit_for_bit():
    model = resnet()
    before = state_of(model)
    with torch.no_grad():
        expected = model(pictures())
        for config in (None, EXACT, SpAMMConfig(tau=0.5), None):
            convert_(model, config)
            convert_(model, EXACT, fuse=config is None)
            revert_(model)
            assert torch.equal(model(pictures()), expected)
            assert revert_(model) is model
    after = state_of(model)
    assert {name: found[0] for name, found in after.items()} == {
        name: found[0] for name, found in before.items()
    }
    assert {name: found[1].keys() for name, found in after.items()} == {
        name: found[1].keys() for name, found in before.items()
    }


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
    """What a captured graph reads is written anew, not freed."""
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
