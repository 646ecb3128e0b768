"""fuse_: what surrounds SpAMM convolutions is folded into them, and results stay what they were."""

import copy
import re
import threading
from collections import OrderedDict

import pytest
import torch
from torch import nn

import spamm_torch
from spamm_torch import SpAMMChain, SpAMMConv2d, SpAMMLinear, fuse, fuse_

OPS = torch.ops.spamm_torch


def conv(in_channels, out_channels, tau=2.0, **rest):
    return SpAMMConv2d(in_channels, out_channels, 3, padding=1, tau=tau, **rest)


def network(batch_norm=False, bias=True, **rest):
    """Two convolutions, a max pool, a third convolution; then what is none of fuse_'s business."""
    torch.manual_seed(0)
    layers = OrderedDict()
    for number, (inner, outer) in enumerate(((8, 64), (64, 16), (16, 8)), start=1):
        layers[f"conv{number}"] = conv(inner, outer, bias=bias, **rest)
        if batch_norm:
            layers[f"bn{number}"] = nn.BatchNorm2d(outer)
        layers[f"relu{number}"] = nn.ReLU(inplace=number == 1)
        if number == 2:
            layers["pool"] = nn.MaxPool2d(3, stride=2, padding=1)
    layers |= {"flatten": nn.Flatten(), "fc": SpAMMLinear(8 * 9, 5, tau=0.1)}
    return nn.Sequential(layers).eval()


def pictures(images=70, device="cpu", dtype=torch.float32, channels=8):
    """Dark towards the border, so that thresholds skip some of it."""
    generator = torch.Generator().manual_seed(1)
    fade = torch.linspace(0.01, 2, 6) * torch.linspace(0.01, 2, 6)[:, None]
    values = torch.randn(images, channels, 6, 6, generator=generator) * fade
    return values.to(device, dtype, memory_format=torch.channels_last)


def trained(model):
    """The model with statistics and scales that a fold must not miss."""
    for number, module in enumerate(model.modules()):
        if isinstance(module, nn.BatchNorm2d):
            generator = torch.Generator().manual_seed(number)
            for values in (module.running_mean, module.weight.data, module.bias.data):
                values.copy_(torch.randn(values.shape, generator=generator))
            module.running_var.copy_(torch.rand(module.num_features, generator=generator) + 0.5)
    return model


# ---- What becomes of the layers -----------------------------------------------------------------


def test_relus_are_folded_and_convolutions_chained():
    model = network()
    report = fuse_(model)
    assert list(model._modules) == ["conv1", "flatten", "fc"]
    assert isinstance(model.conv1, SpAMMChain)
    assert not model.conv1.training
    types = [type(layer) for layer in model.conv1]
    assert types == [SpAMMConv2d, SpAMMConv2d, nn.MaxPool2d, SpAMMConv2d]
    assert all(layer.relu for layer in model.conv1 if isinstance(layer, SpAMMConv2d))
    actions = [(fusion.name, fusion.action) for fusion in report]
    assert actions[:3] == [(f"relu{number}", "folded") for number in (1, 2, 3)]
    assert actions[3:6] == [(name, "chained") for name in ("conv2", "pool", "conv3")]
    assert [name for name, action in actions[6:]] == [
        "conv1.conv1",
        "conv1.conv2",
        "conv1.conv3",
        "fc",
    ]
    assert re.search(r"^relu2 +folded +into conv2$", str(report), re.MULTILINE)


@pytest.mark.parametrize("bias", [True, False])
def test_batch_norm_is_folded(bias):
    model = trained(network(batch_norm=True, bias=bias, tau=None, max_error=0.0))
    expected = model(pictures())
    report = fuse_(model)
    assert [f.name for f in report if f.action == "folded"] == [
        f"{kind}{number}" for number in (1, 2, 3) for kind in ("bn", "relu")
    ]
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    torch.testing.assert_close(model(pictures()), expected)


