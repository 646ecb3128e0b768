"""convert_ with a reference picture: convolutions work on deviations from what it makes of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .._arguments import check_tensor, dtype_name
from ..chain import computes_output_norms
from .capture import Island
from .config import SpAMMConfig
from .conversion import Conversion, Installation, layer_of
from .engines import Choice, Measurements, candidates
from .example import Example, describe
from .fused import Source, fused_of
from .layouts import Layout, one_for_each
from .lossless import lossless
from .pixel_norms import PixelNormFlow, pixel_norm_flow
from .plan import DENSE, LEFT, Engine, Plan
from .report import ConvertReport
from .request import Request
from .shapes import shapes_of
from .signature import Signature
from .sites import Site
from .state import in_eval_mode

_ops = torch.ops.spamm_torch


def check_reference(
    reference: Any, model: nn.Module, example: Example | None, fuse: bool
) -> Tensor:
    """A copy of the reference picture, as the model takes it; raises as convert_ does."""
    if not fuse:
        raise ValueError("a reference must come with fuse=True; got fuse=False")
    check_tensor(reference, "reference")
    is_picture = reference.dim() == 4 and reference.shape[0] == 1
    if not is_picture or not reference.is_floating_point():
        raise ValueError(
            "reference must be one picture of floats, (1, channels, height, width); got "
            f"{describe(reference)}"
        )
    picture = _as_the_model_takes_it(reference, model)
    if not bool(torch.isfinite(picture).all()):
        raise ValueError(
            f"reference must be finite in {dtype_name(picture.dtype)}, the model's type; got NaN "
            "or infinity in it"
        )
    given = None if example is None else tree_leaves((example.args, example.kwargs))
    if given is not None:
        pictures = [value for value in given if isinstance(value, Tensor)]
        if [value.shape[1:] for value in pictures] != [reference.shape[1:]]:
            shapes = ", ".join(str(tuple(value.shape)) for value in pictures) or "no tensor"
            raise ValueError(
                f"reference must have the size of example_input's pictures, {shapes}; got "
                f"{tuple(reference.shape)}"
            )
    return picture


def _as_the_model_takes_it(reference: Tensor, model: nn.Module) -> Tensor:
    """A copy of the device and dtype of the model's first parameter."""
    parameter = next(model.parameters(), reference)
    for tensor, owner in ((reference, "a picture"), (parameter, "a model")):
        if tensor.is_meta:
            raise ValueError(
                "reference must come with values, of itself and of the model; got "
                f"{owner} on the device meta"
            )
    dtype = parameter.dtype if parameter.is_floating_point() else reference.dtype
    return reference.detach().to(parameter.device, dtype, copy=True)


