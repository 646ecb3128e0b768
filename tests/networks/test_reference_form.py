"""convert_ with a reference picture: deviations give the model's own results, and skip zeros."""

import copy

import pytest
import torch
from small_models import (
    ZOO,
    Made,
    assert_same,
    calling,
    canvas,
    compiled,
    converted_alike,
    deviations,
    is_served,
    pictures,
    resnet,
    rows,
    scattered,
    unet,
)
from support import Watching, norms_of_pixels, raises_line
from torch import nn
from torch.nn import functional as F

from spamm_torch import SpAMMConfig, convert_, refresh_, revert_
from spamm_torch.networks.install import fused_of

NOTE = "generated forwards compute deviations from the reference picture"


def converted(make, **options):
    """A model that was converted, and what it was."""
    model = make()
    convert_(model, **options)
    return model, make()


# ---- Results ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0.0, 0.7])
def test_a_unet_gives_what_it_gave(level):
    inputs = scattered(level=level), canvas(level=level), pictures(3, 1, 32)
    report = converted_alike(unet(), inputs, reference=canvas(level=level))
    assert rows(report)["bottom.3"] == ("spamm", ("bn", "relu"))


def test_the_reference_is_taken_to_the_device_and_type_of_the_model(device):
    model = unet().to(device)
    other = copy.deepcopy(model)
    x = scattered().to(device)
    report = convert_(model, reference=canvas(level=0.5).double())
    assert NOTE in report.notes
    convert_(other, reference=canvas(level=0.5).to(device))
    assert is_served(model, x)
    with torch.no_grad():
        assert torch.equal(model(x), other(x))


