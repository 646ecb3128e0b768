"""Images in order of likeness: images that are alike come to share pixel blocks.

Every layer of a convolutional network works image by image, so a permutation of the batch before
the network, undone behind it, changes nothing but which images share a pixel block. A block of
images that are alike is dark or bright as a whole, and skipping it loses little, also where the
subject is somewhere else in each picture.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ._arguments import check_module, check_tensor, dtype_name, is_integer

_TYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)

_MOST_AT_ONCE = 1024  # images that the op order_images takes


def likeness_order(images: Tensor, block: int = 64) -> Tensor:
    """The permutation of a batch that puts images that are alike side by side.

    Images are compared by the centre of mass of their first channel, less its minimum. By the
    centres' rows they are cut into ``round(sqrt(N / block))`` bands of equal size; within a band
    they are sorted by the centres' columns, in every other band backwards. Images that have no
    centre, constant ones and those with NaN or infinity, count as centred in the picture. Equal
    centres keep the order of the batch. docs/experiments/networks.md compares this with other
    orders.

    Nothing waits for the device. On CUDA one kernel orders up to 1024 images. Else the first
    channel is read four times, for its minimum, its maximum and two sums; three sorts of N numbers
    follow.

    Args:
        images: (N, C, H, W) with C, H, W >= 1, of bool, uint8, int8, int16, int32, int64, float16,
            bfloat16, float32 or float64; strides as they are. N may be anything, zero too.
        block: how many images share a pixel block: the first number of ``pixel_block``.

    Returns:
        int64 tensor (N,) on the images' device: ``images[order]`` is the batch in order.

    Raises:
        TypeError: images that are no dense tensor, or of another type; a block that is no integer.
        RuntimeError: images of another shape.
        ValueError: a block less than 1.
    """
    return order_and_places(images, block)[0]


def order_and_places(images: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """:func:`likeness_order`, and the place of each image in it."""
    bands = _bands(images, block)
    with torch.no_grad():
        if _has_kernel(images):
            return torch.ops.spamm_torch.order_images(images, bands, False)[1:]
        rows, columns = _centres(images)
        order = _to_and_fro(rows, columns, bands)
        return order, order.argsort()


def order_images(images: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """The images in order, then :func:`order_and_places`. Gradients pass through the images."""
    bands = _bands(images, block)
    if _has_kernel(images):
        return torch.ops.spamm_torch.order_images(images, bands)
    order, places = order_and_places(images, block)
    return images[order], order, places


def _bands(images: Tensor, block: int) -> int:
    """How many bands of rows a batch has. Checks the arguments."""
    check_images(images)
    check_images_a_block(block)
    return max(1, round((images.shape[0] / block) ** 0.5))  # not math.sqrt: it may be symbolic


def _has_kernel(images: Tensor) -> bool:
    if torch.compiler.is_compiling():  # the batch may be symbolic
        return False
    return images.is_cuda and type(images) is Tensor and images.shape[0] <= _MOST_AT_ONCE


def check_images(images: Tensor) -> None:
    """Raises as :func:`likeness_order` unless these are images that can be ordered."""
    check_tensor(images, "images")
    if images.dtype not in _TYPES:
        names = ", ".join(map(dtype_name, _TYPES[:-1]))
        raise TypeError(
            f"images must be {names} or {dtype_name(_TYPES[-1])}; got {dtype_name(images.dtype)}"
        )
    if images.dim() != 4 or 0 in images.shape[1:]:
        hint = " (a batch of one is images[None])" if images.dim() == 3 else ""
        raise RuntimeError(
            "images must be a batch of shape (N, C, H, W) with C, H, W >= 1; got shape "
            f"{tuple(images.shape)}{hint}"
        )


def check_images_a_block(block: int) -> None:
    """Raises as :func:`likeness_order` unless this many images can share a block."""
    if not is_integer(block):
        raise TypeError(f"block must be an integer, the images of a pixel block; got {block!r}")
    if block < 1:
        raise ValueError(f"block must be 1 image or more; got {block}")


def _centres(images: Tensor) -> Tensor:
    """Row and column of each image's centre of mass, -1/2 to 1/2: float64 (2, N), in which sums of
    bytes and half types are exact, so that the order is the same on every device.
    """
    pixels = images[:, 0]
    height, width = pixels.shape[1:]
    least, most = (extreme((1, 2)).double() for extreme in (pixels.amin, pixels.amax))
    by_row, by_column = (pixels.sum(dim, dtype=torch.float64) for dim in (2, 1))
    mass = by_row.sum(1).sub(least, alpha=height * width)
    moments = torch.stack((_moment(by_row), _moment(by_column)))
    centres = (moments / mass).nan_to_num(0.0, 0.0, 0.0)
    return centres.masked_fill(least == most, 0.0)


def _moment(sums: Tensor) -> Tensor:
    """The first moment along one side of the picture, about its middle."""
    size = sums.shape[1]
    end = (size - 1) / (2 * size)
    coordinates = torch.linspace(-end, end, size, dtype=torch.float64, device=sums.device)
    return (sums * coordinates).sum(1)


def _to_and_fro(rows: Tensor, columns: Tensor, bands: int) -> Tensor:
    """The order by bands of rows, and in these by columns, every other band backwards."""
    count = rows.shape[0]
    by_row = rows.argsort(stable=True)
    band = torch.arange(count, device=rows.device) * bands // max(1, count)
    # Columns are within 1/2, so the bands stay apart.
    key = band + torch.pow(-1.0, band) * columns[by_row]
    return by_row[key.argsort(stable=True)]


# ---- A model that takes its batches in this order ------------------------------------------------


class OrderedBatch(nn.Module):
    """Runs a model on its batch in order of likeness; results come back in the batch's own order.

    For a model that treats each image by itself this changes only which images share a pixel block
    (see :func:`likeness_order`), and so what SpAMM layers skip. Batch norm in training sees the
    same images, added up in another order. Gradients pass through.

    The state dict's keys are the model's own, in both directions and strictly, so that checkpoints
    of the model itself load into this and back. ``module`` is the model; the names of parameters
    and modules are those of attributes, with ``module.`` in front.

    Args:
        module: what takes the images of a batch first, and gives a tensor, or tuples, lists and
            dicts of tensors, with the batch as first dimension; None may stand among them.
        block: how many images share a pixel block in the model's layers.

    Call: ``(images, *args, **kwargs)``, with images as :func:`likeness_order` takes them. Every
    other tensor among the arguments has the batch as first dimension, too, and is permuted with
    them; other arguments pass as they are.

    Raises:
        TypeError: a module that is none, a block that is no integer; when called, images that are
            no tensor, and a result that holds something other than tensors and None.
        ValueError: a block less than 1; when called, an argument or a result whose first dimension
            is not the batch.
        RuntimeError: images of another shape, when called.
    """

    def __init__(self, module: nn.Module, block: int = 64) -> None:
        check_module(module, "OrderedBatch")
        check_images_a_block(block)
        super().__init__()
        self.module = module
        self.block = block

    def forward(self, images: Tensor, *args: Any, **kwargs: Any) -> Any:
        ordered, order, places = order_images(images, self.block)
        args, kwargs = tree_map(
            lambda x: _permuted(x, order, "an argument") if isinstance(x, Tensor) else x,
            (args, kwargs),
        )
        result = self.module(ordered, *args, **kwargs)
        return tree_map(lambda value: _result(value, places), result)

    def extra_repr(self) -> str:
        return f"block={self.block}"

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.module.state_dict(*args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # torch goes on with the modules inside, by their names and with this same dict.
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _result(value: Any, place: Tensor) -> Any:
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise TypeError(
            "results must be tensors with the batch as first dimension, or tuples, lists and dicts "
            f"of them; got a {type(value).__name__}"
        )
    return _permuted(value, place, "a result")


def _permuted(tensor: Tensor, order: Tensor, what: str) -> Tensor:
    if tensor.dim() == 0 or tensor.shape[0] != order.shape[0]:
        raise ValueError(
            f"{what} must have the batch of {order.shape[0]} as first dimension; got shape "
            f"{tuple(tensor.shape)}"
        )
    return tensor[order]