def test_parameters_that_others_share_are_not_touched():
    dense = nn.Conv2d(8, 64, 3)
    before = dense.weight.detach().clone()
    model = nn.Sequential(SpAMMConv2d.from_dense(dense, tau=0.0), nn.BatchNorm2d(64)).eval()
    fuse_(trained(model))
    assert torch.equal(dense.weight, before)
    assert not torch.equal(model[0].weight, before)


def test_norms_are_pinned_and_train_unpins_them():
    model = trained(network(batch_norm=True))
    fuse_(model)
    first = model.conv1[0]
    assert torch.equal(first._pinned.norms, OPS.conv2d_weight_norm(first.weight))
    assert first.is_frozen
    assert model.fc.is_frozen
    model.train()
    assert not first.is_frozen
    assert not model.fc.is_frozen


def hooked(model):
    model.conv2.register_forward_hook(lambda *_: None)


def used_twice(model):
    model.append(model.conv2)


def subclassed(model):
    model.conv2.__class__ = type("MyConv2d", (SpAMMConv2d,), {})


def padded_by_torch(model):
    model.conv2 = conv(64, 16, padding_mode="circular").eval()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "has hooks"),
        (used_twice, "used in several places"),
        (subclassed, "a subclass, MyConv2d"),
        (padded_by_torch, "padding (1, 1) of mode 'circular' is made by torch"),
    ],
)
def test_what_cannot_be_fused_is_left_and_named(change, reason):
    model = network()
    change(model)
    left = [(f.name, f.detail) for f in fuse_(model) if f.action == "left"]
    assert ("conv2", reason) in left
    assert not model.conv2.relu
    assert type(model.relu2) is nn.ReLU
    assert model.conv1.relu
    assert type(model.conv1) is SpAMMConv2d


@pytest.mark.parametrize(
    "layer", [nn.ReLU, nn.Sigmoid, lambda: nn.MaxPool2d(2), lambda: conv(8, 8)]
)
def test_a_layer_in_two_places_keeps_both(layer):
    shared = layer()
    model = nn.Sequential(conv(8, 8), shared, conv(8, 8), shared, nn.Tanh()).eval()
    input = torch.randn(2, 8, 8, 8)
    with torch.no_grad():
        expected = model(input)
        fuse_(model)
        torch.testing.assert_close(model(input), expected)


def test_a_batch_norm_behind_a_relu_stays():
    model = nn.Sequential(conv(8, 8), nn.ReLU(), nn.BatchNorm2d(8)).eval()
    report = fuse_(model)
    assert [(f.name, f.detail) for f in report if f.action == "left"] == [("2", "behind a ReLU")]
    assert model[0].relu
    assert isinstance(model[1], nn.BatchNorm2d)


def test_a_batch_norm_without_statistics_stays():
    model = nn.Sequential(conv(8, 8), nn.BatchNorm2d(8, track_running_stats=False)).eval()
    assert "keeps no running statistics" in str(fuse_(model))
    assert isinstance(model[1], nn.BatchNorm2d)


@pytest.mark.parametrize(
    "setting",
    [{"block": 128}, {"block": (64, 32, 64)}, {"pixel_block": (1, 8, 8)}, {"groups": 2}],
    ids=str,
)
def test_convolutions_whose_blocks_are_others_start_chains_of_their_own(setting):
    model = nn.Sequential(conv(8, 64), conv(64, 64, **setting), conv(64, 8)).eval()
    fuse_(model)
    assert [type(layer) for layer in model] == [SpAMMConv2d, SpAMMChain]


def test_layers_between_break_a_chain():
    model = nn.Sequential(conv(8, 64), nn.Sigmoid(), conv(64, 64), nn.Tanh(), nn.MaxPool2d(2))
    fuse_(model.eval())
    kinds = [SpAMMConv2d, nn.Sigmoid, SpAMMConv2d, nn.Tanh, nn.MaxPool2d]
    assert [type(layer) for layer in model] == kinds