class ReferenceConversion(Conversion):
    """Converts a model to the reference form."""

    def __init__(
        self, model: nn.Module, request: Request, example: Example | None, picture: Tensor
    ) -> None:
        if request.config is None:
            request = dataclasses.replace(request, config=lossless(picture.dtype))
        self._picture, self._is_measured = picture, example is not None
        self._of_reference: dict[nn.Module, list[Tensor]] = {}  # inputs of convolutions
        self._flow = PixelNormFlow()  # where all sites that may skip do
        super().__init__(model, request, example or Example(_made_up(picture)), fuse=True)
        if not self._islands:
            notes = "; ".join(self._notes)
            raise ValueError(
                "convert_ with a reference expects a model with a part that torch.fx can trace; "
                f"got {type(model).__name__}, which has none ({notes})"
            )

    def run(self) -> ConvertReport:
        """Converts the model and says what was done to it."""
        report = super().run()
        self._of_reference = {}
        return report

    def _install(self) -> ConvertReport:
        report = super()._install()
        fused = filter(None, map(fused_of, self._model.modules()))
        if any(found.reference is not None for found in fused):
            report.notes += ("generated forwards compute deviations from the reference picture",)
        report.reference = tuple(self._picture.shape)
        return report

    def _capture(self) -> list[Island]:
        """The islands that are called once for the reference, with tensors of one picture."""
        islands = super()._capture()
        roots = [island.module for island in islands]
        calls, self._of_reference = Example(self._picture, "reference").record(self._model, roots)
        kept = []
        for island in islands:
            found = calls[island.module]
            signature = Signature(type(island.module).forward)
            traced = [
                signature.bound(args, kwargs)
                for args, kwargs in zip(found.args, found.kwargs, strict=True)
            ]
            if len(traced) == 1 and traced[0] and all(map(_is_picture, traced[0])):
                island.reference = traced[0]
                kept.append(island)
            else:
                name = island.name or "the model"
                self._notes.append(f"{name} is not called once with pictures of floats alone")
        return kept

    def _problem_of(self, island: Island, sites: list[Site]) -> str | None:
        try:
            return super()._problem_of(island, sites)
        except ValueError as error:  # it has no reference form
            return str(error)

    def _leave_what_differs(self, plans: dict[Island, list[Site]]) -> None:
        super()._leave_what_differs(plans)
        if not computes_output_norms(self._picture.device, self._picture.dtype):
            return
        for island, sites in plans.items():
            plan = Plan(island, sites, {site.name: self._engine_to_compare(site) for site in sites})
            assert island.reference is not None
            with in_eval_mode(self._model):
                flow = pixel_norm_flow(plan, shapes_of(island, island.reference))
            self._flow.layouts |= flow.layouts
            self._flow.parts |= flow.parts
            self._flow.plain |= flow.plain
            self._flow.readers |= flow.readers
            self._flow.producers |= flow.producers

    def _engine_to_compare(self, site: Site) -> Engine:
        engine = super()._engine_to_compare(site)
        return engine if engine.setting is None else Engine("spamm", lossless(self._picture.dtype))

    def _choose(self, sites: list[Site]) -> dict[str, Choice]:
        of_reference = self._of_reference if self._is_measured else {}
        self._inputs = {
            conv: _deviations(self._inputs[conv], references)
            for conv, references in of_reference.items()
        }
        return super()._choose(sites)

    def _measurements(self) -> Measurements:
        return _DeviationMeasurements(self._flow)

    def _choice(self, site: Site, measurements: Measurements, input: Tensor | None) -> Choice:
        if site.node is None:
            return Choice(LEFT, "not in a part that was traced")
        choice = super()._choice(site, measurements, input)
        setting = self._request.setting_of(layer_of(site.name))
        layout = self._flow.layouts.get(site.name)
        if layout is None or choice.engine != DENSE or choice.times:
            return choice
        if site.name in self._request.engines:
            return choice
        if setting != lossless(self._picture.dtype):
            return choice
        how = "in phases" if layout.in_phases else "columns together"
        return Choice(Engine("spamm", setting), f"skips zeros, {how}")

    def _fastest(
        self, plans: Mapping[Island, list[Site]], sites: list[Site], chosen: Installation
    ) -> Installation:
        return super()._fastest(plans, sites, chosen) if self._is_measured else chosen

    def _unmeasured(self, sites: list[Site]) -> tuple[str, dict[str, Engine]]:
        """The plan of a conversion without an example.

        Layers measured alone do not show what they leave to others: a dense one leaves no norms.
        """
        measurements = self._measurements()
        engines = {site.name: self._choice(site, measurements, None).engine for site in sites}
        return "as without an example", engines


