"""convert_, revert_ and refresh_: a trained network computes with SpAMM, in place and undoably."""

import itertools
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from .._arguments import check_bool, check_module
from .._hints import with_hints
from .._output import Progress
from .._state import Snapshot
from ..nn import SpAMMConv2d, _SpAMM
from .backend import refresh_compiled
from .config import SpAMMConfig
from .conversion import Conversion
from .example import Example
from .install import detach, fuse_again, fused_class, fused_of, is_converted_layer, revert_module
from .report import ConvertReport
from .request import read_request

Model = TypeVar("Model", bound=nn.Module)


@with_hints
def convert_(
    model: nn.Module,
    config: SpAMMConfig | str | os.PathLike[str] | None = None,
    *,
    tau: float | None = None,
    valid_ratio: float | None = None,
    max_error: float | None = None,
    example_input: Any = None,
    overrides: Mapping[str, SpAMMConfig | None] = {},
    fuse: bool = True,
    dry_run: bool = False,
    progress: bool = False,
) -> ConvertReport:
    """Makes a trained network compute with SpAMM, in place. :func:`revert_` undoes it.

    The module objects, their names, Parameters, hooks and the state dict's keys stay. An
    ``nn.Conv2d`` that skips becomes a :class:`SpAMMConv2d` by its class. With ``fuse``, each part
    of the model that ``torch.fx`` can trace gets a generated forward, in which a convolution
    computes the batch norm, the residual add and the activation behind it as well. It is taken in
    eval mode without gradients, autocast and hooks; elsewhere the model's own forward runs. Later
    changes of the model act in the next eager call: weights are folded anew, or its own forward
    runs. :func:`refresh_` says when that is not enough. docs/networks.md has each step.

    Args:
        model: an ``nn.Module``, in any mode; an ``nn.Conv2d`` itself, too. A converted model is
            converted anew from what it was.
        config: what layers skip: a :class:`SpAMMConfig`; the path of a settings file, as the
            report's ``save`` writes it, whose engines are taken without measuring; or None, which
            skips nothing and only chooses the fastest kernels. Layers that cannot pay stay dense:
            depthwise ones, and those with fewer than 32 channels (of a group) on a side.
        tau, valid_ratio, max_error: one of them stands for a ``config`` of it alone.
        example_input: what the model takes: a tensor; a tuple of positional arguments; a dict of
            arguments by name. Both forms are run on it: a part whose results differ by more than
            rounding is left as it was and named. Engines are measured on it, and the fastest form
            of the model is installed. Without an example, made-up images are compared where the
            model takes images alone, and ``config`` and a table choose engines.
        overrides: settings of layers by fully qualified name or ``"re:..."``, a regular expression
            for whole names. None leaves a layer dense. A setting under a full name is taken as it
            is; a pattern's is weighed as ``config`` is. Later keys win.
        fuse: whether anything but the convolutions' classes may change.
        dry_run: do all of it, report, and leave the model as it is.
        progress: whether to say on standard error what it is at.

    Returns:
        A :class:`ConvertReport`: a row for each convolution.

    Raises:
        TypeError: a model that is no module, an argument of another type.
        ValueError: several knobs, or a knob and a ``config``; an override that names no convolution
            or comes with a settings file, a settings file of another model, of another format or
            none at all, an example that the model cannot take, of no images or without finite
            numbers, a model without ``nn.Conv2d`` or without values (lazy, or on the device meta),
            settings that no layer can have.
        RuntimeError: a model whose modules something else changed after an earlier conversion.

    After any error the model is as it was.
    """
    check_module(model, "convert_")
    check_bool(fuse, "fuse")
    check_bool(dry_run, "dry_run")
    check_bool(progress, "progress")
    knobs = {"tau": tau, "valid_ratio": valid_ratio, "max_error": max_error}
    request = read_request(model, config, overrides, knobs)
    _check_values(model)
    example = None if example_input is None else Example(example_input)
    if example is not None:
        example.check_values()
    before = Snapshot(model)
    try:
        revert_(model)
        with Progress("convert_", progress) as shown:
            report = Conversion(model, request, example, fuse, shown, before).run()
    except BaseException:
        before.restore()
        raise
    if dry_run:
        before.restore()
    return report


def revert_(model: Model) -> Model:
    """Undoes :func:`convert_`, bit for bit; a model that is not converted stays as it is.

    Args:
        model: an ``nn.Module``, or a part of a converted model.

    Returns:
        The model.

    Raises:
        TypeError: a model that is no module.
        RuntimeError: a module whose class or setting something else changed after ``convert_``
            (``fully_shard``, a parametrization): undo that first. Nothing is changed then.
    """
    check_module(model, "revert_")
    for name, module in model.named_modules():
        _check_state(name, module, "revert_")
    for module in list(model.modules()):
        revert_module(module)
    return model


def refresh_(model: Model) -> Model:
    """Brings a converted or compiled model up to date with its tensors and hooks.

    Changes act without it, in the next eager call. Call it after values were written through
    ``.data`` at the same address or by another process, which no counter tells; after changes of
    layers or hooks, so that the rest is fused again; and before captured CUDA graphs or compiled
    code run again after any change. Everything is folded again. Folded tensors keep their memory
    where shapes, dtypes and devices stay, so that graphs and compiled code read the new values.

    Args:
        model: a converted model, or one compiled by the backend "spamm_torch".

    Returns:
        The model.

    Raises:
        TypeError: a model that is no module.
        ValueError: a model that is neither converted nor compiled.
        RuntimeError: a module whose class something else changed, as :func:`revert_`.
    """
    check_module(model, "refresh_")
    converted = [m for m in model.modules() if fused_of(m) is not None or is_converted_layer(m)]
    if not refresh_compiled(model) and not converted:
        raise ValueError(
            "refresh_ expects a model that convert_ converted or the backend compiled; got "
            f"{type(model).__name__} as it was"
        )
    for name, module in model.named_modules():
        _check_state(name, module, "refresh_")
    for module in converted:
        fused = fused_of(module)
        if isinstance(module, _SpAMM):
            module._pin_again()
        elif fused is not None and fused.is_stale():
            detach(module)
            fuse_again(module, fused.recipe)
        elif fused is not None:
            fused.renew()
    return model


def _check_values(model: nn.Module) -> None:
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(
                "convert_ expects a model whose layers know their sizes; got one whose "
                f"{name} is not initialised (run it once first)"
            )
        if tensor.is_meta:
            raise ValueError(
                f"convert_ expects a model with values; got one whose {name} is on the device meta"
            )


def _check_state(name: str, module: nn.Module, function: str) -> None:
    """Raises where a module is no longer of the class that convert_ gave it."""
    kind, fused = type(module), fused_of(module)
    changed = is_converted_layer(module) and kind is not SpAMMConv2d
    if fused is not None:
        original = getattr(kind, "_spamm_original", None)
        changed = original is None or kind is not fused_class(original)
    if changed:
        raise RuntimeError(
            f"{function} expects modules of the class that convert_ gave them; got "
            f"{name or 'the model'}, which is {kind.__name__} by now (undo that first)"
        )
