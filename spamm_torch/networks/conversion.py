"""The steps of one conversion: capture, compare, measure, choose, install."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .._progress import SILENT, Progress
from ..nn import SpAMMConv2d, _SpAMM
from .capture import Island, capture
from .config import NOTHING_SKIPPED, SpAMMConfig
from .engines import Choice, asked, candidates, fastest, predict, with_pool, without_choice
from .example import Calls, Example, copied, difference, is_rounding, other_form
from .fused import Fused, Recipe, attach, detach
from .generate import generate
from .leaves import (
    Band,
    convert_leaf,
    geometry_of,
    reason_not_to_convert,
    revert_leaf,
    shape_of,
)
from .plan import DENSE, LEFT, Engine, Plan
from .reference_form import fused_for
from .report import ConvertReport, Row
from .request import Request
from .shapes import likely_shapes, shapes_of, small_images
from .signature import Signature
from .sites import Site, alike_by_shapes, find_sites, reason_not_to_call
from .state import Place, in_eval_mode
from .timing import Mark, Timing, times_of, times_of_parts


class Conversion:
    """Converts a model that is not converted. After an error it is the caller's to restore it."""

    def __init__(
        self,
        model: nn.Module,
        request: Request,
        example: Example | None,
        fuse: bool,
        progress: Progress = SILENT,
    ) -> None:
        self._model, self._request, self._example = model, request, example
        self._progress = progress
        self._notes: list[str] = []
        self._reasons: dict[str, str] = {}  # why a call is not fused, by name
        self._layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, (nn.modules.conv._ConvNd, nn.Linear))
        }
        self._check_layers()
        progress.at("tracing")
        self._islands = self._capture() if fuse else []
        self._calls: Mapping[nn.Module, Calls] = {}
        self._changed: list[Place] = []  # in two calls of the model as it is
        self._problem: str | None = None  # why nothing may be converted
        self._choices: Mapping[str, Choice] = {}
        self._plans: dict[Island, list[Site]] = {}
        self._sites: list[Site] = []
        self._installations: dict[tuple[Engine, ...], Installation] = {}

    def run(self) -> ConvertReport:
        """Converts the model and says what was done to it."""
        self._prepare()
        return self._install()

    def run_again(self, request: Request) -> ConvertReport:
        """The same for a model as it was then, with the engines of another request. Parts are not
        compared again, and nothing is measured.

        Args:
            request: with engines for all calls, and otherwise as it was.
        """
        self._request = request
        self._calls = {}
        return self._install()

    def installation(self, request: Request) -> Installation:
        """The same, to be put in place."""
        self._request = request
        choices = self._choose()
        return self._installation({name: choice.engine for name, choice in choices.items()})

    def _prepare(self) -> None:
        """Finds what can be converted, whichever engines it gets."""
        if self._example is not None:
            roots = [self._model, *(island.module for island in self._islands)]
            self._calls, self._changed = self._example.record(self._model, roots)
        plans = {island: self._sites_of(island) for island in self._islands}
        self._leave_what_differs(plans)
        sites = [site for found in plans.values() for site in found]
        sites += self._lone_sites({id(site.conv) for site in sites})
        self._problem = self._problem_of_all(plans, sites)
        if self._problem is not None:
            self._notes.append(f"nothing is converted: {self._problem}")
            plans, sites = {}, self._lone_sites(set())
        self._plans, self._sites = plans, sites

    def _install(self) -> ConvertReport:
        choices = self._choices = self._choose()
        chosen = self._installation({name: choice.engine for name, choice in choices.items()})
        installation = self._fastest(chosen)
        self._installations = {}
        installation.attach()
        report = self._report(self._sites, choices, installation)
        if all(row.action == "left" for row in report):
            report.notes += ("the model stays as it was: nothing to absorb, nothing faster",)
        return report

    # ---- What there is --------------------------------------------------------------------------

    def _check_layers(self) -> None:
        if any(isinstance(layer, nn.Conv2d) for layer in self._layers.values()):
            return
        modules = sum(1 for _ in self._model.modules())
        raise ValueError(
            "convert_ expects a model with nn.Conv2d layers; got "
            f"{type(self._model).__name__}, which has none in {modules} modules"
        )

    def _capture(self) -> list[Island]:
        forms = {} if self._example is None else self._example.forms(self._model)
        with in_eval_mode(self._model):
            captured = capture(self._model, forms)
        for name, problem in captured.problems.items():
            kind = type(self._model.get_submodule(name)).__name__
            if kind not in ("ModuleList", "ModuleDict"):
                self._notes.append(f"{name or 'the model'} ({kind}) {problem}")
        return captured.islands

    def _sites_of(self, island: Island) -> list[Site]:
        with in_eval_mode(self._model):
            measured = [shapes_of(island, copied(args)) for args, _ in self._plain_calls(island)]
            sites = find_sites(island, alike_by_shapes(measured, likely_shapes(island)))
        for site in sites:
            if measured and site.node in measured[0]:
                shape, _ = measured[0][site.node]
                site.images = shape[0] if len(shape) == 4 else 1
        return sites

    def _plain_calls(self, island: Island) -> Iterator[tuple[tuple[Tensor, ...], Any]]:
        """Arguments and results of the recorded calls that the generated forward could serve."""
        calls = self._calls.get(island.module)
        if calls is None:
            return
        signature = island.signature
        for args, kwargs, result in zip(calls.args, calls.kwargs, calls.results, strict=True):
            traced = signature.bound(args, kwargs)
            if traced is not None and all(isinstance(arg, Tensor) for arg in traced):
                yield traced, result

    def _lone_sites(self, known: set[int]) -> list[Site]:
        """The convolutions that no island calls: nothing is fused with them."""
        return [
            Site(name, layer)
            for name, layer in self._layers.items()
            if isinstance(layer, nn.Conv2d) and id(layer) not in known
        ]

    # ---- What both forms compute ----------------------------------------------------------------

    def _leave_what_differs(self, plans: dict[Island, list[Site]]) -> None:
        """Drops the islands whose generated forward computes something else than their own."""
        for number, island in enumerate(list(plans)):
            self._progress.at("comparing parts of the model", number, len(self._islands))
            problem = self._problem_of(island, plans[island])
            if problem is not None:
                self._notes.append(f"{island.name or 'the model'} is not fused: {problem}")
                self._reasons |= {site.name: f"not fused: {problem}" for site in plans[island]}
                del plans[island]

    def _problem_of(self, island: Island, sites: list[Site]) -> str | None:
        """What is wrong with an island's generated forward, with nothing skipped; or None."""
        traced = {island.module, *island.entered.values()}
        changed = next((place.name for place in self._changed if place.owner in traced), None)
        if changed is not None:
            return f"a call changes {changed}"
        engines = {site.name: self._engine_to_compare(site) for site in sites}
        with in_eval_mode(self._model), torch.no_grad():
            plan = Plan(island, sites, engines)
            try:
                if not plan.fused:
                    generate(plan)  # as other engines may need it
                    return None
                fused = fused_for(plan)
            except SyntaxError as error:  # an attribute is called as a keyword is
                return f"no code can be generated ({_first_line(error)})"
            calls = list(self._plain_calls(island))
            if self._example is None:
                self._note_guess(island)
                with in_eval_mode(island.module):  # random numbers are drawn once more below
                    calls = _made_up_calls(island)
                if not calls:
                    name = island.name or "the model"
                    self._notes.append(f"{name} was not compared: no example_input was given")
            elif not calls:
                was_called = bool(self._calls[island.module].args)
                with_what = "with tensors alone " if was_called else ""
                return f"it was not called {with_what}on the example input"
            for args, expected in calls:
                try:
                    found = fused.run(copied(args))
                except Exception as error:  # any fault of the generated code
                    return f"it cannot run ({_first_line(error)})"
                problem = difference(expected, found)
                run = functools.partial(_own_result, island)
                if problem is not None and not _is_rounding(
                    island.module, run, args, expected, found
                ):
                    return problem
        return None

    def _note_guess(self, island: Island) -> None:
        """Says which calls a part is fused for, where nothing tells how it is called."""
        if island.signature.is_guessed and island.signature.traced:
            self._notes.append(
                f"{island.name or 'the model'} is fused for calls that give "
                f"{island.signature.traced[0]} alone: all arguments have defaults, and no "
                "example_input tells which are given"
            )

    def _problem_of_all(self, plans: Mapping[Island, list[Site]], sites: list[Site]) -> str | None:
        """What is wrong with the whole model on the example, with nothing skipped; or None."""
        if self._example is None or any(isinstance(site.conv, SpAMMConv2d) for site in sites):
            return None
        engines = {
            site.name: LEFT if reason_not_to_convert(site.conv) else self._engine_to_compare(site)
            for site in sites
        }
        installation = Installation(plans, sites, engines)
        example, expected = self._example, self._calls[self._model].results
        with in_eval_mode(self._model), torch.no_grad():
            try:
                with installation.attached():
                    found = [example.call(self._model) for _ in expected]
            except Exception as error:  # of code that meets another result or class
                return f"it cannot run ({_first_line(error)})"
            has_own_way = difference(expected[0], expected[-1]) is not None  # draws numbers, say
            for pair in zip(expected, found, strict=True):
                problem = other_form(*pair) if has_own_way else difference(*pair)
                if problem is not None and not _is_rounding(
                    self._model, _call_of_model, (example.args, example.kwargs), *pair
                ):
                    return problem
        return None

    def _engine_to_compare(self, site: Site) -> Engine:
        setting = self._own_setting(site) or self._request.setting_of(layer_of(site.name))
        can_be_spamm = setting is not None and not setting.skips_nothing
        return Engine("spamm", NOTHING_SKIPPED) if can_be_spamm else DENSE

    # ---- Which engine each gets -----------------------------------------------------------------

    @staticmethod
    def _own_setting(site: Site) -> SpAMMConfig | None:
        """The setting of a convolution that was a SpAMMConv2d before."""
        if not isinstance(site.conv, SpAMMConv2d):
            return None
        conv, tau = site.conv, site.conv.tau
        if isinstance(tau, Tensor):
            return None
        blocks: Any = (conv.block, conv.pixel_block)
        return SpAMMConfig(tau, conv.valid_ratio, conv.max_error, *blocks)

    @property
    def _is_measured(self) -> bool:
        return self._example is not None and not self._request.engines

    def _choose(self) -> dict[str, Choice]:
        choices = {site.name: self._given(site) or self._predicted(site) for site in self._sites}
        if not self._is_measured:
            return choices
        free = {
            site.name: self._candidates(site, self._request.setting_of(layer_of(site.name)))
            for site in self._sites
            if self._given(site) is None and reason_not_to_call(site.conv) is None
        }
        for site in self._sites:
            if len(free.get(site.name, ())) == 1:
                setting = self._request.setting_of(layer_of(site.name))
                choices[site.name] = without_choice(site.conv, setting)
                del free[site.name]
        for name, times in self._times_in_place(choices, free).items():
            if "dense" in times:
                choices[name] = fastest(free[name], times)
        return choices

    def _candidates(self, site: Site, setting: SpAMMConfig | None) -> dict[str, Engine]:
        return candidates(site, setting)

    def _predicted(self, site: Site) -> Choice:
        return predict(site.conv, self._request.setting_of(layer_of(site.name)))

    def _times_in_place(
        self, choices: Mapping[str, Choice], free: Mapping[str, Mapping[str, Engine]]
    ) -> dict[str, dict[str, Timing]]:
        """The times of candidates in the running model, from a call to the next convolution's.

        In each round the model runs once with every call's first candidate, once with the second,
        and so on: operands lie where the layer before left them, and the times add up to the
        model's.
        """
        if not free:
            return {}
        forms = []
        for place in range(max(map(len, free.values()))):
            engines = {name: choice.engine for name, choice in choices.items()}
            for name, found in free.items():
                engines[name] = [*found.values()][min(place, len(found) - 1)]
            forms.append(self._installation(engines))
        self._progress.at(f"measuring layers in the model, in {len(forms)} forms")

        def run(form: Installation, mark: Mark) -> None:
            assert self._example is not None
            with form.marked(mark):
                self._example.call(self._model)
                mark("")

        with in_eval_mode(self._model), torch.no_grad():
            calls = [functools.partial(run, form) for form in forms]
            times = times_of_parts(calls, self._device, [form.attached for form in forms])
        return {
            name: {
                engine: of_form[name]
                for engine, of_form in zip(engines, times, strict=False)
                if name in of_form
            }
            for name, engines in free.items()
        }

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _installation(self, engines: Mapping[str, Engine]) -> Installation:
        """The model with these engines; each is prepared once."""
        key = tuple(engines[site.name] for site in self._sites)
        if key not in self._installations:
            self._installations[key] = Installation(self._plans, self._sites, engines)
        return self._installations[key]

    def _given(self, site: Site) -> Choice | None:
        """The engine of a call that is not to be chosen; None where it is."""
        request, layer = self._request, layer_of(site.name)
        if self._problem is not None:
            return Choice(LEFT, f"not converted: {self._problem}")
        if (reason := reason_not_to_convert(site.conv)) is not None:
            return Choice(LEFT, reason)
        if isinstance(site.conv, SpAMMConv2d) and isinstance(site.conv.tau, Tensor):
            return Choice(LEFT, "skips by its own setting, a tensor")
        if site.name in request.engines:
            return Choice(request.engines[site.name], "settings file")
        own = self._own_setting(site)
        if own is not None and layer not in request.overrides:
            return Choice(Engine("spamm", own), "skips by its own setting")
        setting = request.setting_of(layer)
        if layer in request.named and setting is not None:
            return asked(setting)
        return None

    def _is_asked_for(self, site: Site) -> bool:
        """Whether the engine is the user's own choice, which no measurement overrules."""
        layer = layer_of(site.name)
        return isinstance(site.conv, SpAMMConv2d) or (
            layer in self._request.named and self._request.overrides[layer] is not None
        )

    # ---- The whole model ------------------------------------------------------------------------

    def _fastest(self, chosen: Installation) -> Installation:
        """The fastest of the model as it was, all dense, as chosen layer by layer, and with
        all that may skip; measured on the example. One that is not clearly faster than those before
        it is not taken, nor any that is slower than the model as it was.
        """
        example = self._example
        if example is None or not self._is_measured or not chosen.changes_anything:
            return chosen
        asked_for = [site.name for site in self._sites if self._is_asked_for(site)]
        given = {name: chosen.engines[name] for name in asked_for}
        no_spamm = {
            name: engine if engine.kind == "dense" else DENSE
            for name, engine in chosen.engines.items()
        }
        dense = self._installation({**no_spamm, **given})
        plan, spamm = self._unmeasured()
        variants = {
            "original": Installation({}, [], {}),
            "all dense, fused": dense,
            "chosen": chosen,
            plan: self._installation({**spamm, **given}),
        }
        for name, same in (("chosen", dense), (plan, dense), (plan, chosen)):
            if variants.get(name) is same:
                del variants[name]
        self._progress.at(f"measuring the model in {len(variants)} forms")
        with in_eval_mode(self._model), torch.no_grad():
            calls = [lambda: example.call(self._model)] * len(variants)
            around = [variant.attached for variant in variants.values()]
            found = times_of(calls, self._device, around)
        times = dict(zip(variants, found, strict=True))
        shown = ", ".join(f"{name} {time}" for name, time in times.items())
        self._notes.append(f"whole model, measured: {shown}")
        if not all(time.is_steady for time in found):
            spread = max(time.spread for time in found)
            self._notes.append(f"times vary by {spread:.2g}x here: other programs run")
        best = "all dense, fused"
        for name in list(variants)[2:]:
            if times[name].beats(times[best], least=1.0):
                best = name
        if not asked_for and times[best].median > times["original"].median:
            best = "original"
        return variants[best]

    def _unmeasured(self) -> tuple[str, dict[str, Engine]]:
        """A plan that no measurement of single layers led to, and its name: every convolution that
        may be one as SpAMM, by its setting where it can skip; with the pool behind it, unless that
        was measured slower.
        """
        engines = {}
        for site in self._sites:
            if site.conv.groups > 1:
                engines[site.name] = self._choices[site.name].engine
                continue
            found = candidates(site, self._request.setting_of(layer_of(site.name)))
            pooling = found.pop("spamm, pool", None)
            *_, (name, last) = found.items()
            times = {name: time.median for name, time in self._choices[site.name].times}
            if pooling and times.get("spamm, pool", 0.0) <= times.get(name, math.inf):
                last = with_pool(last, site)
            left = reason_not_to_convert(site.conv) is not None
            engines[site.name] = LEFT if left else last
        return "all spamm", engines

    # ---- The report -----------------------------------------------------------------------------

    def _report(
        self, sites: list[Site], choices: Mapping[str, Choice], installation: Installation
    ) -> ConvertReport:
        by_layer: dict[str, list[Site]] = {}
        for site in sites:
            by_layer.setdefault(layer_of(site.name), []).append(site)
        rows: list[Row] = []
        for name, layer in self._layers.items():
            found = by_layer.get(name)
            if _is_plain_linear(layer):
                continue
            if found is None:
                rows.append(Row(name, shape_of(layer), "left", reason=_reason_to_leave(layer)))
            for site in found or []:
                rows.append(self._row(site, choices[site.name], installation))
        linear = sum(map(_is_plain_linear, self._layers.values()))
        note = [f"linear layers, torch's own: {linear}"] if linear else []
        return ConvertReport(rows, [*note, *self._notes], _device_name(self._model))

    def _row(self, site: Site, choice: Choice, installation: Installation) -> Row:
        engine = installation.engines.get(site.name, LEFT)
        is_fused = site.name in installation.fused
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


