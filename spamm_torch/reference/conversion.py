"""convert_ with a reference picture: convolutions compute deviations from their values for it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .._arguments import check_tensor, dtype_name
from .._output import SILENT, Progress
from ..networks.compare import is_floating
from ..networks.config import DENSE, LEFT, Engine, lossless
from ..networks.conversion import Conversion
from ..networks.engines import Choice, Chooser, candidates
from ..networks.example import Example, describe
from ..networks.plan import Island, Site, computes_output_norms
from ..networks.report import ConvertReport
from ..networks.request import Request
from ..networks.shapes import shapes_of
from .fused import ReferenceForm
from .layouts import Layout, ReferencePlan
from .pixel_norms import pixel_norm_flow


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
    if reference.is_meta:
        raise ValueError("reference must come with values; got a picture on the device meta")
    parameter = next(model.parameters(), reference)
    dtype = parameter.dtype if parameter.is_floating_point() else reference.dtype
    picture = reference.detach().to(parameter.device, dtype, copy=True)
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


class ReferenceConversion(Conversion):
    """Converts a model to the reference form."""

    _keeps_layers = True  # deviations skip, not what the layers themselves get
    _form = ReferenceForm

    def __init__(
        self,
        model: nn.Module,
        request: Request,
        example: Example | None,
        picture: Tensor,
        progress: Progress = SILENT,
    ) -> None:
        if request.config is None:
            request = dataclasses.replace(request, config=lossless(picture.dtype))
        self._picture, self._has_example = picture, example is not None
        self._layouts: dict[str, Layout] = {}  # where all sites that may skip do
        self._references: dict[Island, tuple[Tensor, ...]] = {}
        example = example or Example(_made_up(picture), "reference")
        super().__init__(model, request, example, fuse=True, progress=progress)

    def _install(self, chooser: Chooser, engines: Mapping[str, Engine]) -> ConvertReport:
        report = super()._install(chooser, engines)
        if self.installation.fused:
            report.notes += ("generated forwards compute deviations from the reference picture",)
        report.reference = tuple(self._picture.shape)
        return report

    def _capture(self) -> list[Island]:
        """The islands that are called once for the reference, with tensors of one picture."""
        islands = super()._capture()
        roots = [island.module for island in islands]
        picture = Example(self._picture, "reference")
        calls, _ = picture.record(self._model, self._before, roots, 1)
        kept = []
        for island in islands:
            found = calls[island.module]
            traced = [island.signature.bound(call.args, call.kwargs) for call in found]
            # Of one picture each, so that many pictures can be compared with them.
            if (
                len(traced) == 1
                and traced[0]
                and all(is_floating(x) and x.dim() >= 2 and x.shape[0] == 1 for x in traced[0])
            ):
                self._references[island] = traced[0]
                kept.append(island)
            else:
                name = island.name or "the model"
                self._notes.append(f"{name} is not called once with pictures of floats alone")
        if not kept:
            notes = "; ".join(self._notes)
            raise ValueError(
                "convert_ with a reference expects a model with a part that torch.fx can trace; "
                f"got {type(self._model).__name__}, which has none ({notes})"
            )
        return kept

    def _sites_of(self, island: Island) -> list[Site]:
        sites = super()._sites_of(island)
        for site in sites:
            site.pool = None  # no kernel computes deviations and a pool
        return sites

    def _plan(
        self, island: Island, sites: Sequence[Site], engines: Mapping[str, Engine]
    ) -> ReferencePlan:
        return ReferencePlan(island, sites, engines, self._references[island])

    def _problem_of(self, island: Island, sites: list[Site]) -> str | None:
        try:
            return super()._problem_of(island, sites)
        except ValueError as error:  # it has no reference form
            return str(error)

    def _leave_what_differs(self, found: dict[Island, list[Site]]) -> None:
        super()._leave_what_differs(found)
        if not computes_output_norms(self._picture.device, self._picture.dtype):
            return
        for island, sites in found.items():
            engines = {site.name: self._engine_to_compare(site) for site in sites}
            plan = self._plan(island, sites, engines)
            with self._before.kept():
                shapes = shapes_of(island, plan.reference)
            self._layouts |= pixel_norm_flow(plan, shapes).layouts

    def _engine_to_compare(self, site: Site) -> Engine:
        if site.node is None:
            return LEFT
        engine = super()._engine_to_compare(site)
        return engine if engine.setting is None else Engine("spamm", lossless(self._picture.dtype))

    def _chooser(self) -> Chooser:
        example = self._example if self._has_example else None
        return _Chooser(
            *(self._model, self._request, example, self.installation),
            *(self._problem, self._progress),
            dtype=self._picture.dtype,
            layouts=self._layouts,
        )


class _Chooser(Chooser):
    """Chooses among the engines of the reference form."""

    def __init__(self, *args: Any, dtype: torch.dtype, layouts: Mapping[str, Layout]) -> None:
        self._lossless, self._layouts = lossless(dtype), layouts
        super().__init__(*args)

    def _candidates(self, site: Site) -> dict[str, Engine]:
        """Any number of channels may skip: zeros cost no accuracy. Groups stay apart."""
        setting = self._setting(site)
        if site.conv.groups > 1:
            return {"dense": DENSE}
        if setting is None or setting.skips_nothing:
            return candidates(site, setting)
        return {"dense": DENSE, f"spamm at {setting}": Engine("spamm", setting)}

    def _given_for(self, site: Site) -> Choice | None:
        if site.node is None:
            return Choice(LEFT, "not in a part that was traced")
        return super()._given_for(site)

    def _predicted(self, site: Site) -> Choice:
        choice, setting = super()._predicted(site), self._setting(site)
        layout = self._layouts.get(site.name)
        if layout is None or choice.engine != DENSE or setting != self._lossless:
            return choice
        how = "in phases" if layout.in_phases else "columns together"
        return Choice(Engine("spamm", setting), f"skips zeros, {how}")

    def _unmeasured(self) -> dict[str, dict[str, Engine]]:
        # Calls measured among others that skip do not show that a dense one computes no norms.
        predicted = {
            site.name: (self._given[site.name] or self._predicted(site)).engine
            for site in self._sites
        }
        return {"as without an example": predicted}


def _made_up(picture: Tensor) -> Tensor:
    """Four pictures: the reference, with noise in a corner, with noise everywhere, noise alone."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(3, *picture.shape[1:], generator=generator).to(picture)
    rows, columns = picture.shape[2:]
    noise[0] = 0
    noise[1, :, rows // 4 :], noise[1, :, :, columns // 4 :] = 0, 0
    return torch.cat((picture + noise, noise[2:]))
