"""Checkpoints of a training."""

import zipfile

import torch

from models.errors import UserError, first_line
from models.files import write_atomically

_FORMAT = "spamm_torch training 1"
_KEYS = {"format", "config", "data", "step", "model", "optimizer"}


def save_checkpoint(path, content):
    """Writes a dictionary with the keys above but "format": tensors and plain values."""
    write_atomically(path, lambda file: torch.save({"format": _FORMAT, **content}, file))


def load_checkpoint(path):
    """What :func:`save_checkpoint` wrote, on the CPU; None if there is no such file.

    Raises:
        UserError: unreadable, damaged, or a file of something else.
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
        raise UserError(f"expected a checkpoint of train_vgg13.py; got something else in {path}")
    return content