def test_a_chain_may_begin_and_end_with_a_max_pool(norms_passed_on):
    model = nn.Sequential(nn.MaxPool2d(2), nn.MaxPool2d(1), conv(8, 64), nn.MaxPool2d(2)).eval()
    fused = copy.deepcopy(model)
    fuse_(fused)
    assert [type(layer) for layer in fused] == [nn.MaxPool2d, SpAMMChain]
    assert [type(layer) for layer in fused[1]] == [nn.MaxPool2d, SpAMMConv2d, nn.MaxPool2d]
    with torch.no_grad():
        assert torch.equal(fused(pictures()), model(pictures()))


def test_two_pools_end_a_chain(norms_passed_on):
    model = nn.Sequential(conv(8, 64), nn.MaxPool2d(2), nn.MaxPool2d(1), conv(64, 8)).eval()
    fused = copy.deepcopy(model)
    fuse_(fused)
    assert [type(layer) for layer in fused] == [SpAMMChain, SpAMMChain]
    assert [type(layer) for layer in fused[0]] == [SpAMMConv2d, nn.MaxPool2d]
    with torch.no_grad():
        assert torch.equal(fused(pictures()), model(pictures()))


def test_a_forward_of_its_own_is_left_alone_but_what_is_inside_is_fused():
    class Doubling(nn.Sequential):
        def forward(self, input):
            return super().forward(input) * 2

    model = Doubling(conv(8, 8), nn.ReLU(), nn.Sequential(conv(8, 8), nn.ReLU())).eval()
    fuse_(model)
    assert type(model[1]) is nn.ReLU
    assert not model[0].relu
    assert len(model[2]) == 1
    assert model[2][0].relu


def test_training_mode_is_refused():
    model = network().eval()
    model.conv2.train()
    with pytest.raises(ValueError, match=r"expects a model in eval mode; got module 'conv2' in tr"):
        fuse_(model)
    assert "relu1" in model._modules
    with pytest.raises(TypeError, match=r"fuse_ expects an nn.Module; got str"):
        fuse_("model")


def test_fusing_again_changes_nothing():
    model = network()
    fuse_(model)
    before = [name for name, _ in model.named_modules()]
    assert {fusion.action for fusion in fuse_(model)} == {"frozen"}
    assert [name for name, _ in model.named_modules()] == before


# ---- Results ------------------------------------------------------------------------------------


@pytest.mark.parametrize("images", [1, 70, 128])
def test_results_are_the_same_bit_for_bit(images):
    model = network()
    fused = copy.deepcopy(model)
    fuse_(fused)
    with torch.no_grad():
        input = pictures(images)
        assert torch.equal(fused(input), model(input))


SETTINGS = [{}, {"tau": None, "valid_ratio": 0.6}, {"tau": None, "max_error": 0.1}]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("blocks", [{}, {"block": 64, "pixel_block": (64, 1, 1)}], ids=str)
def test_a_chain_is_its_layers_with_norms_passed_on(norms_passed_on, setting, blocks):
    model = network(**setting, **blocks)
    fuse_(model)
    chain = model.conv1
    input, norms = pictures(), None
    with torch.no_grad():
        for layer in chain:
            if isinstance(layer, nn.MaxPool2d):
                geometry = layer.kernel_size, layer.stride, layer.padding
                input, norms = OPS.max_pool2d_with_norms(input, *map(_pair, geometry))
            else:
                input, norms = spamm_torch.conv2d(
                    *(input, layer.weight, layer.bias, 1, 1),
                    **(setting or {"tau": layer.tau}),
                    **blocks,
                    norm_input=norms,
                    relu=True,
                    return_norms=True,
                )
        assert torch.equal(chain(pictures()), input)


def _pair(size):
    return [size, size]


