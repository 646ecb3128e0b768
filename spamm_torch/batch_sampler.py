"""LikenessBatchSampler: batches of images that are alike, for torch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ._arguments import check_bool, is_integer
from .likeness import check_images_a_block, likeness_order

_BLOCKS_A_WINDOW = 10


class LikenessBatchSampler(Sampler[list[int]]):
    """Batches of a data set whose images are alike, by ordering a window of it at a time.

    The data set is cut into windows of many batches; the images of a window are read, put in
    :func:`likeness_order` and cut into batches. The more blocks share a window, the more alike are
    the images of a block: ten blocks are much better than the two of a batch of 128. For
    ``DataLoader(dataset, batch_sampler=...)``.

    Results come in the order of the batches; ``list(sampler)``, read without ``shuffle``, says
    which are which. Each image is read twice, here for its order and by the loader: a data set
    whose images are drawn at random gives others then, and is better served by
    :class:`OrderedBatch`.

    Args:
        dataset: with ``len()`` and ``dataset[i]``.
        batch_size: images a batch; only the last batch of all may hold fewer.
        window: images that are ordered together, rounded up to whole batches; None for ten blocks.
        block: how many images share a pixel block.
        shuffle: whether the images of a window are drawn at random, others in each epoch;
            otherwise windows are those of the data set, and their order is found once.
        seed: decides what is drawn, with the epoch.
        drop_last: whether a last batch of fewer images is left out.
        image: a function that gives the image, (C, H, W), of ``dataset[i]``. By default the entry
            is the image, or a tuple or list that begins with it.

    Raises:
        TypeError: a data set without length or entries, numbers of another type; when iterated, an
            entry that holds no image.
        ValueError: numbers out of range.
        RuntimeError: when iterated, images that cannot be stacked or are no (C, H, W).
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        window: int | None = None,
        block: int = 64,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        image: Callable[[Any], Tensor] | None = None,
    ) -> None:
        if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                "dataset must have len() and entries by number; got "
                f"{type(dataset).__name__} (order the batches of a stream by OrderedBatch)"
            )
        check_images_a_block(block)
        window = _BLOCKS_A_WINDOW * block if window is None else window
        for name, value in (("batch_size", batch_size), ("window", window)):
            if not is_integer(value):
                raise TypeError(f"{name} must be an integer; got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be 1 or more; got {value}")
        if not is_integer(seed):
            raise TypeError(f"seed must be an integer; got {seed!r}")
        check_bool(shuffle, "shuffle")
        check_bool(drop_last, "drop_last")
        self.dataset, self.batch_size, self.block = dataset, batch_size, block
        self.window = -(-window // batch_size) * batch_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self._image = image or _first
        self._epoch = 0
        self._kept: dict[int, list[int]] = {}  # windows in order by where they begin

    def set_epoch(self, epoch: int) -> None:
        """Which epoch is drawn next, to go on with a training; each pass counts one up."""
        self._epoch = epoch

    def __len__(self) -> int:
        """How many batches a pass has."""
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        drawn = self._drawn()
        self._epoch += 1
        for first in range(0, len(drawn), self.window):
            ordered = self._ordered(first, drawn[first : first + self.window])
            for start in range(0, len(ordered), self.batch_size):
                batch = ordered[start : start + self.batch_size]
                if len(batch) == self.batch_size or not self.drop_last:
                    yield batch

    def _drawn(self) -> list[int]:
        """The data set's numbers in the order in which windows take them."""
        count = len(self.dataset)
        if not self.shuffle:
            return list(range(count))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self._epoch)
        return torch.randperm(count, generator=generator).tolist()

    def _ordered(self, first: int, numbers: list[int]) -> list[int]:
        if first in self._kept:
            return self._kept[first]
        images = torch.stack([self._image(self.dataset[number]) for number in numbers])
        ordered = [numbers[place] for place in likeness_order(images, self.block).tolist()]
        if not self.shuffle:
            self._kept[first] = ordered
        return ordered


def _first(entry: Any) -> Tensor:
    """The image of an entry."""
    image = entry[0] if isinstance(entry, (tuple, list)) and entry else entry
    if not isinstance(image, Tensor):
        raise TypeError(
            "an entry of the data set must be an image as a tensor, or begin with one; got "
            f"{type(image).__name__} (say where it is by image=)"
        )
    return image
