"""Layouts of convolutions of deviations: the same sums from blocks that are filled better."""

import copy
import functools
import itertools

import pytest
import torch
from small_models import (
    Made,
    canvas,
    converted_alike,
    deviations,
    marks_of_forms,
    pictures,
    scattered,
    source_of,
    unet,
)
from support import FORMATS, Watching
from torch import nn
from torch.nn import functional as F

from spamm_torch import SpAMMConfig, convert_
from spamm_torch._timing import Timing
from spamm_torch.networks.config import lossless
from spamm_torch.reference import layouts
from spamm_torch.reference.layouts import Layout, find_layout
from spamm_torch.reference.pixel_norms import regrouped

ZEROS = lossless(torch.float32)
canvas, scattered = (functools.partial(make, level=0.2) for make in (canvas, scattered))


# ---- Which layout -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "options", "layout"),
    [
        *(((32, 32), {}, Layout(2)), ((64, 32), {}, Layout(2)), ((16, 16), {}, Layout(4))),
        *(((1, 32), {}, Layout(8)), ((3, 64), {}, Layout(8))),
        *(((32, 11), {"kernel_size": 1, "padding": 0}, Layout(8)), ((64, 64), {}, None)),
        ((32, 32), {"kernel_size": 5, "padding": 4, "dilation": 2}, Layout(2)),
        *(((32, 32), {"padding": 0}, None), ((32, 32), {"stride": (1, 2)}, None)),
        *(((32, 32), {"stride": (2, 1)}, Layout(2)), ((32, 32), {"groups": 2}, None)),
        *(((32, 32), {"padding_mode": "reflect"}, None), ((32, 32), {"padding": "same"}, None)),
    ],
)
def test_it_follows_channels_and_geometry(channels, options, layout):
    conv = nn.Conv2d(*channels, **{"kernel_size": 3, "padding": 1, **options})
    assert find_layout(conv, ZEROS, 64, is_doubled=False) == layout


def test_widths_settings_and_upsampling():
    conv = nn.Conv2d(32, 32, 3, padding=1)
    assert find_layout(conv, ZEROS, 63, is_doubled=False) is None
    assert find_layout(conv, SpAMMConfig(tau=1e-3), 64, is_doubled=False) is None
    assert find_layout(conv, None, 64, is_doubled=False) is None
    assert find_layout(conv, ZEROS, 64, is_doubled=True) == Layout(in_phases=True)
    strided = nn.Conv2d(32, 32, 3, padding=1, stride=2)
    assert find_layout(strided, ZEROS, 64, is_doubled=True) is None


# ---- The same sums ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "options", "columns"),
    [
        ((8, 16), {"kernel_size": 3, "padding": 1}, 2),
        ((8, 16), {"kernel_size": 3, "padding": 1}, 4),
        ((3, 5), {"kernel_size": (2, 7), "padding": (0, 3), "stride": (2, 1)}, 2),
        ((3, 5), {"kernel_size": (4, 5), "padding": (1, 6), "dilation": (2, 3)}, 4),
        ((3, 5), {"kernel_size": 1}, 8),
    ],
)
def test_columns_together_give_the_sums(channels, options, columns):
    conv = nn.Conv2d(*channels, bias=False, **options).double()
    x = torch.randn(2, channels[0], 12, 24, dtype=torch.float64)
    layout = Layout(columns)
    stride, padding, dilation, groups = layout.geometry(conv)
    weight = layout.weight(conv, conv.weight.detach())
    together = layouts.columns_together(x, columns)
    found = F.conv2d(together, weight, None, stride, padding, dilation, groups)
    expected = conv(x).detach()
    assert found.shape == layout.image(expected).shape
    torch.testing.assert_close(layouts.columns_apart(found, columns), expected)


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (5, 3), (3, 7)])
def test_phases_give_the_sums(kernel):
    conv = nn.Conv2d(3, 5, kernel, padding=(kernel[0] // 2, kernel[1] // 2), bias=False).double()
    small = torch.randn(2, 3, 6, 9, dtype=torch.float64)
    x, layout = F.interpolate(small, scale_factor=2), Layout(in_phases=True)
    stride, padding, dilation, groups = layout.geometry(conv)
    weight = layout.weight(conv, conv.weight.detach())
    found = F.conv2d(small, weight, None, stride, padding, dilation, groups)
    torch.testing.assert_close(found, layout.image(conv(x).detach()))


def test_weights_in_phases_have_zeros_where_nothing_is_read():
    weight = Layout(in_phases=True).weight(nn.Conv2d(8, 64, 3, padding=1), torch.ones(64, 8, 3, 3))
    by_phase = weight.unflatten(0, (2, 2, 64)).abs().sum((2, 3))
    for row, column in itertools.product(range(2), repeat=2):
        live = torch.zeros(3, 3, dtype=torch.bool)
        live[row : row + 2, column : column + 2] = True
        assert torch.equal(by_phase[row, column] > 0, live)


@pytest.mark.parametrize(
    ("channels", "before", "after"),
    [(32, 2, 8), (32, 1, 2), (32, 1, 8), (16, 1, 4), (64, 1, 2), (8, 1, 8), (8, 2, 4), (64, 2, 1)],
)
@pytest.mark.parametrize("count", [2, 0])
def test_norms_are_regrouped(channels, before, after, count):
    def norms(columns):
        x = layouts.columns_together(images, columns)
        return F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % 64)).unflatten(1, (-1, 64)).norm(dim=2)

    torch.manual_seed(0)
    images = torch.randn(count, channels, 3, 16)
    found = regrouped(norms(before).movedim(1, -1), channels, before, after)
    torch.testing.assert_close(found, norms(after).movedim(1, -1))


