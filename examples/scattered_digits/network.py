"""The U-Net that labels the pixels of canvases: training and quality."""

import os
from dataclasses import asdict, dataclass

import torch
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, Dataset

from models.files import UserError
from models.training import load_checkpoint, make_steps, save_checkpoint
from models.unet import UNet

CLASSES = 11  # the background, then digits 0 to 9
_INK = 0.4  # pixels at least as bright belong to a digit
_SCALES = (1.0, 2.0)
_OVERLAPPING = 0.1  # share of the digits that may lie on others
_TRIES = 50  # at a free place, before any place will do
_TEXTURE = 0.1  # brightness of a textured background, on average


@dataclass(frozen=True)
class Scene:
    """A batch of canvases.

    Attributes:
        pictures: (N, 1, S, S) float32 in [0, 1].
        labels: (N, S, S) int64: 0 for the background, 1 + digit elsewhere.
        instances: (N, S, S) int64: 0 for the background, else which digit of the canvas, from 1.
    """

    pictures: torch.Tensor
    labels: torch.Tensor
    instances: torch.Tensor


def draw_scene(digits, count, size, digits_each, seed, textured=False):
    """Draws ``count`` canvases of this size; the same arguments give the same ones.
    ``digits_each``: how many lie on each; a pair (least, most) is drawn from. ``textured``: noise
    in the place of a black background.
    """
    generator = torch.Generator().manual_seed(seed)
    scene = Scene(
        torch.zeros(count, 1, size, size),
        torch.zeros(count, size, size, dtype=torch.int64),
        torch.zeros(count, size, size, dtype=torch.int64),
    )
    for canvas in range(count):
        many = digits_each
        if not isinstance(many, int):
            many = int(torch.randint(many[0], many[1] + 1, (), generator=generator))
        for number in range(1, many + 1):
            _place(scene, canvas, number, digits, generator)
    if textured:
        texture = 2 * _TEXTURE * torch.rand(scene.pictures.shape, generator=generator)
        scene.pictures.copy_(torch.maximum(scene.pictures, texture))
    return scene


def _place(scene, canvas, number, digits, generator):
    """Puts one more digit on a canvas; where it meets another one, the brighter pixel stays."""
    size = scene.labels.shape[-1]
    chosen = int(torch.randint(len(digits), (), generator=generator))
    low, high = _SCALES
    scale = low + (high - low) * float(torch.rand((), generator=generator))
    image = _cropped(digits.images[chosen].float() / 255)
    image = interpolate(image[None, None], scale_factor=scale, mode="bilinear")[0, 0]
    image = image[:size, :size]
    height, width = image.shape
    may_overlap = float(torch.rand((), generator=generator)) < _OVERLAPPING
    for _ in range(_TRIES):
        row = int(torch.randint(size - height + 1, (), generator=generator))
        column = int(torch.randint(size - width + 1, (), generator=generator))
        here = (canvas, slice(row, row + height), slice(column, column + width))
        if may_overlap or not scene.instances[here].any():
            break
    picture = scene.pictures[:, 0][here]
    is_above = image > picture
    picture[is_above] = image[is_above]
    is_ink = is_above & (image >= _INK)
    scene.labels[here][is_ink] = 1 + int(digits.labels[chosen])
    scene.instances[here][is_ink] = number


def _cropped(image):
    """An image without the dark rows and columns around it."""
    rows, columns = (image.amax(axis).nonzero().flatten() for axis in (1, 0))
    return image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


_LEARNING_RATE = 3e-3
_WEIGHT_OF_BACKGROUND = 0.2
_DIGITS_A_SIDE = 40  # pixels of a canvas's side for each digit in training, at most
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
    """The trained network in eval mode, from the checkpoint at ``path`` where it was trained, which
    is written once a minute and after Ctrl-C. ``report`` gets (step, steps, message or None).
    UserError: a checkpoint of another configuration or other digits, or a damaged one.
    """
    run = _Run(config, digits, path, device)
    make_steps(run, lambda loss: f"loss {loss:.3f}" if run.step == run.steps else None, report)
    return run.model.eval()


class _Run:
    """A training at some step, and the way to and from its checkpoint."""

    def __init__(self, config, digits, path, device):
        self.path, self.steps, self._device = path, config.steps, device
        self.model = config.build().to(device)
        self._optimizer = torch.optim.Adam(self.model.parameters(), _LEARNING_RATE)
        self._content = {"config": asdict(config), "data": digits.fingerprint()}
        self.step = self._restore()
        self._loader = _batches(config, digits, self.step, _painters(device))
        self._batches = None

    def advance(self):
        """Makes one step; gives the loss before it."""
        for group in self._optimizer.param_groups:
            group["lr"] = _learning_rate(self.step / self.steps)
        if self._batches is None:  # its processes then start where an interruption is noted
            self._batches = iter(self._loader)
        pictures, labels = next(self._batches)
        pictures = pictures.to(self._device, memory_format=torch.channels_last, non_blocking=True)
        labels = labels.to(self._device, non_blocking=True).long()
        weights = torch.ones(CLASSES, device=self._device)
        weights[0] = _WEIGHT_OF_BACKGROUND
        on_gpu = self._device.type == "cuda"
        with torch.autocast(self._device.type, torch.bfloat16, enabled=on_gpu):
            predicted = self.model(pictures)
        loss = cross_entropy(predicted.float(), labels, weights)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.step += 1
        return loss.detach()

    def save(self):
        """Writes the checkpoint."""
        state = {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}
        save_checkpoint(self.path, {**self._content, "step": self.step, **state})

    def _restore(self):
        """Takes over the checkpoint, if there is one; gives the steps that were made."""
        checkpoint = load_checkpoint(self.path)
        if checkpoint is None:
            return 0
        found = {name: checkpoint[name] for name in self._content}
        if found != self._content:
            raise UserError(
                f"expected a checkpoint with {self._content['config']} of the same digits; got "
                f"{found['config']} in {self.path}: name another file with --checkpoint"
            )
        self.model.load_state_dict(checkpoint["model"])
        self._optimizer.load_state_dict(checkpoint["optimizer"])
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
    """The batches from step ``first`` on; those ready lie in shared memory, which may be little."""
    canvases = _Canvases(config, digits, first)
    painters = min(painters, len(canvases))
    return DataLoader(
        canvases,
        batch_size=None,
        num_workers=painters,
        prefetch_factor=1 if painters else None,
        pin_memory=painters > 0 and torch.cuda.is_available(),
    )


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
