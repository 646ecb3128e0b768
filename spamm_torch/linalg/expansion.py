"""Recursive expansions of step functions: plain numbers, known before any product.

Steps are those of SP2, with the scaling and folding of E. H. Rubensson, "Nonmonotonic recursive
polynomial expansions for linear scaling calculation of the density matrix", J. Chem. Theory Comput.
7, 1233 (2011): X becomes ((1 - alpha) + alpha X)^2 or 1 - (1 - alpha X)^2, alpha from 1 to 2. A
Fermi function is a polynomial of the matrix in which some such steps have spread the states around
the chemical potential over [0, 1].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# In units of kT: where a Fermi function is within 1e-11 of 0 or 1, and how far the chemical
# potential may be from the middle of an expansion's window, which is wider by as much.
TAIL, REACH = 26.0, 12.0
_NARROW = 40.0  # kT that a polynomial takes without any step
ROOM = 3.0  # widths of a window on each side, so that steps from both ends meet in its middle
ZOOMED = 1 - 1e-4  # distance of the images of a window from which on a polynomial does the rest
BASE = 8  # polynomials up to this degree are kept, and those of its multiples
_DEGREES = (63, 95, 127, 159, 191)
_MOST_STEPS = 120
_NUMBERS: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}  # whatever torch's defaults


@dataclass
class Expansion:
    """Steps from a spectrum within [lowest, highest], turned over: its low end has 1.

    A matrix X is kept as V = X - shift * 1, for which each step is a V^2 + b V: one product.

    Attributes:
        window: two energies. Between them there is no state, or a Fermi function has its slope.
        separates: is there no state, so that X becomes a projector.
        steps: of each, does it square, and alpha.
        forms: of each, a and b.
        shifts: before and behind each.
        graph: the steps on CUDA, once they were taken there.
    """

    lowest: float
    highest: float
    window: tuple[float, float] = (math.nan, math.nan)
    separates: bool = True
    steps: list[tuple[bool, float]] = field(default_factory=list)
    forms: list[tuple[float, float]] = field(default_factory=list)
    shifts: list[float] = field(default_factory=lambda: [0.0])
    graph: Any = field(default=None, init=False, repr=False, compare=False)

    def start(self) -> tuple[float, float]:
        """Scale and shift from H to V."""
        width = self.highest - self.lowest
        return -1 / width, self.highest / width

    def append(self, squares: bool, alpha: float = 1.0) -> None:
        a, b, c = _form(squares, alpha)
        shift = self.shifts[-1]
        self.steps.append((squares, alpha))
        self.forms.append((a, 2 * a * shift + b))
        self.shifts.append((a * shift + b) * shift + c)

    def images(self, energy: Any) -> list[Any]:
        """The images of an energy, or of a tensor of some, before and behind each step."""
        scale, shift = self.start()
        images = [energy * scale + shift]
        for step in self.steps:
            a, b, c = _form(*step)
            images.append((a * images[-1] + b) * images[-1] + c)
        return images

    def energy(self, image: float, number: int) -> float:
        """The energy with this image behind so many steps, where all of them rise."""
        for squares, alpha in reversed(self.steps[:number]):
            if squares:
                image = (math.sqrt(max(image, 0.0)) - 1 + alpha) / alpha
            else:
                image = (1 - math.sqrt(max(1 - image, 0.0))) / alpha
        scale, shift = self.start()
        return (image - shift) / scale

    def gaps(self) -> list[float]:
        """Between the images of the window, before and behind each step."""
        low, high = (self.images(energy) for energy in self.window)
        return [x - y for x, y in zip(low, high, strict=True)]

    def serves(self, spectrum: tuple[float, float], window: tuple[float, float]) -> bool:
        """Tells whether its steps are right for another spectrum and window, too."""
        low, high = self.window
        within = self.lowest <= spectrum[0] and spectrum[1] <= self.highest
        return within and window[0] <= low < high <= window[1]


def _form(squares: bool, alpha: float) -> tuple[float, float, float]:
    if squares:
        return alpha**2, 2 * alpha * (1 - alpha), (1 - alpha) ** 2
    return -(alpha**2), 2 * alpha, 0.0


def expansion_for(
    spectrum: tuple[float, float], window: tuple[float, float], tolerance: float | None = None
) -> Expansion:
    """Steps until the window's images are 1 and 0, but for ``tolerance``; None: for a Fermi
    function.
    """
    expansion = Expansion(*spectrum, window, tolerance is not None)
    tolerance = 1 - ZOOMED if tolerance is None else tolerance
    high, low = (expansion.images(energy)[-1] for energy in window)
    while 1 - high + low > tolerance and len(expansion.steps) < _MOST_STEPS:
        choices = []
        # States beyond the window fold back, as far as the image of its own end.
        for squares, alpha in ((True, 2 / (2 - low)), (False, 2 / (1 + high))):
            a, b, c = _form(squares, alpha)
            images = [(a * x + b) * x + c for x in (high, low)]
            choices.append((abs(sum(images) - 1), squares, alpha, images))
        _, squares, alpha, (high, low) = min(choices)
        expansion.append(squares, alpha)
    return expansion


def edges(expansion: Expansion, residuals: Sequence[float], noise: float) -> tuple[float, float]:
    """Bounds of the highest occupied and the lowest empty state, which are near these.

    No eigenvalue x of X has x (1 - x) above tr(X - X^2), of which only these two states are left in
    the end (E. H. Rubensson, A. M. N. Niklasson, "Interior eigenvalues from density matrix
    expansions in quantum mechanical molecular dynamics", SIAM J. Sci. Comput. 36, B147 (2014)).
    ``residuals``: that trace before and behind each step.
    """
    homo = lumo = expansion.energy(0.5, len(expansion.steps))
    for number in reversed(range(len(residuals))):
        most = abs(residuals[number]) + noise
        if most < 0.25:
            away = 2 * most / (1 + math.sqrt(1 - 4 * most))
            low, high = (expansion.energy(x, number) for x in (1 - away, away))
            if low <= lumo and homo <= high:  # else it is another gap, as above a core's states
                homo, lumo = min(homo, low), max(lumo, high)
    return homo, lumo


def fermi_window(
    kt: float, spectrum: tuple[float, float], mu: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """The window of a Fermi function around ``mu``, behind a spectrum that holds it; of a narrow
    spectrum all.
    """
    if spectrum[1] - spectrum[0] < _NARROW * kt:
        return spectrum, spectrum
    width = (TAIL + REACH) * kt
    mu = min(max(mu, spectrum[0] - width), spectrum[1] + width)
    around = min(spectrum[0], mu - ROOM * width), max(spectrum[1], mu + ROOM * width)
    return around, (mu - width, mu + width)


class Fermi:
    """1 / (1 + exp((H - mu) / kT)) as a polynomial of T = 2 X - 1, X behind an expansion.

    Attributes:
        degree: of the polynomial: the least that serves.
        range: the chemical potentials that it serves.
    """

    def __init__(self, of: Expansion, kt: float, tolerance: float):
        (low, high), spectrum = of.window, (of.lowest, of.highest)
        self.kt = kt
        spread = (1 - torch.cos(torch.linspace(0, math.pi, 400, **_NUMBERS))) / 2
        even = torch.linspace(0, 1, 400, **_NUMBERS)
        energies = low + (high - low) * torch.cat((spread, even))
        parts = [(energies, of.images(energies)[-1])]
        self.range = (spectrum[0] - 100 * kt, spectrum[1] + 100 * kt)
        if low > spectrum[0]:  # states beyond the window have their images beyond its end's
            beyond = torch.linspace(of.images(low)[-1], 1, 20, **_NUMBERS)
            parts.append((torch.full_like(beyond, -math.inf), beyond))
            self.range = (low + TAIL * kt, self.range[1])
        if high < spectrum[1]:
            beyond = torch.linspace(0, of.images(high)[-1], 20, **_NUMBERS)
            parts.append((torch.full_like(beyond, math.inf), beyond))
            self.range = (self.range[0], high - TAIL * kt)
        self.energies, images = (torch.cat(x) for x in zip(*parts, strict=True))
        angle = torch.acos((2 * images - 1).clamp(-1, 1))[:, None]
        for degree in _DEGREES:
            self.degree = degree
            self.values = torch.cos(angle * torch.arange(degree + 1, device="cpu"))
            self.fit = torch.linalg.pinv(self.values, rtol=1e-14)
            if self.polynomial((low + high) / 2)[1] <= tolerance:
                break

    def __call__(self, mu: float) -> Tensor:
        return torch.special.expit((mu - self.energies) / self.kt)

    def polynomial(self, mu: float) -> tuple[list[float], float]:
        """Coefficients of Chebyshev's T_k, and the largest error."""
        coefficients = self.fit @ self(mu)
        error = (self.values @ coefficients - self(mu)).abs().max()
        return coefficients.tolist(), float(error)

    def electrons(self, moments: Tensor, mu: float) -> float:
        """The trace of the function, from those of all T_k."""
        return float(moments @ (self.fit @ self(mu)))

    def entropy(self, moments: Tensor, mu: float) -> float:
        f = self(mu)
        return float(moments @ (self.fit @ (torch.special.entr(f) + torch.special.entr(1 - f))))

    def potential(self, moments: Tensor, count: float) -> float:
        """The chemical potential of so many electrons; in a gap its middle."""
        ends = []
        for electrons in (count - 1e-9, count + 1e-9):
            low, high = self.range
            for _ in range(80):
                middle = (low + high) / 2
                if self.electrons(moments, middle) < electrons:
                    low = middle
                else:
                    high = middle
            ends.append(low)
        return sum(ends) / 2


def in_factors(coefficients: Sequence[float]) -> list[list[float]]:
    """b[j][i] with the sum of c_k T_k = that of T_(8 j) b[j][i] T_i, i < 8."""
    c, factors = list(coefficients), []
    for first in range(len(c) - BASE, 0, -BASE):
        factors.append([c[first], *(2 * x for x in c[first + 1 : first + BASE])])
        for i in range(1, BASE):
            c[first - i] -= c[first + i]
    return [c[:BASE], *reversed(factors)]