# ---- In a network -------------------------------------------------------------------------------


def shapes_of(call):
    """What convolutions of deviations get in a call: channels, rows, columns, outputs."""
    return [
        (sum(part.shape[1] for part in parts), *parts[0].shape[2:], weight.shape[0])
        for parts, weight in deviations(call)
    ]


@torch.no_grad()
@pytest.mark.parametrize(
    ("width", "memory_format"),
    [(8, "last"), (16, "last"), (32, "first"), (32, "last"), (64, "last")],
)
def test_a_unet_gives_what_it_gave(width, memory_format, computing_norms):
    model = unet(width, depth=2).to(memory_format=FORMATS[memory_format])
    inputs = scattered(), canvas(2), pictures(3, 1, 32), canvas(0)
    converted_alike(model, inputs, reference=canvas())


@torch.no_grad()
def test_layers_are_computed_in_layouts(computing_norms):
    model = unet(classes=11)
    convert_(model, reference=canvas())
    assert shapes_of(lambda: model(scattered())) == [
        (8, 32, 4, 256),  # eight columns of one channel
        (64, 32, 16, 64),
        (32, 16, 16, 64),
        (64, 16, 16, 64),
        (64, 16, 16, 128),  # before upsampling, four phases
        (128, 32, 16, 64),  # two columns of both parts
        (64, 32, 16, 64),
        (256, 32, 4, 88),
    ]
    parts = [part for parts, _ in deviations(lambda: model(canvas(2))) for part in parts]
    assert not any(part.any() for part in parts)  # zeros stay zeros
    source = source_of(model, "forward_with_norms")
    assert "_spamm_torch_conv2d_deviation(" in source
    assert "torch.ops.spamm_torch." not in source  # looking one up takes time in each call
    report = convert_(unet(width=8), reference=canvas())
    reasons = {row.name: row.reason for row in report}
    assert reasons["encoder.0.0"] == "skips zeros, columns together"
    assert reasons["up.0.1"] == "skips zeros, in phases"


def spots(count=3, channels=32, rows=16, columns=16, top=2, left=3):
    """Pictures of ones with noise somewhere in 3 x 3 pixels."""
    x = torch.ones(count, channels, rows, columns)
    x[:, :, top : top + 3, left : left + 3] = torch.randn(count, channels, 3, 3)
    return x


def layers(*names):
    return {name: nn.Conv2d(32, 32, 3, padding=1) for name in names}


