"""calibrate with a reference picture: thresholds for small deviations, on top of zeros."""

import contextlib
import copy
import json

import pytest
import torch
from support import linear_time, made_up, raises_line
from tiny import from_file, unchanged
from torch import nn

from models.unet import UNet
from spamm_torch import calibrate, convert_, record_stats
from spamm_torch._output import SILENT
from spamm_torch.calibration.form import Form
from spamm_torch.calibration.statistics import RATIOS, measure_layers
from spamm_torch.networks.config import lossless
from spamm_torch.networks.example import Example

SIZE = 32
BLOCK = (1, 8, 8)
ZEROS = lossless(torch.float32)


def empty(size=SIZE, channels=1):
    return torch.full((1, channels, size, size), 0.5)


def spots(count=2, seed=0):
    """Pictures that differ from the empty one in a few pixels somewhere."""
    generator = torch.Generator().manual_seed(seed)
    pictures = empty().repeat(count, 1, 1, 1)
    corners = torch.randint(0, SIZE - 5, (count, 2), generator=generator)
    for picture, (top, left) in zip(pictures, corners.tolist(), strict=True):
        picture[0, top : top + 5, left : left + 5] += torch.rand(5, 5, generator=generator)
    return pictures


def network(width=16):
    torch.manual_seed(0)
    model = UNet(1, 4, width=width, depth=1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval()


class Distance:
    """An ``evaluate``: how far outputs are from those of the first evaluation, in percent."""

    def __init__(self):
        self.known, self.calls = {}, 0

    def __call__(self, model, half):
        self.calls += 1
        lost = kept = 0.0
        for pictures, _ in half:
            found = model(pictures)
            exact = self.known.setdefault(float(pictures.double().sum()), found)
            lost, kept = lost + (found - exact).norm() ** 2, kept + exact.norm() ** 2
        return 100 * (1 - (lost / kept).sqrt().item())


def batches():
    return [(spots(seed=seed), None) for seed in range(4)]


def run(model=None, max_drop=2.0, loader=None, evaluate=None, **options):
    model = network() if model is None else model
    loader = batches() if loader is None else loader
    options = {"progress": False, "reference": empty(), **options}
    return calibrate(model, loader, evaluate or Distance(), max_drop, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A report, with its model, batches, evaluate and journal."""
    patch = pytest.MonkeyPatch()
    patch.setattr("spamm_torch.calibration.times.measure", made_up(linear_time))
    model, loader, evaluate = network(), batches(), Distance()
    journal = tmp_path_factory.mktemp("reference") / "journal.json"
    yield run(model, 2.0, loader, evaluate, journal=journal), model, loader, evaluate, journal
    patch.undo()


# ---- What is chosen -----------------------------------------------------------------------------


@torch.no_grad()
def assert_served_as_reported(report, model, loader, evaluate, folder):
    """The model with a report's settings, rows of it that skip more than zeros, its statistics."""
    skipping = [row for row in report if row.setting is not None and row.setting != ZEROS]
    assert skipping
    served = copy.deepcopy(model)
    rows = from_file(report, folder, served, reference=empty())
    assert all(rows[row.name].setting == row.setting for row in skipping)
    drop = evaluate(model, loader[1::2]) - evaluate(served, loader[1::2])
    assert drop == pytest.approx(report.outcome.drop)
    with record_stats(served) as stats:
        for pictures, _ in loader[::2]:
            served(pictures)
    for row in skipping:
        assert stats[row.name].valid_ratio == pytest.approx(row.valid_ratio)
    return served, skipping, stats


@torch.no_grad()
def test_small_deviations_are_skipped_within_the_drop(made, tmp_path):
    report, model, loader, evaluate, _ = made
    outcome = report.outcome
    assert outcome.reference
    assert 0 < outcome.drop <= 2
    assert outcome.evaluations == evaluate.calls <= 12
    assert "deviations from a reference picture" in str(report)
    assert "us converted without a loss" in str(report)
    served, skipping, stats = assert_served_as_reported(report, model, loader, evaluate, tmp_path)
    assert {row.setting.pixel_block for row in skipping} == {BLOCK}
    for row in skipping:
        low, high = stats[row.name].band
        assert low < row.valid_ratio < high
    assert stats.drifted == []
    assert type(served.bottom[0]) is nn.Conv2d
    copied = copy.deepcopy(served)
    with record_stats(copied) as again:
        copied(torch.rand(2, 1, SIZE, SIZE))  # nothing of it is like the reference
    assert again.drifted


@torch.no_grad()
def test_where_layers_leave_norms_and_read_parts(timed, tmp_path, computing_norms):
    """As on Hopper: there a threshold is searched for ops that take none but a number."""
    model, loader, evaluate = network(32), batches(), Distance()
    seen, op = [], torch.ops.spamm_torch.conv2d_deviation.default

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            seen.append(func is op and len(args[0] if args else kwargs["parts"]) > 1)
            return func(*args, **kwargs)

    with Seen():
        report = run(model, 5.0, loader, evaluate)
    assert any(seen)
    assert_served_as_reported(report, model, loader, evaluate, tmp_path)


@torch.no_grad()
def test_ratios_are_shares_of_what_is_not_zero():
    model, pictures = network(), spots(4)
    form = Form(model, Example(pictures), empty())
    found = measure_layers(form, [Example(pictures)], SILENT)
    convert_(model, reference=empty())
    with record_stats(model) as stats:
        model(pictures)
    for name, layer in found.items():
        if name in stats:  # without an example few channels stay dense
            assert layer.exact_ratio == pytest.approx(stats[name].valid_ratio)
        ratios = [candidate.valid_ratio for candidate in layer.candidates]
        assert ratios
        assert ratios == sorted(ratios, reverse=True)
        for ratio in ratios:
            share = min(RATIOS, key=lambda share: abs(share * layer.exact_ratio - ratio))
            assert ratio == pytest.approx(share * layer.exact_ratio, abs=0.01)
        assert all(0 < candidate.error < 1 for candidate in layer.candidates)


def test_zeros_alone_are_skipped_where_nothing_may_be_lost(timed, tmp_path):
    timed(lambda trial: 110.0 if trial.what == "dense" else linear_time(trial))
    report = run(max_drop=0.0)
    assert report.outcome.note.startswith("nothing but zeros is skipped")
    assert report.outcome.drop == 0
    assert {row.setting for row in report} == {ZEROS}
    assert all(row.reason.startswith("zeros alone; ") for row in report)
    assert report.outcome.valid_ratio < 0.7
    converted = from_file(report, tmp_path, network(), reference=empty())
    assert {row.setting for row in converted} == {ZEROS}


@pytest.mark.parametrize(
    ("times", "max_drop"),
    [({}, 2.0), ({"as it was": 10.0, "dense": 100.0, "spamm": 50.0}, 0.0)],
    ids=["nothing is saved", "zeros pay in layers alone"],
)
def test_nothing_is_installed_where_the_model_as_it_was_is_as_fast(
    timed, tmp_path, times, max_drop
):
    timed(lambda trial: times.get(trial.what, 60.0))
    report = run(max_drop=max_drop)
    assert report.outcome.note.startswith("nothing is skipped: ")
    assert report.outcome.note.endswith("nothing is installed: the model as it was is as fast")
    assert report.outcome.valid_ratio == 1
    assert {(row.setting, row.valid_ratio) for row in report} == {(None, 1.0)}
    assert {layer["engine"] for layer in report.settings["layers"].values()} == {"left"}
    assert "zeros" not in str(report)
    model = network()
    found = from_file(report, tmp_path, model, reference=empty())
    assert {row.action for row in found} == {"left"}
    assert type(model) is UNet


@pytest.mark.cuda
@torch.no_grad()
def test_each_layer_that_skips_on_a_gpu_is_recorded(timed, tmp_path):
    model = network().to("cuda", torch.float16)
    loader = [(pictures.to("cuda", torch.float16), None) for pictures, _ in batches()]
    report = run(model, 5.0, loader)
    from_file(report, tmp_path, model, reference=empty())
    with record_stats(model) as stats:
        model(loader[0][0])
    skipping = {row.name for row in report if row.setting is not None}
    assert skipping
    assert skipping <= set(stats)


def test_it_goes_on_where_it_was_stopped(made, monkeypatch, timed):
    report, model, loader, evaluate, journal = made
    monkeypatch.setattr(
        "spamm_torch.calibration.statistics._Pool.gather", lambda *_: pytest.fail("again")
    )
    timed(lambda _: pytest.fail("again"))
    again = run(model, 2.0, loader, evaluate, journal=journal)
    assert str(again) == str(report)
    assert again.settings["layers"] == report.settings["layers"]


@pytest.mark.parametrize("reference", [None, empty() + 0.1])
def test_journals_of_another_reference_are_refused(made, reference):
    _, model, loader, evaluate, journal = made
    with pytest.raises(ValueError, match="journal must be of the same reference; got"):
        run(model, 2.0, loader, evaluate, journal=journal, reference=reference)


# ---- Settings files -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "got"),
    [
        (None, "no reference"),
        (empty(64), r"a reference of shape \(1, 1, 64, 64\)"),
        (empty(channels=3), r"a reference of shape \(1, 3, 32, 32\)"),
    ],
)
def test_settings_come_with_a_reference_like_their_own(made, tmp_path, reference, got):
    model = network()
    line = rf"come with a reference of shape \(1, 1, 32, 32\), as they were made; got {got}$"
    with raises_line(ValueError, line):
        from_file(made[0], tmp_path, model, reference=reference)
    assert type(model) is UNet


def test_settings_without_a_reference_come_without_one(tmp_path):
    path = tmp_path / "net.json"
    convert_(network()).save(path)
    with pytest.raises(ValueError, match=r"come with no reference, .*; got a reference of shape"):
        convert_(network(), path, reference=empty())
    damaged = json.loads(path.read_text()) | {"reference": "a picture"}
    path.write_text(json.dumps(damaged))
    with pytest.raises(ValueError, match="a shape or null as reference; got 'a picture'"):
        convert_(network(), path)


# ---- An evaluate that the form does not serve ---------------------------------------------------


class Inside(Distance):
    """In a context that a function of the model gives."""

    def __init__(self, context):
        super().__init__()
        self.context = context

    def __call__(self, model, half):
        with self.context(model):
            return super().__call__(model, half)


class WithPaddedPictures(Distance):
    def __call__(self, model, half):
        return super().__call__(model, [(nn.functional.pad(x, (0, 8, 0, 8)), y) for x, y in half])


def with_a_hook(model):
    return model.bottom[0].register_forward_hook(lambda *_: None)


@contextlib.contextmanager
def in_training_mode(model):
    model.bottom.train(type(model) is not UNet)  # while it is converted
    try:
        yield
    finally:
        model.eval()


def under_autocast(model):
    return torch.autocast("cpu", torch.bfloat16)


SIZES = r"\(2, 1, 32, 32\) and float32"
UNSERVED = {
    "autocast": (under_autocast, None, f"{SIZES} under autocast$"),
    "padding": (WithPaddedPictures, None, r"\(2, 1, 40, 40\) and float32$"),
    "a hook": (with_a_hook, None, f"{SIZES} with a hook on bottom.0$"),
    "training mode": (in_training_mode, None, f"{SIZES} in training mode$"),
    "a second half of another size": (Distance, 64, r"\(2, 1, 64, 64\) and float32$"),
}


@pytest.mark.parametrize("case", UNSERVED)
def test_calls_that_the_form_does_not_serve_are_refused(timed, case):
    """They would take the dense forward, and any setting would seem to cost nothing."""
    kind, size, got = UNSERVED[case]
    loader = batches()[:2]
    if size is not None:
        odd = [(nn.functional.pad(x, (0, size - SIZE) * 2), y) for x, y in loader]
        loader = [odd[number] if number % 2 else batch for number, batch in enumerate(loader)]
    model = network()
    line = "^with a reference the model must be called, in evaluate too, with pictures .*; got a"
    with raises_line(ValueError, f"{line} tensor of shape {got}"), unchanged(model):
        run(model, loader=loader, evaluate=kind() if isinstance(kind, type) else Inside(kind))


def test_an_evaluate_that_fails_late_leaves_the_model_as_it_was(timed):
    model, distance = network(), Distance()

    def evaluate(model, half):
        if distance.calls == 3:
            assert type(model) is not UNet  # while settings are installed
            raise RuntimeError("no memory")
        return distance(model, half)

    with pytest.raises(RuntimeError, match="no memory"), unchanged(model):
        run(model, evaluate=evaluate)
    assert distance.calls == 3