def test_norms_travel_in_a_chain(norms_passed_on):
    """What another layer's norms would skip is skipped."""
    torch.manual_seed(0)
    model = nn.Sequential(conv(8, 64, tau=0.0), conv(64, 8, tau=1e-3)).eval()
    fuse_(model)
    weight = model[0][0].weight
    settings = [0, *(1, 1), *(1, 1), *(1, 1), *(1, 0, 0, 0), *(0, 0, 0), *(0, 0, 0)]
    with torch.no_grad():
        operands = [[getattr(layer, name) for layer in model[0]] for name in ("weight", "bias")]
        taus = [torch.tensor(layer.tau) for layer in model[0]]
        output = OPS.chain(pictures(), *operands, [None, None], taus, settings * 2)
        assert torch.equal(model(pictures()), output)
        # A weight whose norms are said to be zero leaves nothing but its bias.
        zeros = torch.zeros_like(OPS.conv2d_weight_norm(model[0][1].weight))
        dark = OPS.chain(pictures(), *operands, [None, zeros], taus, settings * 2)
        assert torch.equal(dark, operands[1][1][:, None, None].expand_as(dark))
    with pytest.raises(RuntimeError, match="chain is for inference"):
        OPS.chain(pictures(), [weight], [None], [None], taus[:1], settings)


# One convolution: its kind; stride, padding, dilation; groups, relu, weight_is_ready, kind of the
# knob; blocks.
CONVOLUTION = [0, *(1, 1), *(1, 1), *(1, 1), *(1, 1, 0, 0), *(0, 0, 0), *(0, 0, 0)]


@pytest.mark.parametrize(
    ("layers", "weights", "message"),
    [
        (CONVOLUTION[:-1], 1, "layers must be whole; the last one lacks 1 of its numbers"),
        ([2], 1, "kind must be 0 (convolution) or 1 (max pooling); got 2"),
        ([], 0, "layers must hold a layer; got none"),
        (CONVOLUTION * 2, 1, "weights must be as many as convolutions; got 1"),
        (CONVOLUTION, 2, "weights must be as many as convolutions; got 2"),
        ([*CONVOLUTION[:10], 3, *CONVOLUTION[11:]], 1, "2 (max_error); got 3"),
        ([*CONVOLUTION[:11], 0, 64, 64, *CONVOLUTION[14:]], 1, "must be 32, 64 or 128"),
    ],
)
@pytest.mark.parametrize("meta", [False, True])
def test_chain_refuses(device, layers, weights, message, meta):
    """The kernel, and the fake one that stands for it under torch.compile."""
    device = "meta" if meta else device
    input, weight = pictures(device=device), torch.ones(8, 8, 3, 3, device=device)
    each = [weight] * weights, [None] * weights, [None] * weights, [torch.zeros(())] * weights
    with pytest.raises(ValueError, match=re.escape(message)):
        OPS.chain(input, *each, layers)


@pytest.mark.parametrize("meta", [False, True])
def test_chain_refuses_lists_of_unequal_length(device, meta):
    device = "meta" if meta else device
    input, weight = pictures(device=device), torch.ones(8, 8, 3, 3, device=device)
    with pytest.raises(ValueError, match="must be equally many; got 1, 0, 1 and 1"):
        OPS.chain(input, [weight], [], [None], [torch.zeros(())], CONVOLUTION)


def test_chain_refuses_a_ratio_that_is_no_number_of_the_host(device):
    input, weight = pictures(device=device), torch.ones(8, 8, 3, 3, device=device)
    layers = [*CONVOLUTION[:10], 1, *CONVOLUTION[11:]]
    with pytest.raises(ValueError, match=r"must be 0-d and on the CPU; got shape \[2\]"):
        OPS.chain(input, [weight], [None], [None], [torch.ones(2)], layers)


@pytest.mark.parametrize("knob", [{"valid_ratio": 0.5}, {"max_error": 0.1}, {"tau": 0.5}])
def test_a_chain_does_not_depend_on_the_default_device(norms_passed_on, knob):
    model = nn.Sequential(conv(8, 64, **{"tau": None} | knob), conv(64, 8)).eval()
    fuse_(model)
    with torch.no_grad():
        input = pictures()
        expected = model(input)
        with torch.device("meta"):
            output = model(input)
        assert torch.equal(output, expected)


