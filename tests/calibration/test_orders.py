"""calibrate with batches in order of likeness, and with channels in the order of their norms."""

import copy
import json

import pytest
import torch
from tiny import Agreement, linear_time, tiny_network
from torch import nn

from spamm_torch import calibrate, convert_

SIZE, EDGE = 8, 3


def squares(count=192, seed=0, is_shifted=True):
    """A bright square in each picture, at the same place or anywhere."""
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.zeros(count, 3, SIZE, SIZE)
    corners = torch.randint(0, SIZE - EDGE + 1, (count, 2), generator=generator)
    corners = corners if is_shifted else torch.full_like(corners, 2)
    for picture, (top, left) in zip(pictures, corners.tolist(), strict=True):
        bright = 1 + torch.rand(EDGE, EDGE, generator=generator)
        picture[:, top : top + EDGE, left : left + EDGE] = bright
    return pictures


def run(is_shifted=True, model=None, evaluate=None, count=192, **options):
    model = tiny_network() if model is None else model
    loader = [(squares(count, seed, is_shifted), None) for seed in range(2)]
    evaluate = Agreement(model, loader) if evaluate is None else evaluate
    report = calibrate(model, loader, evaluate, 15.0, progress=False, **options)
    return report, model, loader, evaluate


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What is chosen for shifted pictures, and for the same model without an order."""
    patch = pytest.MonkeyPatch()
    patch.setattr(
        "spamm_torch.calibration.times.measure",
        lambda calls, _: {trial: linear_time(trial) for trial in calls},
    )
    journal = tmp_path_factory.mktemp("orders") / "journal.json"
    yield run(journal=journal), run(order_batch=False), journal
    patch.undo()


def test_shifted_pictures_are_put_in_order(made):
    (report, _, _, evaluate), (plain, *_), _ = made
    assert report.outcome.order_batch
    assert "batches in order of likeness" in str(report)
    assert report.outcome.evaluations == evaluate.calls <= 12
    assert not plain.outcome.order_batch
    assert "order of likeness" not in str(plain)
    assert report.outcome.after_us < plain.outcome.after_us
    assert report.outcome.drop <= 15


@torch.no_grad()
def test_a_settings_file_says_the_order(made, tmp_path):
    (report, model, loader, evaluate), _, _ = made
    path = tmp_path / "net.json"
    report.save(path)
    dense = evaluate(model, loader[1::2])[0]
    served = copy.deepcopy(model)
    assert convert_(served, path).order_batch
    assert dense - evaluate(served, loader[1::2])[0] == report.outcome.drop
    served = copy.deepcopy(model)
    assert not convert_(served, path, order_batch=False).order_batch
    pictures = loader[1][0]
    assert not torch.equal(served(pictures), convert_and_run(model, path, pictures))


def convert_and_run(model, path, pictures):
    served = copy.deepcopy(model)
    convert_(served, path)
    return served(pictures)


def test_an_order_that_was_found_is_found_again(made, timed):
    (report, model, _, evaluate), _, journal = made
    timed(lambda _: 0.0)  # nothing is measured again
    again, *_ = run(model=model, evaluate=evaluate_as(evaluate), journal=journal)
    assert str(again) == str(report)
    assert again.settings["layers"] == report.settings["layers"]


def evaluate_as(agreement):
    """An evaluate that knows pictures by their values: those of another loader too."""
    known = {}

    def evaluate(model, half):
        found = torch.cat([agreement.answer(model, pictures) for pictures, _ in half])
        key = tuple(float(pictures.sum()) for pictures, _ in half)
        expected = known.setdefault(key, found)  # the first is the model as it is
        return 100 * (found == expected).double().mean().item(), found

    return evaluate


def test_an_order_that_costs_more_than_it_saves_is_not_taken(timed):
    timed(lambda trial: linear_time(trial) + 60 * (trial.what == "in order"))
    report, *_ = run()
    assert not report.outcome.order_batch
    assert report.outcome.evaluations <= 12


def test_centred_pictures_are_not_tried_in_order(timed):
    seen = []
    timed(lambda trial: seen.append(trial.what) or linear_time(trial))
    report, *_ = run(is_shifted=False)
    assert not report.outcome.order_batch
    assert "in order" not in seen
    assert report.outcome.valid_ratio < 1


def test_batches_of_one_block_are_not_tried_in_order(timed):
    report, *_ = run(count=64)
    assert not report.outcome.order_batch


class Mixed(nn.Module):
    """A network whose images see each other."""

    def __init__(self):
        super().__init__()
        self.network = tiny_network()

    def forward(self, x):
        return self.network(x - x.flip(0))


class Summed(Mixed):
    def forward(self, x):
        return self.network(x).sum(0)


class Untraceable(Mixed):
    def forward(self, x):
        return self.network(x) if x.sum() > 0 else self.network(-x)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Mixed, "a model that treats each image by itself; got one where, in another order, its"),
        (Summed, "a model that treats each image by itself; got one where a result must have the"),
        (Untraceable, "a model that is converted as a whole; got Untraceable, which is not"),
    ],
)
def test_what_cannot_be_put_in_order(timed, kind, line):
    model = kind().eval()
    before = [(type(module), list(module.__dict__)) for module in model.modules()]
    with pytest.raises(ValueError, match=f"^order_batch=True expects {line}") as error:
        run(model=model, evaluate=lambda *_: 50.0, count=66, order_batch=True)
    assert "\n" not in str(error.value)
    assert before == [(type(module), list(module.__dict__)) for module in model.modules()]
    report, *_ = run(model=model, evaluate=lambda *_: 50.0, count=66)  # as they come
    assert not report.outcome.order_batch
    assert report.outcome.valid_ratio < 1


@torch.no_grad()
def test_channels_in_order_are_saved(timed, tmp_path):
    report, model, loader, evaluate = run(False, order_batch=False, reorder=True)
    assert report.outcome.reorder
    assert "channels in the order of their norms" in str(report)
    path = tmp_path / "net.json"
    report.save(path)
    dense = evaluate(model, loader[1::2])[0]
    converted = convert_(model, path)
    rows = {row.name: row.order for row in converted}
    assert sorted(rows["conv_b"]) == list(range(32))
    assert rows["conv_b"] != tuple(range(32))
    assert dense - evaluate(model, loader[1::2])[0] == report.outcome.drop
    with pytest.raises(ValueError, match=r"^settings in an order of channels must come with fuse"):
        convert_(model, path, fuse=False)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"order": [0] * 32}, "each of 0 to 31 once; got 32 entries for 'conv_b'"),
        ({"order": 5}, "each of 0 to 31 once; got 5 for 'conv_b'"),
        ({"order": [*range(31), 31.0]}, "each of 0 to 31 once; got 32 entries for 'conv_b'"),
        ({"order_batch": 1}, "true or false as order_batch; got 1"),
    ],
)
def test_damaged_orders_are_refused(made, tmp_path, change, line):
    settings = json.loads(json.dumps(made[1][0].settings))
    of = settings if "order_batch" in change else settings["layers"]["conv_b"]
    of.update(change)
    path = tmp_path / "net.json"
    path.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=line) as error:
        convert_(tiny_network(), path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "value"), [("order_batch", 3), ("reorder", None)])
def test_orders_are_asked_for_by_true_or_false(name, value):
    with pytest.raises(TypeError, match=f"{name} must be True or False; got {value}"):
        run(**{name: value})
