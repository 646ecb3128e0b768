"""OrderedBatch: a model that takes its batches in order of likeness."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .likeness import check_images_a_block, order_images


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
        if not isinstance(module, nn.Module):
            raise TypeError(f"OrderedBatch expects an nn.Module; got {type(module).__name__}")
        check_images_a_block(block)
        super().__init__()
        self.module = module
        self.block = block

    def forward(self, images: Tensor, *args: Any, **kwargs: Any) -> Any:
        ordered, order, places = order_images(images, self.block)
        args, kwargs = tree_map(lambda value: _argument(value, order), (args, kwargs))
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


def _argument(value: Any, order: Tensor) -> Any:
    return _permuted(value, order, "an argument") if isinstance(value, Tensor) else value


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