FORWARDS = {
    "max pool": lambda m, x: m.conv2(F.max_pool2d(m.conv1(x), 3, 2, 1)),
    "average pool": lambda m, x: m.conv2(F.avg_pool2d(F.relu(m.conv1(x)), 2)),
    "adaptive pool and linear": lambda m, x: m.fc(
        torch.flatten(F.adaptive_avg_pool2d(m.conv2(m.conv1(x)), 1), 1)
    ),
    "mean": lambda m, x: m.fc(m.conv1(x).relu().mean((2, 3))),
    "nearest": lambda m, x: m.conv2(F.interpolate(m.conv1(x), scale_factor=2)),
    "size of another": lambda m, x: m.conv2(F.interpolate(m.conv1(x), size=x.shape[2:])),
    "add": lambda m, x: m.conv2(F.silu(F.relu(m.conv1(x)) + m.conv2(x))),
    "add of the input": lambda m, x: m.conv2(m.bn(m.conv1(x)) + x),
    "broadcast add": lambda m, x: m.conv2(m.conv1(x) + m.conv2(x).mean((2, 3), keepdim=True)),
    "concatenation": lambda m, x: torch.cat((m.conv1(x), m.conv2(m.conv1(x))), 1),
    "split": lambda m, x: m.conv2(torch.cat(m.conv1(x).chunk(2, 1)[::-1], 1)),
    "gate": lambda m, x: m.conv2(m.conv1(x) * torch.sigmoid(m.conv2(x))),
    "one layer twice": lambda m, x: m.conv1(F.hardswish(m.conv1(x))),
    "batch norm before": lambda m, x: m.conv2(F.relu(m.bn(x))),
    "in place": lambda m, x: m.conv2(torch.sigmoid_(m.conv1(x))),
    "two results": lambda m, x: (m.conv1(x), {"x": m.conv2(x)}),
    # The first convolution's call adds the second one's result, and so runs after it.
    "layers that run in another order": lambda m, x: m.fc(
        F.relu(m.bn(m.conv1(x)).add_(m.conv2(x))).mean((2, 3))
    ),
    "concatenation by position": lambda m, x: m.conv2(torch.cat([m.conv1(x)[:, :4], x[:, 4:]], 1)),
    "residual": lambda m, x: F.leaky_relu(m.bn(m.conv2(F.relu6(m.conv1(x)))) + x),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_what_stands_between_convolutions(name):
    options = {"reference": pictures(1, 8, seed=3), "tolerance": 1e-5}
    converted_alike(calling(FORWARDS[name]), pictures(3, 8), **options)


@pytest.mark.parametrize(
    ("network", "tolerance"),
    [
        *((ZOO[name], 1e-4) for name in ("resnet18", "shufflenet_v2_x0_5")),
        pytest.param(ZOO["densenet121"], 1e-4, marks=pytest.mark.thorough),
        *((torch.float64, 1e-10), (torch.bfloat16, 0.05)),  # of the U-Net
    ],
)
def test_networks_of_the_zoo_and_other_types(network, tolerance):
    is_type = isinstance(network, torch.dtype)
    model = unet().to(network) if is_type else network.model()
    x = scattered().to(network) if is_type else network.pictures()
    expected = model(x)
    convert_(model, reference=torch.zeros_like(x[:1]))
    assert is_served(model, x)
    with torch.no_grad():
        assert (model(x) - expected).norm() < tolerance * expected.norm()


def test_geometry_of_convolutions():
    layers = [
        nn.Conv2d(4, 8, 3, stride=2, padding=2, bias=False),
        nn.ReLU(),
        nn.Conv2d(8, 8, (3, 1), dilation=2, padding=(2, 1), groups=4),
        nn.ConvTranspose2d(8, 8, 2, stride=2),
        nn.Conv2d(8, 40, 3, padding="same", padding_mode="reflect"),
        nn.Conv2d(40, 33, 1),
    ]
    setting = SpAMMConfig(tau=1e-30, pixel_block=(1, 4, 8))
    model = nn.Sequential(*layers).eval()
    converted_alike(model, pictures(3, 4), setting, reference=pictures(1, 4))


def test_results_do_not_depend_on_the_batch():
    model = unet()
    convert_(model, reference=canvas())
    x = scattered(4)
    with torch.no_grad():
        together = model(x)
        assert all(torch.equal(model(x[i : i + 1])[0], together[i]) for i in range(4))


def opaque(forward, **layers):
    """A model that fx cannot trace."""
    return Made(lambda m, x: x if x.sum() > 1e9 else forward(m, x), **layers).eval()


def test_a_part_that_is_traced_inside_one_that_is_not():
    first = nn.Conv2d(1, 1, 3, padding=1)
    model = opaque(lambda m, x: m.inner(m.first(x)), first=first, inner=unet())
    converted_alike(model, scattered(), reference=canvas())
    assert fused_of(model) is None


# ---- What is skipped ----------------------------------------------------------------------------


def inputs_of_convolutions(model, x):
    """The deviations that convolutions get in a call."""
    return [part for parts, _ in deviations(lambda: model(x)) for part in parts]


def test_deviations_of_the_reference_are_zero_everywhere():
    model = unet()
    convert_(model, reference=canvas(level=0.3))
    found = inputs_of_convolutions(model, canvas(2, level=0.3))
    assert len(found) == 8
    assert not any(input.any() for input in found)


def test_zeros_reach_as_far_as_no_pixel_changed():
    model = unet()
    convert_(model, reference=canvas(size=64))
    for input in inputs_of_convolutions(model, scattered(1, 64)):
        assert input.any()
        assert not input[..., input.shape[2] // 2 :, :].any()


@torch.no_grad()
@pytest.mark.parametrize(
    ("width", "read"),
    [(32, [2 * 32, 32, 64, 64, 2 * 32, 2 * 32, 2 * 32]), (64, [64, 64, 128, 128, 64, 64, 64])],
)
def test_norms_travel_from_layer_to_layer(width, read, monkeypatch):
    """On a device that computes them on the way, each is that of the deviation it stands for."""
    device_computes = "spamm_torch.reference.fused.computes_output_norms"
    monkeypatch.setattr(device_computes, lambda device, dtype: True)
    model, original = unet(width), unet(width)
    convert_(model, reference=canvas(level=0.2))
    checked = []

    def check(name, args, options):
        images = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
        given = options.get("norm_parts", [options.get("norm_input")])
        for image, norms in zip(images, given, strict=False):
            if norms is not None:
                columns = image.shape[3] // norms.shape[2]
                image = image.unflatten(3, (-1, columns)).permute(0, 4, 1, 2, 3).flatten(1, 2)
                expected = norms_of_pixels(image).to(norms)
                torch.testing.assert_close(norms, expected, rtol=1e-4, atol=0)
                checked.append(image.shape[1])

    for x in (scattered(level=0.2), pictures(3, 1, 32)):
        with Watching(check):
            found = model(x)
        torch.testing.assert_close(found, original(x), rtol=1e-4, atol=1e-4)
    # All but the first two convolutions, whose norms nothing left, and the head, which is dense; of
    # the pool, and of both parts of the concatenation. Of 32 channels two columns are together.
    assert checked == 2 * read


def test_a_setting_skips_small_deviations():
    model, original = unet(), unet()
    report = convert_(model, SpAMMConfig(tau=1e9), reference=canvas())
    assert next(row for row in report if row.name == "bottom.0").setting == SpAMMConfig(tau=1e9)
    with torch.no_grad():
        of_reference = original(canvas())
        assert not torch.allclose(model(scattered()), original(scattered()), atol=1e-3)
        torch.testing.assert_close(model(canvas()), of_reference, rtol=1e-4, atol=1e-4)


# ---- When it is taken ---------------------------------------------------------------------------


def test_inputs_that_are_not_like_the_reference_take_the_models_own_forward():
    model, original = converted(unet, reference=canvas())
    for x in (pictures(2, 1, 40), canvas(2, 64)):
        assert not is_served(model, x)
        assert_same(model, original, x)


def test_layers_stay_what_they_were_and_revert_undoes_it():
    model = resnet()
    original = copy.deepcopy(model)
    kinds = [type(module) for module in model.modules()]
    before = original(pictures())
    convert_(model, SpAMMConfig(tau=1e-9), reference=pictures(1))
    assert [type(module) for module in model.modules()][1:] == kinds[1:]
    assert list(model.state_dict()) == list(original.state_dict())
    assert torch.equal(model.train()(pictures()), original.train()(pictures()))
    revert_(model.eval())
    original.eval()
    assert [type(module) for module in model.modules()] == kinds
    model.load_state_dict(resnet().state_dict())
    assert torch.equal(model(pictures()), before)


def test_a_model_in_training_mode_is_served_once_it_is_in_eval_mode():
    model = resnet()
    original = copy.deepcopy(model)
    convert_(model.train(), reference=pictures(1))
    assert all(
        torch.equal(own, other)
        for own, other in zip(model.buffers(), original.buffers(), strict=True)
    )
    assert not is_served(model, pictures())
    model.load_state_dict(original.state_dict())  # what the call in training mode changed
    assert is_served(model.eval(), pictures())
    assert_same(model, original, pictures())


@torch.no_grad()
def test_refresh_follows_writes_that_nothing_tells_of():
    model, original = converted(unet, reference=canvas())
    for module in (model, original):
        module.bottom[0].weight.data.mul_(2)
    refresh_(model)
    assert is_served(model, scattered())
    assert_same(model, original, scattered())


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("down.divisor_override", 3), ("up.scale_factor", 3.0)),
        *(("pool.output_size", (10, 12)), ("drop.training", True)),
    ],
)
def test_settings_of_layers_that_change_are_noticed(setting, value):
    model = Made(  # convolutions, and between them layers that take deviations as they are
        lambda m, x: m.conv2(m.pool(m.shuffle(m.drop(m.up(m.down(m.conv1(x))))))),
        **{"conv1": nn.Conv2d(3, 8, 3), "conv2": nn.Conv2d(2, 8, 3), "drop": nn.Dropout()},
        down=nn.AvgPool2d(2, padding=1),
        up=nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False),
        **{"shuffle": nn.PixelShuffle(2), "pool": nn.AdaptiveAvgPool2d((12, 12))},
    ).eval()
    original = copy.deepcopy(model)
    convert_(model, reference=pictures(1))
    assert is_served(model, pictures())
    layer, name = setting.split(".")
    for module in (model, original):
        setattr(getattr(module, layer), name, value)
    assert not is_served(model, pictures())
    if setting != "drop.training":  # which draws
        assert_same(model, original, pictures())


