"""The U-Net that labels the pixels of canvases: training and quality."""

import os
import time
from dataclasses import asdict, dataclass

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from examples.scattered_digits.canvases import CLASSES, draw_scene
from models.checkpoint import load_checkpoint, save_checkpoint
from models.errors import UserError
from models.training import interrupt_noted, interrupted_at
from models.unet import UNet

_LEARNING_RATE = 3e-3
_WEIGHT_OF_BACKGROUND = 0.2
_DIGITS_A_SIDE = 40  # pixels of a canvas's side for each digit in training, at most
_SAVE_EVERY_S = 60
_MOST_PAINTERS = 8  # processes that draw canvases ahead of a GPU, each one batch


@dataclass(frozen=True)
class Config:
    """What decides the result of a training, beside the digits."""

    width: int
    depth: int
    size: int  # sides of the canvases to train with
    steps: int
    batch: int
    seed: int = 0

    def build(self):
        """The network, its parameters drawn from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = UNet(1, CLASSES, self.width, self.depth)
        return model.to(memory_format=torch.channels_last)


def train(config, digits, path, device, report):
    """The trained network in eval mode, from the checkpoint at ``path`` where it was trained.

    Args:
        config: a Config. digits: to draw canvases from. path: checkpoint, written once a minute.
        device: torch.device. report: called with (step, steps, message or None).

    Raises:
        UserError: a checkpoint of another configuration or other digits, or a damaged one.
        KeyboardInterrupt: after Ctrl-C; the checkpoint is written first, and it says so.
    """
    model = config.build().to(device)
    optimizer = torch.optim.Adam(model.parameters(), _LEARNING_RATE)
    content = {"config": asdict(config), "data": digits.fingerprint()}
    step = _resume(path, content, model, optimizer)
    saved = time.monotonic()
    with interrupt_noted() as interrupted:
        for pictures, labels in _batches(config, digits, step, _painters(device)):
            for group in optimizer.param_groups:
                group["lr"] = _learning_rate(step / config.steps)
            loss = _advance(model, optimizer, pictures, labels, device)
            step += 1
            is_last = step == config.steps
            report(step, config.steps, f"loss {loss:.3f}" if is_last else None)
            if is_last or interrupted() or time.monotonic() - saved > _SAVE_EVERY_S:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save_checkpoint(path, {**content, "step": step, **state})
                saved = time.monotonic()
            if interrupted():
                raise interrupted_at(step, config.steps, path)
    return model.eval()


def _resume(path, content, model, optimizer):
    """Loads a checkpoint of this training; the steps that were made."""
    checkpoint = load_checkpoint(path)
    if checkpoint is None:
        return 0
    found = {name: checkpoint[name] for name in content}
    if found != content:
        raise UserError(
            f"expected a checkpoint with {content['config']} of the same digits; got "
            f"{found['config']} in {path}: name another file with --checkpoint"
        )
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["step"]


def _learning_rate(done):
    """Up to the peak and down again; ``done`` is the share of the steps made."""
    return _LEARNING_RATE * min(done / 0.2 + 0.05, (1 - done) / 0.8 + 0.01)


class _Canvases(Dataset):
    """The pictures and labels of each step, from ``first`` on: the same in every process."""

    def __init__(self, config, digits, first):
        self._config, self._digits, self._first = config, digits, first

    def __len__(self):
        return self._config.steps - self._first

    def __getitem__(self, place):
        config = self._config
        most = max(1, (config.size // _DIGITS_A_SIDE) ** 2)
        seed = config.seed + 1_000_000 * (self._first + place + 1)
        scene = draw_scene(self._digits, config.batch, config.size, (1, most), seed)
        return scene.pictures, scene.labels.to(torch.uint8)  # less to hand over


def _painters(device):
    """How many other processes draw the canvases: for a GPU they do so ahead."""
    if device.type != "cuda":
        return 0
    return min(_MOST_PAINTERS, max(1, len(os.sched_getaffinity(0)) - 2))


def _batches(config, digits, first, painters):
    """The batches of the steps from ``first`` on, the same for any number of painters.

    Those that are ready lie in shared memory, of which there may be little.
    """
    canvases = _Canvases(config, digits, first)
    painters = min(painters, len(canvases))
    return DataLoader(
        canvases,
        batch_size=None,
        num_workers=painters,
        prefetch_factor=1 if painters else None,
        pin_memory=painters > 0 and torch.cuda.is_available(),
    )


def _advance(model, optimizer, pictures, labels, device):
    pictures = pictures.to(device, memory_format=torch.channels_last, non_blocking=True)
    labels = labels.to(device, non_blocking=True).long()
    weights = torch.ones(CLASSES, device=device)
    weights[0] = _WEIGHT_OF_BACKGROUND
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        predicted = model(pictures)
    loss = cross_entropy(predicted.float(), labels, weights)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@dataclass(frozen=True)
class Quality:
    """Mean intersection over union of the classes, and the share of digits that were found."""

    mean_iou: float
    found: float


def quality(predicted, scene):
    """Judges labels (N, S, S). A digit is found if most of its pixels have its label."""
    predicted = predicted.cpu()
    ious = []
    for label in range(CLASSES):
        own, truth = predicted == label, scene.labels == label
        if (union := (own | truth).sum()) > 0:
            ious.append(((own & truth).sum() / union).item())
    found = total = 0
    for labels, truth, instances in zip(predicted, scene.labels, scene.instances, strict=True):
        for number in range(1, int(instances.max()) + 1):
            here = instances == number
            if here.any():  # else it lies under others
                total += 1
                found += int((labels[here] == truth[here]).float().mean() > 0.5)
    return Quality(sum(ious) / len(ious), found / max(total, 1))
