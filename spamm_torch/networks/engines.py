"""The engine of each call of a convolution: measured where an example is at hand, else by a table.

Candidates are "dense", "spamm" with nothing skipped and with the layer's setting, "spamm, pool"
with the max pool that follows, and of grouped convolutions "dense" or, all groups in one product,
"groups joined".
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._output import Progress
from .._timing import Mark, Timing, times_of, times_of_parts
from ..nn import SpAMMConv2d
from .config import DENSE, LEFT, NOTHING_SKIPPED, Engine, SpAMMConfig
from .example import Example
from .operands import joined_setting
from .plan import Site
from .request import Request
from .sites import layer_of, reason_not_to_call, reason_not_to_convert, reason_not_to_skip

if TYPE_CHECKING:
    from .install import Installation


# A model is not measured whose layers' times add up to so many times those of the fastest engines.
_HOPELESS = 1.1


@dataclass(frozen=True)
class Choice:
    """An engine, why it was chosen, and the times of the candidates by name."""

    engine: Engine
    reason: str
    times: tuple[tuple[str, Timing], ...] = ()


def own_setting(site: Site) -> SpAMMConfig | None:
    """The setting of a convolution that was a SpAMMConv2d before."""
    conv = site.conv
    if not isinstance(conv, SpAMMConv2d) or isinstance(conv.tau, Tensor):
        return None
    blocks: Any = (conv.block, conv.pixel_block)
    return SpAMMConfig(conv.tau, conv.valid_ratio, conv.max_error, *blocks)


@dataclass
class Chooser:
    """Chooses each call's engine, by name in ``choices``; where there is a ``problem``, none."""

    model: nn.Module
    request: Request
    example: Example | None
    installation: "Installation"
    problem: str | None
    progress: Progress
    choices: dict[str, Choice] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Of the model as it was: forms that are measured have layers of other classes.
        self._sites = self.installation.sites
        self._given = {site.name: self._given_for(site) for site in self._sites}
        overrides = self.request.overrides
        named = {name for name in self.request.named if overrides[name] is not None}
        self._asked_for = [  # by the user, whom no measurement overrules
            site.name
            for site in self._sites
            if isinstance(site.conv, SpAMMConv2d) or layer_of(site.name) in named
        ]
        self._device = next(self.model.parameters()).device

    def choose(self) -> dict[str, Engine]:
        """The engines of all calls, in eval mode; the model stays in the last form measured."""
        self.choices = {s.name: self._given[s.name] or self._predicted(s) for s in self._sites}
        if self.example is None or self.request.engines:
            return self._chosen()
        with torch.no_grad():
            self._choose_by_times(self.example)
            return self._fastest(self.example)

    def _chosen(self) -> dict[str, Engine]:
        return {name: choice.engine for name, choice in self.choices.items()}

    def _setting(self, site: Site) -> SpAMMConfig | None:
        return self.request.setting_of(layer_of(site.name))

    def _given_for(self, site: Site) -> Choice | None:
        """The engine of a call that is not to be chosen; None where it is."""
        request, layer = self.request, layer_of(site.name)
        if self.problem is not None:
            return Choice(LEFT, f"not converted: {self.problem}")
        if (reason := reason_not_to_convert(site.conv)) is not None:
            return Choice(LEFT, reason)
        if isinstance(site.conv, SpAMMConv2d) and isinstance(site.conv.tau, Tensor):
            return Choice(LEFT, "skips by its own setting, a tensor")
        if site.name in request.engines:
            return Choice(request.engines[site.name], "settings file")
        own = own_setting(site)
        if own is not None and layer not in request.overrides:
            return Choice(Engine("spamm", own), "skips by its own setting")
        setting = request.setting_of(layer)
        if layer in request.named and setting is not None:
            return Choice(Engine("spamm", setting), "override")
        return None

    def _candidates(self, site: Site) -> dict[str, Engine]:
        return candidates(site, self._setting(site))

    def _predicted(self, site: Site) -> Choice:
        return predict(site.conv, self._setting(site))

    def _choose_by_times(self, example: Example) -> None:
        """Chooses for the calls that have several candidates."""
        free: dict[str, dict[str, Engine]] = {}
        for site in self._sites:
            if self._given[site.name] is None and reason_not_to_call(site.conv) is None:
                found = self._candidates(site)
                if len(found) > 1:
                    free[site.name] = found
                else:
                    self.choices[site.name] = without_choice(site.conv, self._setting(site))
        for name, times in self._times_in_place(example, free).items():
            if "dense" in times:
                self.choices[name] = fastest(free[name], times)

    def _times_in_place(
        self, example: Example, free: Mapping[str, Mapping[str, Engine]]
    ) -> dict[str, dict[str, Timing]]:
        """The times of candidates in the running model: first ones in a form, second ones, ..."""
        if not free:
            return {}
        forms = []
        for place in range(max(map(len, free.values()))):
            of_free = {name: [*of][min(place, len(of) - 1)] for name, of in free.items()}
            forms.append(self._chosen() | {n: free[n][engine] for n, engine in of_free.items()})
        self.progress.at(f"measuring layers in the model, in {len(forms)} forms")

        def run(mark: Mark) -> None:
            with self.installation.marked(mark):
                example.call(self.model)
                mark("")

        before = [functools.partial(self.installation.try_out, form) for form in forms]
        times = times_of_parts([run] * len(forms), self._device, before)
        return {
            name: {
                engine: of_form[name]
                for engine, of_form in zip(engines, times, strict=False)
                if name in of_form
            }
            for name, engines in free.items()
        }

    def _fastest(self, example: Example) -> dict[str, Engine]:
        """The engines of the fastest of these: the model as it was, all dense, as chosen layer by
        layer, and with all that may skip. One that is not clearly faster than those before it is
        not taken, nor any that is slower than the model as it was.
        """
        chosen = self._chosen()
        self.installation.try_out(chosen)
        if not self.installation.changes_anything:
            return chosen
        given = {name: chosen[name] for name in self._asked_for}
        dense = {n: engine if engine.kind == "dense" else DENSE for n, engine in chosen.items()}
        forms: dict[str, dict[str, Engine]] = {"original": dict.fromkeys(chosen, LEFT)}
        found_by_layers = {"all dense, fused": dense, "chosen": chosen}
        for name, form in (found_by_layers | self._unmeasured()).items():
            if (engines := form | given) not in forms.values():
                forms[name] = engines
        self.progress.at(f"measuring the model in {len(forms)} forms")
        calls = [lambda: example.call(self.model)] * len(forms)
        before = [functools.partial(self.installation.try_out, form) for form in forms.values()]
        found = times_of(calls, self._device, before, is_warm=True)
        times = dict(zip(forms, found, strict=True))
        shown = ", ".join(f"{name} {time}" for name, time in times.items())
        self.notes.append(f"whole model, measured: {shown}")
        if not all(time.is_steady for time in found):
            spread = max(time.spread for time in found)
            self.notes.append(f"times vary by {spread:.2g}x here: other programs run")
        best = "all dense, fused"
        for name in list(forms)[2:]:
            if times[name].beats(times[best], least=1.0):
                best = name
        if not given and times[best].median > times["original"].median:
            best = "original"
        return forms[best]

    def _unmeasured(self) -> dict[str, dict[str, Engine]]:
        """Engines that no measurement of single layers led to: every convolution that may be one as
        SpAMM, with the pool behind it unless that was measured slower. None where layers take so
        much longer that the model must, too.
        """
        engines, own, least = {}, 0.0, 0.0
        for site in self._sites:
            choice = self.choices[site.name]
            if site.conv.groups > 1:
                engines[site.name] = choice.engine
                continue
            found = candidates(site, self._setting(site))
            pooling = found.pop("spamm, pool", None)
            *_, (name, last) = found.items()
            times = {name: time.median for name, time in choice.times}
            if pooling and times.get("spamm, pool", 0.0) <= times.get(name, math.inf):
                name, last = "spamm, pool", with_pool(last, site)
            own += times.get(name, 0.0)
            least += min(times.values(), default=0.0)
            left = reason_not_to_convert(site.conv) is not None
            engines[site.name] = LEFT if left else last
        return {"all spamm": engines} if own <= _HOPELESS * least else {}