def test_a_pool_of_one_size_for_both_directions(norms_passed_on):
    model = nn.Sequential(conv(8, 64), nn.MaxPool2d((2,), stride=(2,)), conv(64, 8)).eval()
    with torch.no_grad():
        expected = model(pictures())
        fuse_(model)
        assert torch.equal(model(pictures()), expected)


def test_a_chain_may_be_cut_and_grow(norms_passed_on):
    model = nn.Sequential(conv(8, 64), nn.MaxPool2d(2), conv(64, 8)).eval()
    layers = list(model)
    fuse_(model)
    with torch.no_grad():
        (chain,) = model
        assert torch.equal(chain[1:2](pictures()), layers[1](pictures()))
        chain.append(nn.Sigmoid())
        expected = nn.Sequential(*layers, nn.Sigmoid())(pictures())
        assert torch.equal(chain(pictures()), expected)


def hooked():
    layer = conv(64, 64)
    layer.register_forward_hook(lambda module, args, output: output + 1)
    return layer


class Doubled(SpAMMConv2d):
    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    "layer",
    [
        conv(64, 64, padding_mode="reflect"),
        SpAMMConv2d(64, 64, 3, padding="same", tau=0.5),
        Doubled(64, 64, 3, tau=0.5),
        hooked(),
    ],
    ids=["reflecting", "same padding", "subclass", "hooked"],
)
def test_a_chain_that_was_edited_computes_what_its_layers_do(norms_passed_on, layer):
    model = nn.Sequential(conv(8, 64), conv(64, 64)).eval()
    fuse_(model)
    (chain,) = model
    chain.append(layer.eval())
    with torch.no_grad():
        assert torch.equal(chain(pictures()), nn.Sequential(*chain)(pictures()))


def test_indices_of_a_pool_in_a_chain_are_not_lost(norms_passed_on):
    model = nn.Sequential(conv(8, 64), nn.MaxPool2d(2)).eval()
    fuse_(model)
    (chain,) = model
    chain[1].return_indices = True
    with torch.no_grad():
        pooled, indices = chain(pictures())
    assert pooled.shape == indices.shape


@pytest.mark.cuda
def test_which_kernels_a_chain_runs():
    """The first convolution's own, and none that takes norms of an input again."""
    if not spamm_torch.backend_for("cuda", torch.float16).startswith("sm90"):
        pytest.skip("needs Hopper's kernels")
    model = nn.Sequential(conv(3, 64, tau=0.0), nn.MaxPool2d(2), conv(64, 64)).eval()
    model.to("cuda", torch.float16, memory_format=torch.channels_last)
    fuse_(model)
    input = pictures(128, "cuda", torch.float16, channels=3)
    with torch.no_grad(), torch.profiler.profile() as profile:
        model(input)
        torch.cuda.synchronize()
    kernels = " ".join(event.name for event in profile.events())
    assert "conv_few_channels" in kernels
    assert "max_pool" in kernels
    assert "pixel_norms" not in kernels


@pytest.mark.cuda
@pytest.mark.parametrize("knob", ["tau", "device tau", "valid_ratio", "max_error"])
def test_a_cuda_graph_captures_a_chain(knob):
    tau = torch.tensor(0.5, device="cuda") if knob == "device tau" else 0.5
    setting = {"tau": tau} if "tau" in knob else {"tau": None, knob: 0.5}
    model = nn.Sequential(conv(8, 64, **setting), conv(64, 8, **setting)).eval()
    model.to("cuda", torch.float16, memory_format=torch.channels_last)
    fuse_(model)
    input = pictures(128, "cuda", torch.float16)
    with torch.no_grad():
        expected = model(input)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(input)
        graph.replay()
        assert torch.equal(output, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_chain_opcheck(device, dtype):
    input = pictures(3, device, dtype)
    weight = torch.ones(16, 8, 3, 3, device=device, dtype=dtype)
    pool = [1, *(2, 2), *(2, 2), *(0, 0), *(1, 1), 0]
    convolution = [0, *(1, 1), *(1, 1), *(1, 1), *(1, 1, 1, 1), *(0, 0, 0), *(0, 0, 0)]
    knob = torch.tensor(0.5, dtype=torch.float64)
    torch.library.opcheck(
        OPS.chain.default, (input, [weight], [None], [None], [knob], pool + convolution)
    )


def linear_network():
    torch.manual_seed(0)
    layers = (nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16, bias=False), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(16, 4)).eval()