def readers():
    """Upsampling whose result more than one layer reads, and phases that are read as they are."""

    def forward(m, x):
        larger = m.up(m.first(x))
        return m.last(m.second(larger)) + F.max_pool2d(larger, 3, 1, 1)[:, :8]

    rest = {"up": nn.Upsample(scale_factor=2), "last": nn.Conv2d(32, 8, 3, padding=1)}
    return Made(forward, **layers("first", "second"), **rest)


def sums():
    """Sums that convolutions absorb: beside columns together, and behind upsampling."""

    def forward(m, x):
        y = F.relu(m.second(F.relu(m.first(x))) + x)
        larger = F.interpolate(y, scale_factor=2)
        return F.relu(m.third(larger) + larger)

    return Made(forward, **layers("first", "second", "third"))


@pytest.mark.parametrize("kind", [readers, sums])
def test_other_networks_give_what_they_gave(kind, computing_norms):
    """Of 15 columns none can be together."""
    x = spots(rows=12, columns=15)
    converted_alike(kind().eval(), x, reference=torch.ones_like(x[:1]))


@pytest.mark.parametrize("names_what_is_read", [True, False])
def test_what_is_written_under_another_name_is_read_before(names_what_is_read, computing_norms):
    """What is upsampled has another name, by which it is changed before a convolution reads on."""

    def forward(m, x):
        y = m.first(x)
        other = m.same(y)
        if names_what_is_read:
            y, other = other, y
        larger = F.interpolate(y, scale_factor=2)
        smaller = F.max_pool2d(x, 2)
        other += x
        return m.second(larger).mean((2, 3)) + smaller.mean((2, 3))

    torch.manual_seed(0)
    model = Made(forward, **layers("first", "second"), same=nn.Dropout()).eval()
    reference = torch.ones(1, 32, 16, 16)
    report = converted_alike(model, spots(), reference=reference)
    assert {row.action for row in report} == {"spamm"}


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "reads"),
    [
        ({"scale_factor": 2}, (32, 12, 16, 128)),
        ({"scale_factor": (2.0, 2)}, (32, 12, 16, 128)),
        ({"size": (24, 32)}, (32, 12, 16, 128)),
        ({"scale_factor": 2.05}, (64, 24, 16, 64)),
        ({"scale_factor": (2, 2.03)}, (64, 24, 16, 64)),
    ],
)
def test_phases_are_of_upsampling_by_exactly_two(options, reads, computing_norms):
    """A factor of 2.05 makes 24 x 32 of 12 x 16, too, but repeats other rows."""
    model = Made(
        lambda m, x: m.second(F.interpolate(m.first(x), **options)), **layers("first", "second")
    ).eval()
    x = spots(rows=12, top=9, left=13)
    converted_alike(model, x, reference=torch.ones_like(x[:1]))
    assert shapes_of(lambda: model(x))[1] == reads


def in_half_precision(model):
    for layer in (model.first, model.second):
        layer.bfloat16()
    return model


@torch.no_grad()
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_network_of_two_types(when, monkeypatch):
    """A head in single precision behind layers in half precision, which alone have norms.

    No layout takes the operands of another type.
    """
    for module in ("conversion", "fused"):
        name = f"spamm_torch.reference.{module}.computes_output_norms"
        monkeypatch.setattr(name, lambda device, dtype: dtype == torch.bfloat16)
    torch.manual_seed(0)
    model = Made(
        lambda m, x: m.head(F.relu(m.second(F.relu(m.first(x)))).float()),
        **layers("first", "second", "head"),
    ).eval()
    original = in_half_precision(copy.deepcopy(model))
    x = spots(columns=32).bfloat16()
    if when == "before":
        in_half_precision(model)
    convert_(model, reference=torch.ones(1, 32, 16, 32))
    if when == "after":  # the change of memory has the operands computed anew
        in_half_precision(model).to(memory_format=torch.channels_last)
    found = shapes_of(lambda: model(x))
    assert len(found) == 3
    assert found[0] == (64, 16, 16, 64)
    torch.testing.assert_close(model(x), original(x), rtol=1e-2, atol=1e-2)


@torch.no_grad()
def test_a_concatenation_of_two_types(computing_norms):
    """Torch makes them one."""
    model = Made(
        lambda m, x: m.second(torch.cat((m.first(x), x.double()), 1)),
        first=nn.Conv2d(8, 32, 3, padding=1),
        second=nn.Conv2d(40, 32, 3, padding=1).double(),
    ).eval()
    x = spots(2, 8)
    converted_alike(model, x, reference=torch.ones_like(x[:1]))
    assert len(deviations(lambda: model(x))) == 2


