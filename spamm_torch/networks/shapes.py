"""Shapes and dtypes of the values of a traced graph, for arguments that were seen or made up."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .nodes import reason_not_plain
from .plan import Island, Shapes

_MADE_UP_IMAGES = ((2, 224, 160), (3, 192, 256))  # images, rows, columns
_SMALL_IMAGES = ((2, 48, 32), (2, 224, 224))  # likewise, to compute with
_KEEP_SHAPE = (nn.BatchNorm2d, nn.ReLU, nn.ReLU6, nn.SiLU, nn.Hardswish, nn.LeakyReLU)
_UNKNOWN = object()


def shapes_of(island: Island, args: Sequence[Tensor]) -> Shapes:
    """The shapes of the nodes for these arguments: the graph is run."""
    recorder = _Recorder(island)
    with torch.no_grad():
        recorder.run(*args)
    return recorder.shapes


def likely_shapes(island: Island, sizes: int = 2) -> list[Shapes]:
    """The shapes for made-up images of one size or two; none where the island may take others."""
    conv = _first_convolution(island)
    if conv is None:
        return []
    found = []
    for images, rows, columns in _MADE_UP_IMAGES[:sizes]:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            size = (images, conv.in_channels, rows, columns)
            image = torch.empty(size, dtype=conv.weight.dtype, device=conv.weight.device)
            with _without_log():
                found.append(shapes_of(island, [image]))
        # Cycles keep its weak references to Parameters, for which torch.utils.swap_tensors raises.
        mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()
    return found


def small_images(island: Island) -> list[Tensor]:
    """Made-up images, the smallest first; none where the island may take others."""
    conv = _first_convolution(island)
    if conv is None:
        return []
    weight = conv.weight
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(images, conv.in_channels, rows, columns, generator=generator).to(weight)
        for images, rows, columns in _SMALL_IMAGES
    ]


@contextmanager
def _without_log() -> Iterator[None]:
    """Fake tensors log what they cannot follow as errors; here it is no error."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _first_convolution(island: Island) -> nn.Conv2d | None:
    """The convolution whose channels the images have, where the island takes images alone."""
    nodes = list(island.graph.nodes)
    if sum(node.op == "placeholder" for node in nodes) != 1:
        return None
    modules = (island.module.get_submodule(n.target) for n in nodes if n.op == "call_module")
    return next((module for module in modules if isinstance(module, nn.Conv2d)), None)


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps the shapes. Nodes that depend on one that fails have none."""

    def __init__(self, island: Island) -> None:
        super().__init__(island.module, graph=island.graph)
        self.extra_traceback = False
        self.shapes: Shapes = {}

    def run_node(self, n: fx.Node) -> Any:
        try:
            result = super().run_node(n)
        except Exception:  # a fake tensor has no data to look at, and made-up sizes may not fit
            return _UNKNOWN
        if isinstance(result, Tensor):
            self.shapes[n] = (tuple(result.shape), result.dtype)
        return result

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.fetch_attr(target)
        # Fake tensors take longer for these than all else that a network computes.
        is_fake = len(args) == 1 and isinstance(args[0], FakeTensor) and not kwargs
        if is_fake and reason_not_plain(module) is None:
            if type(module) in _KEEP_SHAPE:
                return args[0]
            if type(module) is nn.Conv2d and (shape := _after(module, args[0])) is not None:
                return args[0].new_empty(shape, dtype=module.weight.dtype)
        return super().call_module(target, args, kwargs)


def _after(conv: nn.Conv2d, images: Tensor) -> list[int] | None:
    """The shape that a convolution makes of images; None where torch has to say."""
    if isinstance(conv.padding, str) or images.dim() != 4 or images.shape[1] != conv.in_channels:
        return None
    padded = (length + 2 * pad for length, pad in zip(images.shape[2:], conv.padding, strict=True))
    windows = zip(padded, conv.kernel_size, conv.dilation, conv.stride, strict=True)
    rest = [
        (length - dilation * (kernel - 1) - 1) // stride + 1
        for length, kernel, dilation, stride in windows
    ]
    return [images.shape[0], conv.out_channels, *rest] if min(rest) > 0 else None