def test_a_relu_behind_a_linear_layer_is_folded():
    model = linear_network()
    fused = copy.deepcopy(model)
    report = fuse_(fused)
    assert [(f.name, f.action, f.detail) for f in report] == [("1", "folded", "into 0")]
    kinds = [fuse.LinearReLU, nn.Linear, nn.ReLU, nn.Linear]
    assert [type(layer) for layer in fused] == kinds
    assert list(fused.state_dict()) == list(model.state_dict())
    input = torch.randn(5, 3, 8)
    assert torch.equal(fused(input), model(input))
    fused(input).sum().backward()
    assert fused[0].weight.grad.any()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(128, 512, 4096), (64, 256, 128), (1, 64, 8)], ids=str)
def test_a_linear_layer_with_relu_keeps_nan_and_infinities(dtype, sizes):
    """As nn.ReLU does; cuBLASLt documents max(x, 0), which may lose a NaN."""
    rows, inner, columns = sizes
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inner, columns), nn.ReLU()).to("cuda", dtype).eval()
    fused = copy.deepcopy(model)
    fuse_(fused)
    assert isinstance(fused[0], fuse.LinearReLU)
    input = torch.randn(rows, inner, device="cuda", dtype=dtype)
    input[0, 3] = torch.nan
    input[-1, 5] = torch.inf
    with torch.no_grad():
        expected, output = model(input), fused(input)
    assert expected.isnan().any()
    assert torch.equal(output.isnan(), expected.isnan())
    assert torch.equal(output.isinf(), expected.isinf())


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(128, 8), (1, 8), (3, 5, 8)], ids=str)
def test_a_linear_layer_with_relu_on_cuda(shape):
    model = linear_network().cuda().half()
    fused = copy.deepcopy(model)
    fuse_(fused)
    input = torch.randn(shape, device="cuda").half()
    input[0, ..., 3] = torch.nan
    with torch.inference_mode():
        torch.testing.assert_close(fused(input), model(input), equal_nan=True)


def test_small_batches_and_gradients_take_the_layers_one_by_one(norms_passed_on, monkeypatch):
    model = network()
    fuse_(model)
    monkeypatch.setattr("spamm_torch.chain._encode_convolution", None)
    with torch.no_grad():
        assert model(pictures(63)).shape == (63, 5)
    model(pictures(64)).sum().backward()
    assert model.conv1[0].weight.grad.any()


def test_a_threshold_set_anew_counts(norms_passed_on):
    model = network()
    fuse_(model)
    with torch.no_grad():
        before = model(pictures())
        for layer in model.conv1:
            if isinstance(layer, SpAMMConv2d):
                layer.tau = 0.0
        assert not torch.equal(model(pictures()), before)
        model.conv1[0].tau = torch.tensor(2.0)
        model.conv1[1].tau = model.conv1[3].tau = 2
        assert torch.equal(model(pictures()), before)


def test_threads_share_a_fused_model(norms_passed_on):
    model = network()
    fuse_(model)
    with torch.no_grad():
        inputs = [pictures(64 + i) for i in range(4)]
        expected = [model(input) for input in inputs]
    results = {}

    def serve(i):
        with torch.no_grad():
            results[i] = [model(inputs[i]) for _ in range(5)]

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, outputs in results.items():
        assert all(torch.equal(output, expected[i]) for output in outputs)
    assert len(results) == 4


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("images", [64, 100, 128])
def test_fused_on_cuda(dtype, images):
    model = network().cuda().to(dtype, memory_format=torch.channels_last)
    fused = copy.deepcopy(model)
    fuse_(fused)
    input = pictures(images, "cuda", dtype)
    with torch.inference_mode():
        expected = model(input)
        torch.testing.assert_close(fused(input), expected)
        assert torch.equal(fused(input), fused(input))