def test_operands_carry_no_graph():
    model = unet()
    convert_(model, reference=canvas())
    for _ in range(2):
        assert not any(x.requires_grad for x in fused_of(model).operands if x is not None)
        nn.init.normal_(model.bottom[0].weight)
        model.requires_grad_(False)(scattered())


def test_what_learns_beside_frozen_convolutions_gets_its_gradient():
    layers = nn.Conv2d(1, 32, 3), nn.GroupNorm(4, 32), nn.ReLU(), nn.Conv2d(32, 32, 3)
    model = nn.Sequential(*layers).eval()
    for conv in (model[0], model[3]):
        conv.requires_grad_(False)
    original = copy.deepcopy(model)
    convert_(model, reference=canvas())
    for m in (model, original):
        m(scattered()).square().sum().backward()
    torch.testing.assert_close(model[1].weight.grad, original[1].weight.grad)
    assert is_served(model, scattered())


def test_it_compiles_into_one_graph():
    model, original = converted(resnet, reference=pictures(1))
    assert_same(lambda x: compiled(model, x)[0], original)


# ---- With an example ----------------------------------------------------------------------------


def test_engines_are_measured_and_the_fastest_form_is_kept(measured):
    measured(of_layers=(2.0, 1.0), of_models=(5.0, 4.0, 2.0, 3.0))
    example = {"example_input": scattered(3), "reference": canvas()}
    report = converted_alike(unet(), scattered(), **example)
    # Zeros are skipped for any number of channels.
    assert rows(report)["encoder.0.0"] == ("spamm", ("bn", "relu"))