class Installation:
    """One way in which a model may be converted: the engines of its calls, put in place or not."""

    def __init__(
        self,
        plans: Mapping[Island, list[Site]],
        sites: list[Site],
        engines: Mapping[str, Engine],
    ) -> None:
        self.engines = engines
        in_islands = [
            Plan(island, found, {site.name: engines[site.name] for site in found})
            for island, found in plans.items()
        ]
        self.fused = {site.name for plan in in_islands for site in plan.fused}
        self._fused: list[Fused] = []
        self._names: list[list[str]] = []  # of the sites of each forward
        for plan in in_islands:
            if plan.fused:
                self._fused.append(fused_for(plan))
                self._names.append([site.name for site in plan.fused])
        # Calls that no generated forward makes, of convolutions that none watches for hooks.
        self._called: dict[nn.Conv2d, list[str]] = {}
        self._leaves: dict[nn.Conv2d, tuple[SpAMMConfig, Band | None]] = {}
        in_reference_form = {
            site.name
            for plan in in_islands
            for site in plan.sites
            if plan.island.reference is not None
        }
        names = self.fused | in_reference_form
        with_proofs = {site.conv for site in sites if site.name in names}
        for site in sites:
            engine = engines[site.name]
            if site.conv not in with_proofs:
                self._called.setdefault(site.conv, []).append(site.name)
            # In the reference form deviations skip, not what the layer itself gets.
            if engine.setting is not None and site.name not in in_reference_form:
                self._leaves.setdefault(site.conv, (engine.setting, engine.band))

    @property
    def changes_anything(self) -> bool:
        return bool(self._fused or self._leaves)

    def attach(self) -> None:
        for conv, (setting, band) in self._leaves.items():
            convert_leaf(conv, setting, band)
        for fused in self._fused:
            attach(fused)

    def detach(self) -> None:
        for fused in self._fused:
            detach(fused.root)
        for conv in self._leaves:
            revert_leaf(conv)

    @contextmanager
    def attached(self) -> Iterator[None]:
        self.attach()
        try:
            yield
        finally:
            self.detach()

    @contextmanager
    def marked(self, mark: Mark) -> Iterator[None]:
        """Has ``mark`` called with a call's name before each call of a convolution."""
        handles = []
        for conv, names in self._called.items():
            following = itertools.cycle(names)
            handles.append(
                conv.register_forward_pre_hook(lambda *_, names=following: mark(next(names)))
            )
        try:
            for fused, names in zip(self._fused, self._names, strict=True):
                fused.watch_operands(names, mark)
            yield
        finally:
            for fused in self._fused:
                fused.operands = list(fused.operands)
            for handle in handles:
                handle.remove()