def candidates(site: Site, setting: SpAMMConfig | None) -> dict[str, Engine]:
    """The engines that this call of a convolution may get, by name; dense is the first."""
    found = {"dense": DENSE}
    if setting is None:
        return found
    if site.conv.groups > 1:
        images = site.input_shape[0] if site.input_shape else 0
        if (joined := joined_setting(site.conv, images)) is not None:
            found["groups joined"] = replace(DENSE, joined=joined)
        return found
    found["spamm"] = Engine("spamm", setting if setting.skips_nothing else NOTHING_SKIPPED)
    if not setting.skips_nothing and reason_not_to_skip(site.conv) is None:
        found[f"spamm at {setting}"] = Engine("spamm", setting)
    if (pooling := with_pool(found["spamm"], site)) != found["spamm"]:
        found["spamm, pool"] = pooling
    return found


def with_pool(engine: Engine, site: Site) -> Engine:
    """The engine, computing the max pool behind the site, too, where it can."""
    can_pool = site.pool is not None and engine.setting == NOTHING_SKIPPED
    return replace(engine, pools=True) if can_pool else engine


def fastest(engines: Mapping[str, Engine], times: Mapping[str, Timing]) -> Choice:
    """The engine that is clearly faster than all before it, by times in the running network."""
    name = "dense"
    for other, time in times.items():
        if time.beats(times[name]):
            name = other
    least = min(times, key=lambda other: times[other].median)
    reason = "measured: fastest" if least == name else "measured: nothing is clearly faster"
    return Choice(engines[name], reason, tuple(times.items()))


# ---- From a table -------------------------------------------------------------------------------

# From so many channels on both sides the op conv2d is faster than cuDNN with nothing skipped, in
# float32 on Hopper: docs/results/convolutions.md.
_LEAST_CHANNELS = 64


def predict(conv: nn.Conv2d, setting: SpAMMConfig | None) -> Choice:
    """The engine for a convolution of which nothing is measured."""
    if setting is None or conv.groups > 1:
        return without_choice(conv, setting)
    if not setting.skips_nothing:
        if (reason := reason_not_to_skip(conv)) is not None:
            return Choice(DENSE, reason)
        return Choice(Engine("spamm", setting), "skips by its setting")
    least = min(conv.in_channels, conv.out_channels)
    weight = conv.weight
    is_hopper = weight.is_cuda and torch.cuda.get_device_capability(weight.device)[0] == 9
    if is_hopper and weight.dtype == torch.float32 and least >= _LEAST_CHANNELS:
        return Choice(Engine("spamm", setting), "table: faster than cuDNN on Hopper")
    return Choice(DENSE, "table: nothing is skipped")


def without_choice(conv: nn.Conv2d, setting: SpAMMConfig | None) -> Choice:
    """Dense, for a convolution that has no other candidate."""
    if setting is None:
        return Choice(DENSE, "override: dense")
    return Choice(DENSE, reason_not_to_skip(conv) or "grouped: dense is fastest")
