"""MNIST for VGG13: read from IDX files, split, placed on pictures of 32 x 32 with three channels.

Where the images come from, in this order: a root directory given by the caller, the one in the
environment variable SPAMM_MNIST_ROOT (both laid out as torchvision.datasets.MNIST does, files in
ROOT/MNIST/raw, packed or not), else the 10,000 images that this repository holds in
data/mnist-t10k. The full data set is 70,000 images, which torchvision downloads.
"""

import gzip
import hashlib
import math
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import pad

from models.files import UserError

ROOT_VARIABLE = "SPAMM_MNIST_ROOT"
_REPOSITORY = Path(__file__).resolve().parent.parent
EMBEDDED = _REPOSITORY / "data" / "mnist-t10k"

IMAGE_SIZE = 28
PICTURE_SIZE = 32
MAX_SHIFT = 6
_TRAINING_SHARE = 0.8
_MOST_BYTES = 2**30  # of one file, unpacked: 20 times the largest of MNIST


@dataclass(frozen=True)
class Digits:
    """Images (n, 28, 28) and labels (n,), both uint8, and a word on where they are from."""

    images: torch.Tensor
    labels: torch.Tensor
    description: str

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, chosen):
        return Digits(self.images[chosen], self.labels[chosen], self.description)

    def to(self, device):
        return Digits(self.images.to(device), self.labels.to(device), self.description)

    def split(self, seed=0):
        """In an order drawn from ``seed``: the first 80% to train, the rest to validate."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        training = int(_TRAINING_SHARE * len(self))
        return self[order[:training]], self[order[training:]]

    def fingerprint(self):
        """A digest of images and labels, to tell data sets apart."""
        digest = hashlib.sha256(self.images.cpu().numpy())
        digest.update(self.labels.cpu().numpy())
        return digest.hexdigest()


def load_digits(root=None, full=False):
    """Loads MNIST.

    Args:
        root: directory that holds MNIST/raw; None takes SPAMM_MNIST_ROOT, else the embedded files.
        full: all 70,000 images of a root directory instead of the 10,000 of t10k.

    Raises:
        UserError: no such directory, missing files, or damage.
    """
    root = root or os.environ.get(ROOT_VARIABLE) or None
    if root is not None and not Path(root).is_dir():
        raise UserError(f"expected a directory that holds MNIST/raw; got {root}, which is none")
    raw = EMBEDDED if root is None else Path(root) / "MNIST" / "raw"
    pairs = [_read_pair(raw, part) for part in (("train", "t10k") if full else ("t10k",))]
    images, labels = map(torch.cat, zip(*pairs, strict=True))
    name, origin = "MNIST in full" if full else "MNIST t10k", root or "data/mnist-t10k, embedded"
    return Digits(images, labels, f"{name} ({len(labels):,} images, {origin})")


def to_pictures(images, shifts=None):
    """Places images on black pictures: (n, 28, 28) uint8 -> (n, 3, 32, 32) float32 in [0, 1].

    ``shifts``: (n, 2) rows and columns by which each image leaves the centre, at most MAX_SHIFT
    either way; None: none. Pictures are channels last, their three channels equal.
    """
    margin = (PICTURE_SIZE - IMAGE_SIZE) // 2
    if shifts is None:
        grey = pad(images, (margin,) * 4)
    else:
        wide = pad(images, (margin + MAX_SHIFT,) * 4)
        window = torch.arange(PICTURE_SIZE, device=images.device)
        first = MAX_SHIFT - shifts.to(images.device)
        rows, columns = (first[:, axis, None] + window for axis in (0, 1))
        image = torch.arange(len(images), device=images.device)[:, None, None]
        grey = wide[image, rows[:, :, None], columns[:, None, :]]
    pictures = (grey.float() / 255).unsqueeze(1).expand(-1, 3, -1, -1)
    return pictures.contiguous(memory_format=torch.channels_last)


def draw_shifts(count, generator, share=1.0):
    """Random shifts for :func:`to_pictures`, (count, 2), for about ``share`` of the images."""
    shifts = torch.randint(-MAX_SHIFT, MAX_SHIFT + 1, (count, 2), generator=generator)
    return shifts * (torch.rand(count, 1, generator=generator) < share)


def read_idx(path):
    """The uint8 tensor in an IDX file, packed with gzip if its name ends in .gz.

    Format: two zero bytes, the type (8 for uint8), the number of dimensions, their sizes as
    big-endian 32-bit integers, the elements in row-major order.

    Raises:
        UserError: unreadable, truncated, or not such a file.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            return _idx_in(file, path)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"expected an intact gzip file; got {path}: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _idx_in(file, path):
    """The tensor in an open file, of which no more is read than its header says, at most 1 GiB."""
    magic = file.read(4)
    if len(magic) < 4 or magic[:3] != b"\0\0\x08":
        raise UserError(
            f"expected an IDX file of bytes (magic 000008xx); got {magic.hex()} in {path}"
        )
    sizes = file.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        got = f"{4 + len(sizes)} bytes in {path}"
        raise UserError(f"expected a header of {4 + 4 * magic[3]} bytes; got {got}")
    shape = struct.unpack(f">{magic[3]}I", sizes)
    count = math.prod(shape)
    if count > _MOST_BYTES:
        raise UserError(f"expected at most {_MOST_BYTES} bytes; got shape {shape} in {path}")
    content = file.read(count + 1)
    if len(content) != count:
        got = f"{len(content)}" if len(content) < count else "more"
        raise UserError(
            f"expected {count} bytes after the header, for shape {shape}; got {got} in {path}"
        )
    return torch.frombuffer(bytearray(content + b"\0"), dtype=torch.uint8)[:count].view(shape)


_KINDS = {"images": "images-idx3-ubyte", "labels": "labels-idx1-ubyte"}


def _find(folder, part, kind):
    """The file of a part ("train", "t10k") and kind, unpacked or packed, or None."""
    name = f"{part}-{_KINDS[kind]}"
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _read_pair(folder, part):
    """Images and labels of a part, checked against each other."""
    paths = {kind: _find(folder, part, kind) for kind in _KINDS}
    for kind, path in paths.items():
        if path is None:
            raise UserError(
                f"expected {part}-{_KINDS[kind]} (or .gz) in {folder}; found none "
                "(torchvision.datasets.MNIST(root, download=True) makes ROOT/MNIST/raw)"
            )
    images, labels = (read_idx(paths[kind]) for kind in _KINDS)
    if images.shape[1:] != (IMAGE_SIZE, IMAGE_SIZE):
        raise UserError(
            f"expected images of shape (n, {IMAGE_SIZE}, {IMAGE_SIZE}); "
            f"got {tuple(images.shape)} in {paths['images']}"
        )
    if labels.shape != images.shape[:1]:
        raise UserError(
            f"expected one label for each of the {len(images)} images; "
            f"got shape {tuple(labels.shape)} in {paths['labels']}"
        )
    if len(labels) < 5:
        raise UserError(f"expected at least 5 images to split; got {len(labels)} in {folder}")
    if labels.max() > 9:
        raise UserError(f"expected labels 0 to 9; got {labels.max().item()} in {paths['labels']}")
    return images, labels
