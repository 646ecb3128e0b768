"""Training VGG13. Everything random is drawn from the seed and the number of the step or epoch."""

import math
import zipfile
from dataclasses import asdict, dataclass

import torch
from torch.nn.functional import cross_entropy

from models.data import draw_shifts, to_pictures
from models.files import UserError, first_line, write_atomically
from models.vgg13 import VGG13

MODELS = ("vgg13", "vgg13_bn")
_WARM_UP = 0.3  # share of the steps until the learning rate peaks
_PEAK = 1e-3  # the highest learning rate
_SHIFTED_SHARE = 0.5  # of the images, so that both cases of the study are learnt


@dataclass(frozen=True)
class TrainConfig:
    """All that decides the result of a training, beside the images themselves."""

    model: str = "vgg13"
    epochs: int = 3
    full: bool = False
    seed: int = 0
    batch: int = 100
    width: int = 64

    def build(self):
        """A fresh model, its parameters drawn from the seed, without touching the global one."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = VGG13(batch_norm=self.model == "vgg13_bn", width=self.width)
        return model.to(memory_format=torch.channels_last)


def train(config, digits, path, device, report):
    """The trained model on the device, in eval mode: from the checkpoint at ``path`` where there is
    one, which is written else.

    Args:
        config: a TrainConfig. digits: are split here.
        report: called with a line of text after each epoch.

    UserError: a checkpoint that is damaged, of other images or options, or cannot be written.
    """
    model, fingerprint = config.build().to(device), digits.fingerprint()
    if (checkpoint := load_checkpoint(path)) is not None:
        expected = asdict(config)
        if checkpoint["config"] != expected:
            options = ", ".join(f"{name}={value}" for name, value in expected.items())
            raise UserError(
                f"expected a checkpoint of {options}; got one of other options in {path}: name "
                "another file with --checkpoint"
            )
        if checkpoint["data"] != fingerprint:
            raise UserError(
                f"expected a checkpoint trained on the images given; got other images in {path}: "
                "name another file with --checkpoint"
            )
        model.load_state_dict(checkpoint["model"])
        report(f"already trained: {path}")
        return model.eval()
    training, validation = (part.to(device) for part in digits.split(config.seed))
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    epoch_steps = max(1, len(training) // config.batch)
    for epoch in range(config.epochs):
        order = torch.randperm(len(training), generator=_generator(config.seed, epoch)).to(device)
        for step in range(epoch_steps):
            part = training[order[step * config.batch : (step + 1) * config.batch]]
            random = _generator(config.seed, epoch, step)
            pictures = to_pictures(part.images, draw_shifts(len(part), random, _SHIFTED_SHARE))
            progress = (epoch * epoch_steps + step) / (config.epochs * epoch_steps)
            for group in optimizer.param_groups:
                group["lr"] = one_cycle(_PEAK, progress)
            with torch.autocast(device.type, torch.bfloat16, _has_fast_bfloat16(pictures)):
                loss = cross_entropy(model.train()(pictures), part.labels.long())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        percent = accuracy(model.eval(), validation_pictures(validation, config.batch))
        said = f"loss {loss.item():.3f}, validation accuracy {percent:.2f}%"
        report(f"epoch {epoch + 1} of {config.epochs}: {said}")
    content = {"config": asdict(config), "data": fingerprint, "model": model.state_dict()}
    save_checkpoint(path, content)
    return model


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


_FORMAT = "spamm_torch training 2"
_KEYS = {"format", "config", "data", "model"}


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
