"""The steps of one conversion: capture, compare, choose, install, report."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .._output import SILENT, Progress
from .._state import Place, Snapshot, in_eval_mode
from ..nn import SpAMMConv2d, _SpAMM
from . import compare
from .capture import Capture
from .config import DENSE, LEFT, NOTHING_SKIPPED, Engine
from .engines import Choice, Chooser, own_setting
from .example import Call, Example, Signature, copied, first_line
from .fused import Fused
from .generate import generate
from .install import Installation
from .operands import Made
from .plan import Island, Plan, Site
from .report import ConvertReport, Row, geometry_of, shape_of
from .request import Request
from .shapes import likely_shapes, shapes_of
from .sites import alike_by_shapes, find_sites, layer_of, reason_not_to_call, reason_not_to_convert


class Conversion:
    """Converts a model that is not converted. After an error it is the caller's to restore it."""

    installation: Installation
    _before: Snapshot  # in eval mode, while it is prepared
    _keeps_layers: ClassVar[bool] = False
    _form: ClassVar[type[Fused]] = Fused

    def __init__(
        self,
        model: nn.Module,
        request: Request,
        example: Example | None,
        fuse: bool,
        progress: Progress = SILENT,
        before: Snapshot | None = None,
    ) -> None:
        self._known = before
        self._model, self._request, self._example = model, request, example
        self._progress = progress
        self._notes: list[str] = []
        self._reasons: dict[str, str] = {}  # why a call is not fused, by name
        self._layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, (nn.modules.conv._ConvNd, nn.Linear))
        }
        if not any(isinstance(layer, nn.Conv2d) for layer in self._layers.values()):
            raise ValueError(
                "convert_ expects a model with nn.Conv2d layers; got "
                f"{type(model).__name__}, which has none in {len(list(model.modules()))} modules"
            )
        self._fuses = fuse
        self._islands: list[Island] = []
        self._calls: Mapping[nn.Module, list[Call]] = {}
        self._changed: list[Place] = []  # in two calls of the model as it is
        self._problem: str | None = None  # why nothing may be converted
        # Tensors and generated forwards of one form of the model, which serve others, too.
        self._made: Made = {}
        self._fused: dict[tuple[Any, ...], Fused | None] = {}

    def run(self) -> ConvertReport:
        """Converts the model and reports each change."""
        with in_eval_mode(self._model, self._known) as self._before:
            self._prepare()
            chooser = self._chooser()
            engines = chooser.choose()
        return self._install(chooser, engines)

    def run_again(self, request: Request) -> ConvertReport:
        """The same with engines for all calls in the request: nothing is compared or measured."""
        self._request = request
        chooser = self._chooser()
        return self._install(chooser, chooser.choose())

    def _prepare(self) -> None:
        """Finds what can be converted, whichever engines it gets."""
        self._progress.at("tracing")
        if self._fuses:
            self._islands = self._capture()
        roots = dict.fromkeys([self._model, *(island.module for island in self._islands)])
        if self._example is not None and not roots.keys() <= self._calls.keys():
            found = self._example.record(self._model, self._before, list(roots))
            self._calls, self._changed = found
        by_island = {island: self._sites_of(island) for island in self._islands}
        self._leave_what_differs(by_island)
        sites = [site for found in by_island.values() for site in found]
        sites += self._lone_sites({id(site.conv) for site in sites})
        rest = self._fuse, self._keeps_layers
        self.installation = Installation(by_island, sites, *rest)
        self._problem = self._problem_of_all(sites)
        if self._problem is not None:
            self._notes.append(f"nothing is converted: {self._problem}")
            self.installation = Installation({}, self._lone_sites(set()), *rest)
        self._calls = {}

    def _install(self, chooser: Chooser, engines: Mapping[str, Engine]) -> ConvertReport:
        self.installation.engines = engines
        self._fused = {}
        report = self._report(chooser)
        if all(row.action == "left" for row in report):
            report.notes += ("the model stays as it was: nothing to absorb, nothing faster",)
        return report

    def _chooser(self) -> Chooser:
        return Chooser(
            *(self._model, self._request, self._example, self.installation),
            *(self._problem, self._progress),
        )

    def _fuse(
        self, island: Island, sites: Sequence[Site], engines: Mapping[str, Engine]
    ) -> Fused | None:
        """The generated forward of an island; None where it would compute nothing."""
        key = (island, *(engines[site.name] for site in sites))
        if key not in self._fused:
            plan = self._plan(island, sites, engines)
            self._fused[key] = self._form(plan, self._made) if plan.fused else None
        return self._fused[key]

    def _plan(self, island: Island, sites: Sequence[Site], engines: Mapping[str, Engine]) -> Plan:
        return Plan(island, sites, engines)

    # ---- Parts of the model ---------------------------------------------------------------------

    def _capture(self) -> list[Island]:
        before = self._before
        forms: dict[nn.Module, Signature] = {}
        if self._example is not None:
            given = self._model, before, [self._model]
            self._calls, self._changed = self._example.record(*given, forms=forms)
        captured = Capture(self._model, before, forms)
        for name, problem in captured.problems.items():
            kind = type(self._model.get_submodule(name)).__name__
            if kind not in ("ModuleList", "ModuleDict"):
                self._notes.append(f"{name or 'the model'} ({kind}) {problem}")
        return captured.islands

    def _sites_of(self, island: Island) -> list[Site]:
        with self._before.kept():
            measured = [shapes_of(island, copied(args)) for args, _ in self._plain_calls(island)]
            likely = likely_shapes(island, sizes=1 if measured else 2)
            sites = find_sites(island, alike_by_shapes(measured, likely))
        for site in sites:
            if measured and site.input in measured[0]:
                shape, _ = measured[0][site.input]
                site.input_shape = shape if len(shape) == 4 else (1, *shape)
        return sites

    def _plain_calls(self, island: Island) -> Iterator[tuple[tuple[Tensor, ...], Any]]:
        """Arguments and results of the recorded calls that generated forwards could serve."""
        known: list[Any] = []
        for args, kwargs, result in self._calls.get(island.module, ()):
            traced = island.signature.bound(args, kwargs)
            if traced is None or not all(isinstance(arg, Tensor) for arg in traced):
                continue
            if not any(compare.are_equal((traced, result), other) for other in known):
                known.append((traced, result))
                yield traced, result

    def _lone_sites(self, known: set[int]) -> list[Site]:
        """The convolutions that no island calls: nothing is fused with them."""
        return [
            Site(name, layer)
            for name, layer in self._layers.items()
            if isinstance(layer, nn.Conv2d) and id(layer) not in known
        ]

    # ---- Comparing both forms -------------------------------------------------------------------

    def _leave_what_differs(self, found: dict[Island, list[Site]]) -> None:
        """Drops the islands whose generated forward computes something else than their own."""
        for number, island in enumerate(list(found)):
            self._progress.at("comparing parts of the model", number, len(self._islands))
            problem = self._problem_of(island, found[island])
            if problem is not None:
                self._notes.append(f"{island.name or 'the model'} is not fused: {problem}")
                self._reasons |= {site.name: f"not fused: {problem}" for site in found[island]}
                del found[island]

    def _problem_of(self, island: Island, sites: list[Site]) -> str | None:
        """Names a fault of an island's generated forward, with nothing skipped; or None."""
        traced = {island.module, *island.entered.values()}
        changed = next((place.name for place in self._changed if place.owner in traced), None)
        if changed is not None:
            return f"a call changes {changed}"
        engines = {site.name: self._engine_to_compare(site) for site in sites}
        with self._before.kept(), torch.no_grad():
            try:
                fused = self._fuse(island, sites, engines)
                if fused is None:
                    generate(Plan(island, sites, engines))  # as other engines may need it
                    return None
            except SyntaxError as error:  # an attribute is called as a keyword is
                return f"no code can be generated ({first_line(error)})"
            calls = list(self._plain_calls(island))
            if self._example is None:
                name, signature = island.name or "the model", island.signature
                if signature.is_guessed and signature.traced:
                    self._notes.append(
                        f"{name} is fused for calls that give {signature.traced[0]} alone: all "
                        "arguments have defaults, and no example_input tells which are given"
                    )
                with self._before.kept():  # random numbers are drawn once more below
                    calls = compare.made_up_calls(island, self._before)
                if not calls:
                    self._notes.append(f"{name} was not compared: no example_input was given")
            elif not calls:
                with_what = "with tensors alone " if self._calls[island.module] else ""
                return f"it was not called {with_what}on the example input"
            run = functools.partial(compare.own_result, island)
            for args, expected in calls:
                try:
                    found = fused.run(copied(args))
                except Exception as error:  # any fault of the generated code
                    return f"it cannot run ({first_line(error)})"
                problem = compare.beyond_rounding(island.module, run, args, expected, found)
                if problem is not None:
                    return problem
        return None

    def _problem_of_all(self, sites: Sequence[Site]) -> str | None:
        """Names a fault of the whole model on the example, with nothing skipped; or None."""
        if self._example is None or any(isinstance(site.conv, SpAMMConv2d) for site in sites):
            return None
        engines = {
            site.name: LEFT if reason_not_to_convert(site.conv) else self._engine_to_compare(site)
            for site in sites
        }
        islands = {island.module: found for island, found in self.installation.islands.items()}
        no_class_changes = all(engine.setting is None for engine in engines.values())
        if islands.get(self._model) == sites and no_class_changes:
            return None  # it has been compared as an island
        example, expected = self._example, [call.result for call in self._calls[self._model]]
        given = (example.args, example.kwargs)
        with self._before.kept(), torch.no_grad():
            self.installation.engines = engines
            try:
                found = [example.call(self._model) for _ in expected]
            except Exception as error:  # of code that meets another result or class
                return f"it cannot run ({first_line(error)})"
            # It may draw numbers, say.
            has_own_way = compare.difference(expected[0], expected[-1]) is not None
            for pair in zip(expected, found, strict=True):
                if has_own_way:
                    problem = compare.other_form(*pair)
                else:
                    call = lambda model, both: model(*both[0], **both[1])  # noqa: E731
                    problem = compare.beyond_rounding(self._model, call, given, *pair)
                if problem is not None:
                    return problem
        return None

    def _engine_to_compare(self, site: Site) -> Engine:
        setting = own_setting(site) or self._request.setting_of(layer_of(site.name))
        can_be_spamm = setting is not None and not setting.skips_nothing
        return Engine("spamm", NOTHING_SKIPPED) if can_be_spamm else DENSE

    # ---- The report -----------------------------------------------------------------------------

    def _report(self, chooser: Chooser) -> ConvertReport:
        by_layer: dict[str, list[Site]] = {}
        for site in self.installation.sites:
            by_layer.setdefault(layer_of(site.name), []).append(site)
        fused = {name for fused in self.installation.fused for name in fused.names}
        rows: list[Row] = []
        for name, layer in self._layers.items():
            found = by_layer.get(name)
            if _is_plain_linear(layer):
                continue
            if found is None:
                reason = f"{type(layer).__name__}: only nn.Conv2d is converted"
                if isinstance(layer, _SpAMM):
                    reason = "skips by its own setting"
                rows.append(Row(name, shape_of(layer), "left", reason=reason))
            for site in found or []:
                rows.append(self._row(site, chooser.choices[site.name], site.name in fused))
        linear = sum(map(_is_plain_linear, self._layers.values()))
        note = [f"linear layers, torch's own: {linear}"] if linear else []
        notes = [*note, *self._notes, *chooser.notes]
        return ConvertReport(rows, notes, device_name(self._model))

    def _row(self, site: Site, choice: Choice, is_fused: bool) -> Row:
        engine = self.installation.engines[site.name]
        action = engine.kind if engine.kind != "dense" or is_fused else "left"
        reasons = [choice.reason if engine == choice.engine else "the whole model is faster so"]
        if site.name in self._reasons:
            reasons.append(self._reasons[site.name])
        elif not is_fused and engine == choice.engine != LEFT:
            why = "nothing to absorb" if site.node else reason_not_to_call(site.conv)
            reasons.append(why or "not fused")
        absorbed = site.absorbed if is_fused else ()
        if is_fused and engine.pools and site.pool is not None:
            absorbed += ("pool",)
        if engine.joined is not None:
            absorbed += ("groups",)
        return Row(
            *(site.name, shape_of(site.conv), action, absorbed, "; ".join(reasons)),
            *(engine.of_op, choice.times, engine.band, geometry_of(site.conv)),
        )


def _is_plain_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and not isinstance(layer, _SpAMM)


def device_name(model: nn.Module) -> str:
    device = next(model.parameters()).device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
