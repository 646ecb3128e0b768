"""The steps of one conversion: capture, choose, compare, measure, install."""

from __future__ import annotations

import collections
import copy
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..nn import SpAMMConv2d, _SpAMM
from .capture import Island, capture
from .channel_groups import ChannelGroups, Order, find_groups, put_in_order
from .channel_order import orders_by_norms
from .config import NOTHING_SKIPPED, SpAMMConfig
from .engines import Choice, Measurements, asked, candidates, predict, with_pool
from .example import Calls, Example, copied, difference, is_rounding
from .fused import Recipe, attach, detach
from .generate import generate
from .leaves import (
    Band,
    convert_leaf,
    reason_not_to_convert,
    reason_not_to_skip,
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
from .state import in_eval_mode
from .timing import times_of


class Conversion:
    """Converts a model that is not converted. After an error it is the caller's to restore it."""

    def __init__(
        self,
        model: nn.Module,
        request: Request,
        example: Example | None,
        fuse: bool,
        reorder: bool = False,
    ) -> None:
        self._model, self._request, self._example = model, request, example
        self._reorder = reorder
        self._notes: list[str] = []
        self._reasons: dict[str, str] = {}  # why a call is not fused, by name
        self._layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, (nn.modules.conv._ConvNd, nn.Linear))
        }
        self._check_layers()
        self._islands = self._capture() if fuse else []
        self._calls: Mapping[nn.Module, Calls] = {}
        self._inputs: Mapping[nn.Module, list[Tensor]] = {}
        self._choices: Mapping[str, Choice] = {}
        self._plans: dict[Island, list[Site]] = {}
        self._sites: list[Site] = []

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
        self._calls, self._inputs = {}, {}
        return self._install()

    def _prepare(self) -> None:
        """Finds what can be converted, whichever engines it gets."""
        if self._example is not None:
            roots = [island.module for island in self._islands]
            self._calls, self._inputs = self._example.record(self._model, roots)
        plans = {island: self._sites_of(island) for island in self._islands}
        if self._reorder or self._request.orders:
            self._order_channels(plans)
        self._leave_what_differs(plans)
        sites = [site for found in plans.values() for site in found]
        sites += self._lone_sites({id(site.conv) for site in sites})
        self._plans, self._sites = plans, sites

    def _install(self) -> ConvertReport:
        plans, sites = self._plans, self._sites
        choices = self._choices = self._choose(sites)
        engines = {name: choice.engine for name, choice in choices.items()}
        installation = Installation(plans, sites, engines)
        fastest = self._fastest(plans, sites, installation)
        fastest.attach()
        report = self._report(sites, choices, fastest)
        if all(row.action == "left" for row in report):
            if self._request.asks_to_skip and not installation.changes_anything:
                raise ValueError(self._nothing(report))
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
        with in_eval_mode(self._model):
            captured = capture(self._model)
        for name, problem in captured.problems.items():
            kind = type(self._model.get_submodule(name)).__name__
            if kind not in ("ModuleList", "ModuleDict"):
                self._notes.append(f"{name or 'the model'} ({kind}) {problem}")
        return captured.islands

    def _sites_of(self, island: Island) -> list[Site]:
        with in_eval_mode(self._model):
            measured = [shapes_of(island, copied(args)) for args, _ in self._plain_calls(island)]
            return find_sites(island, alike_by_shapes(measured, likely_shapes(island)))

    def _plain_calls(self, island: Island) -> Iterator[tuple[tuple[Tensor, ...], Any]]:
        """Arguments and results of the recorded calls that the generated forward could serve."""
        calls = self._calls.get(island.module)
        if calls is None:
            return
        signature = Signature(type(island.module).forward)
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

    def _order_channels(self, plans: Mapping[Island, list[Site]]) -> None:
        """Puts the channels that layers compute or read who skip in the order of their norms."""
        ordered = 0
        for island, sites in plans.items():
            free = [site for site in sites if not self._is_left(site)]
            groups = find_groups(island, free)
            put_in_order(island, groups, self._request.orders or self._orders(groups, free))
            ordered += sum(site.is_ordered for site in sites)
        count = sum(map(len, plans.values()))
        self._notes.append(f"channels in the order of their norms: {ordered} of {count} layers")

    def _orders(self, groups: ChannelGroups, sites: list[Site]) -> Mapping[str, Order]:
        skipping = {site.name for site in sites if self._skips(site)}
        return orders_by_norms(groups, skipping, self._inputs_of(sites))

    def _is_left(self, site: Site) -> bool:
        """Whether the model's own forward computes the site whatever is measured."""
        conv = site.conv
        own_tensor = isinstance(conv, SpAMMConv2d) and isinstance(conv.tau, Tensor)
        left = self._request.engines.get(site.name) == LEFT
        return left or own_tensor or reason_not_to_convert(conv) is not None

    def _skips(self, site: Site) -> bool:
        """Whether the site's setting may skip anything."""
        engine = self._request.engines.get(site.name)
        setting = self._own_setting(site) or self._request.setting_of(layer_of(site.name))
        setting = setting if engine is None else engine.setting
        may_skip = setting is not None and not setting.skips_nothing
        return may_skip and reason_not_to_skip(site.conv) is None

    def _inputs_of(self, sites: Iterable[Site]) -> dict[str, Tensor]:
        """The recorded inputs of sites, by name."""
        calls = collections.Counter[int]()
        found = {}
        for site in sites:
            place = calls[id(site.conv)]
            calls[id(site.conv)] += 1
            inputs = self._inputs.get(site.conv, [])
            if place < len(inputs):
                found[site.name] = inputs[place]
        return found

    # ---- What both forms compute ----------------------------------------------------------------

    def _leave_what_differs(self, plans: dict[Island, list[Site]]) -> None:
        """Drops the islands whose generated forward computes something else than their own."""
        for island in list(plans):
            problem = self._problem_of(island, plans[island])
            if problem is not None:
                self._notes.append(f"{island.name or 'the model'} is not fused: {problem}")
                self._reasons |= {site.name: f"not fused: {problem}" for site in plans[island]}
                del plans[island]

    def _problem_of(self, island: Island, sites: list[Site]) -> str | None:
        """What is wrong with an island's generated forward, with nothing skipped; or None."""
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
                calls = _made_up_calls(island)
                if not calls:
                    name = island.name or "the model"
                    self._notes.append(f"{name} was not compared: no example_input was given")
            elif not calls:
                return "it was not called with tensors on the example input"
            for args, expected in calls:
                try:
                    found = fused.run(copied(args))
                except Exception as error:  # any fault of the generated code
                    return f"it cannot run ({_first_line(error)})"
                problem = difference(expected, found)
                if problem is not None and not _is_rounding(island, args, expected, found):
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

    def _measurements(self) -> Measurements:
        return Measurements()

    def _choose(self, sites: list[Site]) -> dict[str, Choice]:
        measurements, inputs = self._measurements(), self._inputs_of(sites)
        return {
            site.name: self._choice(site, measurements, inputs.get(site.name)) for site in sites
        }

    def _choice(self, site: Site, measurements: Measurements, input: Tensor | None) -> Choice:
        request, layer = self._request, layer_of(site.name)
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
        if input is not None and reason_not_to_call(site.conv) is None:
            return measurements.choose(site, setting, input)
        return predict(site.conv, setting)

    def _is_asked_for(self, site: Site) -> bool:
        """Whether the engine is the user's own choice, which no measurement overrules."""
        layer = layer_of(site.name)
        return isinstance(site.conv, SpAMMConv2d) or (
            layer in self._request.named and self._request.overrides[layer] is not None
        )

    # ---- The whole model ------------------------------------------------------------------------

    def _fastest(
        self, plans: Mapping[Island, list[Site]], sites: list[Site], chosen: Installation
    ) -> Installation:
        """The fastest of the model as it was, all dense, as chosen layer by layer, and with
        all that may skip; measured on the example.
        """
        if self._example is None or self._request.engines or not chosen.changes_anything:
            return chosen
        example = self._example
        asked_for = [site.name for site in sites if self._is_asked_for(site)]
        engines = dict.fromkeys(chosen.engines, DENSE)
        engines |= {name: chosen.engines[name] for name in asked_for}
        dense = Installation(plans, sites, engines)
        variants = {"original": Installation({}, [], {}), "all dense, fused": dense}
        if chosen.engines != dense.engines:
            variants["chosen"] = chosen
        # A layer alone finds its input in memory; in a small network it finds it in the L2 cache.
        plan, spamm = self._unmeasured(sites)
        spamm |= {name: chosen.engines[name] for name in asked_for}
        if spamm not in (chosen.engines, dense.engines):
            variants[plan] = Installation(plans, sites, spamm)
        device = next(self._model.parameters()).device

        def run(installation: Installation) -> None:
            with installation.attached():
                example.call(self._model)

        with in_eval_mode(self._model), torch.no_grad():
            calls = [functools.partial(run, variant) for variant in variants.values()]
            times = dict(zip(variants, times_of(calls, device), strict=True))
        shown = ", ".join(f"{name} {time:.0f} us" for name, time in times.items())
        self._notes.append(f"whole model, measured: {shown}")
        best = min(list(variants)[1:], key=lambda name: times[name])
        if not asked_for and times[best] > times["original"]:
            return variants["original"]
        return variants[best]

    def _unmeasured(self, sites: list[Site]) -> tuple[str, dict[str, Engine]]:
        """A plan that no measurement of single layers led to, and its name: every convolution that
        may be one as SpAMM, by its setting where it can skip; with the pool behind it, unless that
        was measured slower.
        """
        engines = {}
        for site in sites:
            found = candidates(site.conv, self._request.setting_of(layer_of(site.name)))
            *_, (name, last) = found.items()
            times = dict(self._choices[site.name].times)
            if times.get(f"{name}, pool", 0.0) <= times.get(name, math.inf):
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
            if found is None:
                rows.append(Row(name, shape_of(layer), "left", reason=_reason_to_leave(layer)))
            for site in found or []:
                rows.append(self._row(site, choices[site.name], installation))
        return ConvertReport(rows, self._notes, _device_name(self._model))

    def _row(self, site: Site, choice: Choice, installation: Installation) -> Row:
        engine = installation.engines.get(site.name, LEFT)
        is_fused = site.name in installation.fused
        action = engine.kind if engine.kind != "dense" or is_fused else "left"
        reason = choice.reason
        if engine != choice.engine:
            what = f"{engine.kind}, pool" if engine.pools else engine.kind
            reason += f"; the whole model is faster with {what}"
        if not is_fused:
            why = self._reasons.get(site.name)
            why = why or (None if site.node else reason_not_to_call(site.conv) or "not fused")
            reason = "; ".join(filter(None, (reason, why or "nothing to absorb")))
        absorbed = site.absorbed if is_fused else ()
        if is_fused and engine.pools and site.pool is not None:
            absorbed += ("pool",)
        order = site.output_order if is_fused else None
        return Row(
            *(site.name, shape_of(site.conv), action, absorbed, reason),
            *(engine.setting, choice.times, engine.band),
            None if order is None else tuple(order.tolist()),
        )

    def _nothing(self, report: ConvertReport) -> str:
        reasons = collections.Counter(row.reason for row in report)
        text = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(3))
        return (
            "convert_ expects a model in which something can be converted; got "
            f"{type(self._model).__name__}, of whose {len(report)} layers none can ({text})"
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
        self._fused = [fused_for(plan) for plan in in_islands if plan.fused]
        self._leaves: dict[nn.Conv2d, tuple[SpAMMConfig, Band | None]] = {}
        in_reference_form = {
            site.name
            for plan in in_islands
            for site in plan.sites
            if plan.island.reference is not None
        }
        for site in sites:
            engine = engines[site.name]
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


def _made_up_calls(island: Island) -> list[tuple[tuple[Tensor, ...], Any]]:
    """A call with made-up images, and its result; none where the island cannot take any."""
    for image in small_images(island):
        try:
            return [((image,), type(island.module).forward(island.module, image.clone()))]
        except Exception:  # it takes images of another size
            continue
    return []


def fuse_again(
    root: nn.Module,
    recipe: Recipe,
    reference: tuple[Tensor, ...] | None,
) -> None:
    """Gives a module, whose convolutions are as they were, the forward that it had.

    Args:
        root: the module of an island.
        recipe: what each call of a convolution was, by names below the root.
        reference: the root's arguments for a reference picture, if it had the reference form.
    """

    def added_before(name: str, *_: Any) -> bool:
        return name in recipe and "add" in recipe[name][1]

    engines = {name: engine for name, (engine, _, _) in recipe.items()}
    orders = {name: order for name, (_, _, order) in recipe.items() if order is not None}
    plans = []
    with in_eval_mode(root):
        for island in capture(root).islands:
            island.reference = reference if island.module is root else None
            sites = [site for site in find_sites(island, added_before) if site.name in recipe]
            if orders:
                free = [site for site in sites if engines[site.name] != LEFT]
                put_in_order(island, find_groups(island, free), orders)
            plans.append(Plan(island, sites, engines))
    for plan in plans:
        if plan.fused:
            attach(fused_for(plan))


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}"


def _is_rounding(island: Island, args: Any, expected: Any, found: Any) -> bool:
    """Whether the module itself, in a wider type, differs as much from its result."""
    wider = torch.float64 if _has_dtype(args, torch.float32) else torch.float32
    widened = tree_map(lambda x: x.to(wider) if _is_floating(x) else x, args)
    try:
        module = copy.deepcopy(island.module).to(wider)
        return is_rounding(expected, found, type(module).forward(module, *widened))
    except Exception:  # it may know one dtype alone, or not fit into memory a second time
        return False


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _has_dtype(args: Any, dtype: torch.dtype) -> bool:
    return any(_is_floating(value) and value.dtype == dtype for value in tree_leaves(args))


def layer_of(call: str) -> str:
    """The name of the layer in a call's name."""
    return call.partition("#")[0]


def _reason_to_leave(layer: nn.Module) -> str:
    if isinstance(layer, _SpAMM):
        return "skips by its own setting"
    if isinstance(layer, nn.Linear):
        return "a linear layer: torch's own"
    return f"{type(layer).__name__}: only nn.Conv2d is converted"


def _device_name(model: nn.Module) -> str:
    device = next(model.parameters()).device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