def _made_up_calls(island: Island) -> list[tuple[tuple[Tensor, ...], Any]]:
    """A call with made-up images, and its result; none where the island cannot take any."""
    for image in small_images(island):
        try:  # two calls in a row, as a model that counts them gives other results
            own = [_own_result(island, island.module, (image.clone(),)) for _ in range(2)]
            return [((image,), result) for result in own]
        except Exception:  # it takes images of another size
            continue
    return []


def _own_result(island: Island, module: nn.Module, args: tuple[Any, ...]) -> Any:
    """The result of an island's own forward, of its module or of a copy of that."""
    positional, keywords = island.signature.arguments(tuple(args))
    return type(island.module).forward(module, *positional, **keywords)


def _call_of_model(model: nn.Module, given: tuple[Any, Any]) -> Any:
    return model(*given[0], **given[1])


def fuse_again(
    root: nn.Module,
    recipe: Recipe,
    reference: tuple[Tensor, ...] | None,
    form: tuple[tuple[str, ...], dict[str, Any]],
) -> None:
    """Gives a module, whose convolutions are as they were, the forward that it had.

    Args:
        root: the module of an island.
        recipe: what each call of a convolution was, by names below the root.
        reference: the root's arguments for a reference picture, if it had the reference form.
        form: the form of the calls that it took.
    """

    def added_before(name: str, *_: Any) -> bool:
        return name in recipe and "add" in recipe[name][1]

    engines = {name: engine for name, (engine, _) in recipe.items()}
    plans = []
    with in_eval_mode(root):
        forms = {root: Signature(type(root).forward, *form)}
        for island in capture(root, forms).islands:
            island.reference = reference if island.module is root else None
            sites = [site for site in find_sites(island, added_before) if site.name in recipe]
            plans.append(Plan(island, sites, engines))
    for plan in plans:
        if plan.fused:
            attach(fused_for(plan))


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}"


