"""Batches in order of likeness, in the generated forward of a whole model.

The module itself carries how many images share a block, so that copies and pickles have it too.
"""

from __future__ import annotations

import torch
from torch import nn

from .config import SpAMMConfig
from .example import Example
from .fused import ORDER, fused_of
from .report import ConvertReport
from .state import in_eval_mode

_DEFAULT = 64  # images of the default pixel block


def order_batches(model: nn.Module, report: ConvertReport, example: Example | None) -> None:
    """Has a converted model's generated forward order its batches, where images share blocks.

    Raises ValueError where no forward was generated for the whole model; TypeError and ValueError
    where the example's result cannot be put back into the batch's order.
    """
    block = images_a_block(report)
    if block is None:
        report.notes += ("batches are not ordered: no layer skips",)
        return
    if block == 1:
        report.notes += ("batches are not ordered: all blocks are of one image",)
        return
    if fused_of(model) is None:
        raise ValueError(
            "order_batch=True expects a model that has a generated forward as a whole; got "
            f"{type(model).__name__}, which has none (OrderedBatch takes any model)"
        )
    model.__dict__[ORDER] = block
    report.order_batch = True
    if example is not None:
        with in_eval_mode(model), torch.no_grad():
            example.call(model)


def forget_order(model: nn.Module) -> None:
    """Undoes :func:`order_batches`."""
    model.__dict__.pop(ORDER, None)


def images_a_block(report: ConvertReport) -> int | None:
    """How many images share a block in a layer that skips, at most; None where no layer does."""
    skipping = [row.setting for row in report if row.setting and not row.setting.skips_nothing]
    return max(map(_images_a_block, skipping), default=None)


def _images_a_block(setting: SpAMMConfig) -> int:
    if setting.pixel_block is not None:
        return setting.pixel_block[0]
    if setting.block is None:
        return _DEFAULT
    return setting.block if isinstance(setting.block, int) else setting.block[2]