def test_nothing_is_installed_that_measured_slower(measured):
    measured(of_layers=(1.0, 2.0), of_models=(1.0, 2.0, 3.0, 4.0))
    model = unet()
    report = convert_(model, example_input=scattered(3), reference=canvas())
    assert fused_of(model) is None
    assert "measured: original 1 us" in str(report)
    assert NOTE not in report.notes


def test_convolutions_whose_calls_fold_windows_into_the_batch_are_not_measured(measured):
    measured(of_layers=(2.0, 1.0), of_models=(5.0, 4.0, 3.0, 2.0))
    torch.manual_seed(0)
    example = {"example_input": scattered(3), "reference": canvas()}
    model = opaque(
        lambda m, x: (m.inner(x), m.conv(x.reshape(-1, 1, 8, 8))),
        inner=nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()),
        conv=nn.Conv2d(1, 4, 3),
    )
    report = converted_alike(model, scattered(), **example)
    times = {row.name: row.times for row in report}
    assert times["inner.0"]
    assert not times["conv"]


# ---- Bad input ----------------------------------------------------------------------------------


BAD = [
    *(
        (unet, {"example_input": scattered(), "reference": reference}, error, line)
        for reference, error, line in (
            ("canvas.png", TypeError, "reference must be a tensor; got str"),
            (canvas(2), ValueError, r"one picture of floats, .* got a tensor of shape \(2, "),
            (canvas()[0], ValueError, "one picture of floats"),
            (canvas().int(), ValueError, r"one picture of floats, .* int32"),
            (canvas() / 0, ValueError, "reference must be finite in float32, .* got NaN"),
            (canvas().double() + 1e300, ValueError, "reference must be finite in float32"),
            (canvas().to_sparse(), TypeError, r"reference must be a dense \(strided\) tensor"),
            (canvas().to("meta"), ValueError, "with values; got a picture on the device me"),
            (canvas(size=64), ValueError, r"of example_input's pictures, \(2, 1, 32, 32\)"),
        )
    ),
    (resnet, {"reference": pictures(1, 2)}, ValueError, "what the model takes; got a tensor"),
    (lambda: unet().to("meta"), {}, ValueError, "expects a model with values; got one whose"),
    (unet, {"fuse": False}, ValueError, "a reference must come with fuse=True; got fuse=False"),
    (
        lambda: opaque(lambda m, x: m.conv(x), conv=nn.Conv2d(1, 4, 3)),
        *({}, ValueError, r"a part that torch\.fx can trace; got Made"),
    ),
]


@pytest.mark.parametrize(("make", "options", "error", "line"), BAD)
def test_references_models_and_options_that_do_not_fit(make, options, error, line):
    model = make()
    kind = type(model)
    with raises_line(error, line):
        convert_(model, **{"reference": canvas(), **options})
    assert type(model) is kind
    assert fused_of(model) is None


def test_parts_without_a_reference_form_are_left():
    """What is written to in place, and read later, and what mixes the pictures of a batch."""

    def writes(m, x):
        y = m.conv1(x)
        torch.sigmoid_(y)
        return m.conv2(y)

    def mixes(m, x):
        return m.conv2(m.conv1(x).reshape(-1, 8, 8, 8)).mean()

    for forward, line in ((writes, "in place that is read later"), (mixes, "for each picture")):
        model = calling(forward)
        before = model(pictures(2, 8))
        report = convert_(model, reference=pictures(1, 8))
        assert {row.action for row in report} == {"left"}
        assert any(line in note for note in report.notes)
        assert torch.equal(model(pictures(2, 8)), before)