def _is_rounding(
    module: nn.Module,
    run: Callable[[nn.Module, Any], Any],
    given: Any,
    expected: Any,
    found: Any,
) -> bool:
    """Whether the module itself, in a wider type, differs as much from its result.

    Only numbers are rounded: another structure, shape or type is none.
    """
    if other_form(expected, found) is not None:
        return False
    wider = torch.float64 if _has_dtype(given, torch.float32) else torch.float32
    widened = tree_map(lambda x: x.to(wider) if _is_floating(x) else x, given)
    try:
        return is_rounding(expected, found, run(copy.deepcopy(module).to(wider), widened))
    except Exception:  # it may know one dtype alone, or not fit into memory a second time
        return False


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _has_dtype(args: Any, dtype: torch.dtype) -> bool:
    return any(_is_floating(value) and value.dtype == dtype for value in tree_leaves(args))


def layer_of(call: str) -> str:
    """The name of the layer in a call's name."""
    return call.partition("#")[0]


def _is_plain_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and not isinstance(layer, _SpAMM)


def _reason_to_leave(layer: nn.Module) -> str:
    if isinstance(layer, _SpAMM):
        return "skips by its own setting"
    return f"{type(layer).__name__}: only nn.Conv2d is converted"


def _device_name(model: nn.Module) -> str:
    device = next(model.parameters()).device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