def noting(names):
    """Appends the name of each op that runs."""
    return Watching(lambda name, *_: names.append(name))


def test_marks_come_right_before_the_calls_that_the_model_makes(computing_norms, monkeypatch):
    forms = marks_of_forms(monkeypatch, noting)
    report = convert_(unet(depth=2), example_input=scattered(), reference=canvas())
    layers = {row.name for row in report}
    assert len(layers) > 8
    for form in forms:
        marks = [place for place, name in enumerate(form) if name in layers]
        assert {form[place] for place in marks} == layers
        for place, end in itertools.pairwise([*marks, len(form)]):
            calls = [name for name in form[place:end] if "conv2d_deviation" in name]
            assert len(calls) == 1


def test_the_plan_without_an_example_is_among_the_whole_models(computing_norms, measured):
    """Layer by layer dense is faster, the whole model with all that skips is."""
    measured(of_layers=(1.0, 2.0), of_models=(3.0, 2.0, 1.0))
    model = unet()
    predicted = convert_(copy.deepcopy(model), reference=canvas())
    report = convert_(model, example_input=scattered(), reference=canvas())
    assert all(row.action == "spamm" for row in predicted)
    assert [(row.action, row.setting) for row in report] == [
        (row.action, row.setting) for row in predicted
    ]


@torch.no_grad()
def test_dense_layers_read_pools_and_joins_of_deviations(computing_norms, measured):
    measured(of_layers=(1.0, 2.0), of_models=(3.0, 1.0, 2.0))
    model, original = unet(), unet()
    report = convert_(model, example_input=scattered(), reference=canvas())
    assert all(row.action == "dense" for row in report)
    names = []
    with noting(names):
        found = model(scattered())
    torch.testing.assert_close(found, original(scattered()), rtol=1e-4, atol=1e-4)
    assert {"max_pool2d_deviation", "join_deviations"} <= set(names)
    assert not {"aten::max_pool2d", "aten::max_pool2d_with_indices"} & set(names)


@torch.no_grad()
@pytest.mark.parametrize("kind", [unet, readers, sums])
@pytest.mark.parametrize("first", [None, "dense", "spamm"])
def test_any_plan_gives_what_the_model_gives(kind, first, device, computing_norms, monkeypatch):
    """On the device's own kernels: without an example, and where every other layer is dense."""
    first_is_dense = int(first == "dense")

    def times_of_parts(calls, _, before):
        names = []
        for call, prepare in zip(calls, before, strict=True):
            prepare()
            call(names.append)
        layers = dict.fromkeys(filter(None, names))
        return [
            {name: Timing(1.0) for name in layers},
            {name: Timing(0.5 + (n + first_is_dense) % 2) for n, name in enumerate(layers)},
        ]

    conversion = "spamm_torch.networks.engines"
    monkeypatch.setattr(f"{conversion}.times_of_parts", times_of_parts)
    of_models = [Timing(time) for time in (4.0, 3.0, 1.0, 2.0)]
    monkeypatch.setattr(f"{conversion}.times_of", lambda calls, *_, **__: of_models[: len(calls)])
    dtype, most = (torch.half, 1e-2) if device.type == "cuda" else (torch.float32, 1e-5)
    torch.manual_seed(0)
    model = kind().to(device, dtype).eval().to(memory_format=torch.channels_last)
    original = copy.deepcopy(model).double()
    channels = 1 if kind is unet else 32
    empty = torch.full((2, channels, 64, 64), 0.2).to(device, dtype)
    x = empty.clone(memory_format=torch.channels_last)
    x[:, :, 9:20, 13:33] += torch.randn(2, channels, 11, 20).to(x)
    report = convert_(model, example_input=None if first is None else x, reference=empty[:1])
    if first is not None:
        assert {row.action for row in report} == {"dense", "spamm"}
    found, expected = model(x).double(), original(x.double())
    assert (found - expected).norm() < most * expected.norm()