@pytest.mark.cuda
def test_a_cuda_graph_captures_a_fused_model():
    model = network().cuda().half()
    fuse_(model)
    input = pictures(128, "cuda", torch.float16)
    with torch.inference_mode():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(input)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(input)
        input.copy_(input.flip(0))
        graph.replay()
        assert torch.equal(output, model(input))


# ---- Max pooling that computes output norms -----------------------------------------------------

POOLS = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (3, 2), "stride": (1, 2), "dilation": (2, 1)},
    {"kernel_size": 2, "stride": 3, "ceil_mode": True},
]


def norms_of(output):
    """By definition, in float64."""
    images, channels = output.shape[:2]
    squares = torch.nn.functional.pad(
        output.double().square(), (0, 0, 0, 0, 0, -channels % 64, 0, -images % 64)
    )
    blocks = squares.unflatten(1, (-1, 64)).unflatten(0, (-1, 64)).sum((1, 3))
    return blocks.permute(0, 2, 3, 1).sqrt()


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(1, 8, 7, 5), (65, 72, 8, 7), (130, 5, 5, 6)], ids=str)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_max_pool_is_torchs_and_leaves_norms(device, pool, dtype, sizes, layout):
    generator = torch.Generator().manual_seed(2)
    input = torch.randn(sizes, generator=generator).to(device, dtype, memory_format=layout)
    output, norms = OPS.max_pool2d_with_norms(input, **pool)
    expected = torch.nn.functional.max_pool2d(input, **pool)
    assert torch.equal(output, expected)
    assert output.is_contiguous(memory_format=layout)
    assert norms.dtype == torch.float32
    assert norms.is_contiguous()
    torch.testing.assert_close(norms.double(), norms_of(expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_max_pool_of_extremes(device, dtype):
    """NaN wins, as in torch; what is infinite, large or small neither overflows nor vanishes."""
    info = torch.finfo(dtype)
    large = info.max / 64  # the norm of 4096 such entries is info.max
    values = torch.tensor([large, info.tiny, -torch.inf, torch.inf, torch.nan, -large])
    input = values.to(device, dtype).view(1, 1, 6, 1).repeat(64, 64, 1, 4)
    input[:, :, 4, 0] = 1
    input = input.contiguous(memory_format=torch.channels_last)
    output, norms = OPS.max_pool2d_with_norms(input, [1, 2])
    assert torch.equal(
        output.nan_to_num(7), torch.nn.functional.max_pool2d(input, (1, 2)).nan_to_num(7)
    )
    torch.testing.assert_close(norms.double(), norms_of(output), rtol=1e-5, atol=0, equal_nan=True)


def test_max_pool_keeps_nan_beside_larger(device):
    input = torch.full((64, 8, 2, 2), 3.0, dtype=torch.float16, device=device)
    input[:, :, 0, 1] = torch.nan
    input = input.contiguous(memory_format=torch.channels_last)
    output, norms = OPS.max_pool2d_with_norms(input, 2)
    assert output.isnan().all()
    assert norms.isnan().all()


def test_norms_that_a_pool_leaves_are_those_of_the_pass(device):
    """Bit for bit what the convolution would take itself."""
    input = pictures(100, device, torch.float16, channels=64)
    weight = torch.randn(64, 64, 3, 3, generator=torch.Generator().manual_seed(3))
    weight = weight.to(device, torch.float16, memory_format=torch.channels_last)
    output, norms = OPS.max_pool2d_with_norms(input, 2)
    setting = {"padding": 1, "valid_ratio": 0.5}
    own = spamm_torch.conv2d(output, weight, **setting)
    assert torch.equal(spamm_torch.conv2d(output, weight, norm_input=norms, **setting), own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_max_pool_opcheck(device, dtype, pool):
    input = pictures(3, device, dtype)
    torch.library.opcheck(OPS.max_pool2d_with_norms.default, (input,), pool)