class _DeviationMeasurements(Measurements):
    """Measures sites as the reference form has them among others that skip: in their layouts, with
    norms of pixels that the layer before left. Inputs are deviations.
    """

    def __init__(self, flow: PixelNormFlow) -> None:
        super().__init__()
        self._flow = flow

    def _candidates(self, conv: nn.Conv2d, setting: SpAMMConfig | None) -> dict[str, Engine]:
        """Those that skip do so for any number of channels: zeros cost no accuracy."""
        if setting is None or setting.skips_nothing or conv.groups > 1:
            return candidates(conv, setting)
        return {"dense": DENSE, f"spamm at {setting}": Engine("spamm", setting)}

    def _call(self, site: Site, engine: Engine, input: Tensor) -> Any:
        conv = site.conv
        weight, _, norms = Source(conv, site.batch_norm, engine).operands()
        assert weight is not None
        options: dict[str, Any] = {"activation": site.activation}
        if engine.setting is not None:
            options |= {**engine.setting.op_arguments(), "norm_weight": norms}
        geometry: tuple[Any, ...] = (conv.stride, conv.padding, conv.dilation, conv.groups)
        sums = _ops.dense_conv2d(input, weight, None, *geometry)
        base = torch.ones_like(sums[:1])
        if site.residual is not None:
            options["residual"] = torch.ones_like(sums)
        op, flow = _ops.conv2d_deviation, self._flow
        operands: list[Tensor | None] = [weight, base]
        if engine.setting != lossless(input.dtype):
            return lambda: op(input, *operands, *geometry, **options)
        layout = flow.layouts.get(site.name)
        if layout is not None:
            *operands, norms = layout.operands(conv, weight, base)
            options |= {**layout.options(), "norm_weight": norms}
            if "residual" in options:
                options["residual"] = layout.image(options["residual"])
            geometry = layout.geometry(conv)
        if site.name in flow.parts or (layout is not None and layout.in_phases):
            return self._call_of_parts(site, input, operands, geometry, options)
        if layout is not None:
            input = layout.input(input)
        if site.name in flow.plain:
            assert operands[1] is not None
            options["residual"] = one_for_each(operands[1], input)
        if site.name in flow.readers:
            options["norm_input"] = _ops.join_deviations([input])[1]
        if site.name in flow.producers:
            op = _ops.conv2d_deviation_with_norms
        return lambda: op(input, *operands, *geometry, **options)

    def _call_of_parts(
        self,
        site: Site,
        input: Tensor,
        operands: list[Tensor | None],
        geometry: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Any:
        """A call that reads parts, or puts phases in their places."""
        flow, layout = self._flow, self._flow.layouts.get(site.name, Layout())
        channels = flow.parts[site.name].values() if site.name in flow.parts else (input.shape[1],)
        parts = [layout.input(part) for part in input.split(list(channels), 1)]
        has_norms = site.name in flow.parts or site.name in flow.readers
        options["norm_parts"] = [_ops.join_deviations([x])[1] for x in parts if has_norms]
        options["in_phases"] = layout.in_phases
        return lambda: _ops.conv2d_deviation_parts(parts, *operands, *geometry[:3], **options)


def _is_picture(value: Any) -> bool:
    """Whether an argument is of one picture, so that many pictures can be compared with it."""
    is_tensor = isinstance(value, Tensor) and value.is_floating_point()
    return is_tensor and value.dim() >= 2 and value.shape[0] == 1


def _deviations(inputs: list[Tensor], references: list[Tensor]) -> list[Tensor]:
    """What the calls of a convolution get, less what they get for the reference.

    The list ends at the first call where the two are no pictures of one size, as in a model that
    folds windows into the batch.
    """
    pairs = itertools.takewhile(
        lambda pair: pair[1].shape[0] == 1 and pair[0].shape[1:] == pair[1].shape[1:],
        zip(inputs, references, strict=False),
    )
    return [x - m for x, m in pairs]


def _made_up(picture: Tensor) -> Tensor:
    """Four pictures to compare with: the reference, with noise in a corner, with noise everywhere,
    and the noise alone.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(3, *picture.shape[1:], generator=generator).to(picture)
    rows, columns = picture.shape[2:]
    noise[0] = 0
    noise[1, :, rows // 4 :], noise[1, :, :, columns // 4 :] = 0, 0
    return torch.cat((picture + noise, noise[2:]))
