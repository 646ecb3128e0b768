"""Training VGG13, in steps that can be killed at any time.

Everything random is drawn from the seed and the number of the step or epoch, so a checkpoint needs
no generator states: what remains of a training depends on parameters, optimizer state and step
alone, and a resumed training ends where an uninterrupted one does (on the CPU bit for bit).
"""

import math
import time
import zipfile
from dataclasses import asdict, dataclass

import torch
from torch.nn.functional import cross_entropy

from models.data import draw_shifts, to_pictures
from models.files import UserError, first_line, write_atomically
from models.vgg13 import VGG13

MODELS = ("vgg13", "vgg13_bn")
_WARM_UP = 0.3  # share of the steps until the learning rate peaks
_CHECKPOINT_EVERY_S = 60


@dataclass(frozen=True)
class TrainConfig:
    """All that decides the result of a training, beside the images themselves."""

    model: str = "vgg13"
    epochs: int = 3
    full: bool = False
    seed: int = 0
    batch: int = 100
    width: int = 64

    shifted_share = 0.5  # of the images, so that both cases of the study are learnt
    peak = 1e-3  # the highest learning rate

    def build(self):
        """A fresh model, its parameters drawn from the seed, without touching the global one."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = VGG13(batch_norm=self.model == "vgg13_bn", width=self.width)
        return model.to(memory_format=torch.channels_last)


def resolve_config(path, given):
    """The configuration to train or load: the options given, else the checkpoint's, else defaults;
    UserError: the checkpoint at ``path`` has other options.
    """
    checkpoint = load_checkpoint(path)
    if checkpoint is None:
        return TrainConfig(**given)
    stored = _stored_config(checkpoint["config"], path)
    for option, value in given.items():
        if getattr(stored, option) != value:
            raise UserError(
                f"expected a checkpoint with {option}={value}; got {option}="
                f"{getattr(stored, option)} in {path}: name another file with --checkpoint"
            )
    return stored


def _stored_config(values, path):
    """The TrainConfig in a checkpoint; another version of this file may have written it."""
    expected = {name: type(value) for name, value in asdict(TrainConfig()).items()}
    found = {name: type(value) for name, value in values.items()}
    if found != expected:
        differing = sorted({str(name) for name, _ in found.items() ^ expected.items()})
        raise UserError(
            f"expected a checkpoint with the options {', '.join(expected)}; got one that differs "
            f"in {', '.join(differing)}: {path}"
        )
    return TrainConfig(**values)


def train(config, digits, path, device, report):
    """Trains until config.epochs, from the checkpoint at ``path`` where there is one.

    Args:
        config: as from :func:`resolve_config`. digits: are split here.
        path: checkpoint, written after each epoch and once a minute.
        report: called with (step, number of steps, what happened or None) after each step.

    Returns the trained model on the device, in eval mode. UserError: a checkpoint that is damaged,
    of other images or options, or cannot be written.
    """
    training, validation = (part.to(device) for part in digits.split(config.seed))
    run = _Run(config, training, digits.fingerprint(), path, device)
    if run.step == run.steps:
        report(run.step, run.steps, f"already trained: {path}")
    elif run.step:
        report(run.step, run.steps, f"resumed from {path} at step {run.step} of {run.steps}")

    def message_of(loss):
        epoch, within = divmod(run.step, run.epoch_steps)
        message = f"epoch {epoch} of {config.epochs}" if within == 0 else f"step {run.step}"
        message += f": loss {loss.item():.3f}"
        if run.step < run.steps:
            return None if within else message
        percent = accuracy(run.model.eval(), validation_pictures(validation, config.batch))
        return f"{message}, validation accuracy {percent:.2f}%"

    saved = time.monotonic()
    while run.step < run.steps:
        message = message_of(run.advance())
        report(run.step, run.steps, message)
        if message or time.monotonic() - saved > _CHECKPOINT_EVERY_S:
            run.save()
            saved = time.monotonic()
    return run.model.eval()


class _Run:
    """A training at some step, and the way to and from its checkpoint."""

    def __init__(self, config, digits, fingerprint, path, device):
        self._config, self._digits, self._fingerprint = config, digits, fingerprint
        self.path, self.model = path, config.build().to(device)
        self._optimizer = torch.optim.Adam(self.model.parameters(), fused=True)
        self.epoch_steps = max(1, len(digits) // config.batch)
        self.steps = config.epochs * self.epoch_steps
        self.step = self._restore()

    def advance(self):
        """Makes one step; gives the loss before it."""
        pictures, labels = self._batch(*divmod(self.step, self.epoch_steps))
        for group in self._optimizer.param_groups:
            group["lr"] = one_cycle(self._config.peak, self.step / self.steps)
        with torch.autocast(pictures.device.type, torch.bfloat16, _has_fast_bfloat16(pictures)):
            loss = cross_entropy(self.model.train()(pictures), labels)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        self.step += 1
        return loss.detach()

    def save(self):
        """Writes the checkpoint; a finished training no longer needs its optimizer."""
        unfinished = self.step < self.steps
        save_checkpoint(
            self.path,
            {
                "config": asdict(self._config),
                "data": self._fingerprint,
                "step": self.step,
                "model": self.model.state_dict(),
                "optimizer": self._optimizer.state_dict() if unfinished else {},
            },
        )

    def _restore(self):
        """Takes over the checkpoint, if there is one; gives the step that it stands at."""
        checkpoint = load_checkpoint(self.path)
        if checkpoint is None:
            return 0
        if checkpoint["data"] != self._fingerprint:
            raise UserError(
                f"expected a checkpoint trained on the images given; got other images in "
                f"{self.path}: name another file with --checkpoint"
            )
        if checkpoint["config"] != asdict(self._config):
            raise UserError(
                f"expected a checkpoint made from the same network with the same options; got "
                f"another one in {self.path}: name another file"
            )
        self.model.load_state_dict(checkpoint["model"])
        if checkpoint["step"] < self.steps:
            self._optimizer.load_state_dict(checkpoint["optimizer"])
        return checkpoint["step"]

    def _batch(self, epoch, index):
        """Batch ``index`` of an epoch: the epoch's own order, the batch's own shifts."""
        seed, size = self._config.seed, self._config.batch
        order = torch.randperm(len(self._digits), generator=_generator(seed, epoch))
        part = self._digits[order[index * size : (index + 1) * size].to(self._digits.images.device)]
        shifts = draw_shifts(len(part), _generator(seed, epoch, index), self._config.shifted_share)
        return to_pictures(part.images, shifts), part.labels.long()


def validation_pictures(digits, batch, shifts=None):
    """Yields (pictures, labels) in batches, in order; ``shifts`` as in to_pictures."""
    for first in range(0, len(digits), batch):
        chosen = slice(first, first + batch)
        part = digits[chosen]
        moved = None if shifts is None else shifts[chosen]
        yield to_pictures(part.images, moved), part.labels.long()


@torch.inference_mode()
def accuracy(model, batches):
    """Percentage of right answers over (inputs, labels) batches, for a model in eval mode."""
    right = total = 0
    for inputs, labels in batches:
        right += (model(inputs).argmax(1) == labels).sum()
        total += len(labels)
    return 100 * int(right) / total


def _has_fast_bfloat16(tensor):
    """Tells whether its processor has matrix instructions for it: a third of float32's time."""
    return tensor.device.type == "cpu" and torch.cpu.get_capabilities().get("amx_bf16", False)


def _generator(*numbers):
    """A generator of its own for each tuple of numbers."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % 2**63
    return torch.Generator().manual_seed(seed)


def one_cycle(peak, progress):
    """A learning rate: a linear warm-up to the peak, then half a cosine down to zero."""
    if progress < _WARM_UP:
        return peak * (0.04 + 0.96 * progress / _WARM_UP)
    rest = (progress - _WARM_UP) / (1 - _WARM_UP)
    return peak * 0.5 * (1 + math.cos(math.pi * rest))


# ---- Checkpoints ---------------------------------------------------------------------------------


_FORMAT = "spamm_torch training 1"
_KEYS = {"format", "config", "data", "step", "model", "optimizer"}


def save_checkpoint(path, content):
    """Writes a dictionary with the keys above but "format": tensors and plain values."""
    write_atomically(path, lambda file: torch.save({"format": _FORMAT, **content}, file))


def load_checkpoint(path):
    """Reads what :func:`save_checkpoint` wrote, on the CPU; None if there is no such file.
    UserError: it cannot be read, is damaged, or of something else.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums
            if damaged := archive.testzip():
                raise ValueError(f"wrong checksum of {damaged}")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"expected a checkpoint; got {path}: {error.strerror}") from error
    except Exception as error:  # damaged bytes make the unpickler raise almost anything
        raise UserError(
            f"expected a checkpoint; got {path}, which is damaged: {first_line(error)}"
        ) from error
    if (
        not isinstance(content, dict)
        or content.keys() != _KEYS
        or content["format"] != _FORMAT
        or not isinstance(content["config"], dict)
    ):
        raise UserError(f"expected a checkpoint of VGG13; got something else in {path}")
    return content
