"""What a product on several devices costs: a model, its fit to measurements, and its check.

    T = 2 s N^2 / (P W) + plan + max(compute, moved / beta) + moved / (beta S) + S alpha
    compute = gamma(v) N^3 / P * imbalance,    gamma(v) = gamma_0 + gamma_1 v
    moved = f s N^2 w,    w = 1 - 1/P in a line of devices

The first term reads the operands for their norms, the second plans. Then stages of B travel while
others are multiplied; the first stage waits for its bytes. One device launches in place of a plan.
Each data set has its gamma, since random entries draw more power than smooth ones, and scattered
block products share fewer loads. docs/scaling.md has every symbol.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

ITEM_BYTES = 2  # s, of float16
_STEPS = 200  # of the fit, at most
# As csrc/shards/plan.cpp cuts stages.
_MOST_STAGES, _LEAST_COLUMNS, _COLUMN_MULTIPLE = 16, 2048, 256


@dataclass(frozen=True)
class Machine:
    """What the model knows of a machine. Bytes and multiplications a millisecond."""

    bandwidth: float  # W: at which norms read operands
    beta: float  # at which a device receives
    plan_whole: float  # ms before the first multiply, B being everywhere
    plan_shards: float  # the same, B being in shards
    alpha: float  # ms a stage
    launch: float  # ms of one device's product that are no work
    # For each data set: ms for each multiplication of a product whose block products are all
    # skipped, and more for each that is not.
    gammas: tuple[tuple[str, float, float], ...]

    def one_ms(self, n, valid, data):
        """Milliseconds of a product on one device.

        Args:
            n: edge of the matrices. valid: valid ratio. data: the name of their data set.
        """
        norms = 2 * ITEM_BYTES * n**2 / self.bandwidth
        return norms + self.launch + self.multiply_ms(n, valid, data)

    def multiply_ms(self, n, valid, data):
        """Milliseconds of the multiply alone on one device."""
        gamma_0, gamma_1 = next(of[1:] for of in self.gammas if of[0] == data)
        return (gamma_0 + gamma_1 * valid) * n**3

    def all_ms(self, n, valid, data, parts, imbalance, moved_share):
        """Milliseconds on several devices.

        Args:
            parts: P. imbalance: the largest part's work over the mean.
            moved_share: f w, the share of B that each device receives; None if B is everywhere.
        """
        norms = 2 * ITEM_BYTES * n**2 / (parts * self.bandwidth)
        compute = self.multiply_ms(n, valid, data) / parts * imbalance
        if moved_share is None:
            return norms + self.plan_whole + compute
        stages, moved = stages_of(n), self.travel_ms(n, moved_share)
        wait = moved / stages + stages * self.alpha
        return norms + self.plan_shards + max(compute, moved) + wait

    def travel_ms(self, n, moved_share):
        """Milliseconds in which a device receives its share of B."""
        return moved_share * ITEM_BYTES * n**2 / self.beta


# Where the fit starts: a data-centre GPU of 2023, roughly. The last two are every data set's gamma.
_START = (4e9, 3e8, 0.03, 0.1, 0.01, 0.05), (2e-14, 2e-12)


def stages_of(n):
    """S, the number of stages of a product with n columns."""
    sixteenth = -(-n // (_MOST_STAGES * _COLUMN_MULTIPLE)) * _COLUMN_MULTIPLE
    return -(-n // max(sixteenth, _LEAST_COLUMNS))


@dataclass(frozen=True)
class Measured:
    """A product on several devices, as it was measured."""

    layout: str  # R: B everywhere; S: B in shards
    data: str
    n: int
    ratio: float  # asked for
    valid: float
    one_ms: float
    all_ms: float
    imbalance: float = 1.0
    sent: float | None = None  # f; None in layout R

    def predicted(self, machine, parts):
        """What the model says of ``all_ms``."""
        share = None if self.sent is None else self.sent * (1 - 1 / parts)
        return machine.all_ms(self.n, self.valid, self.data, parts, self.imbalance, share)


def measured(rows):
    """The Measured of all rows in the JSON file that the model speaks of: float16, in R and S.

    A row of R has the imbalance of that of S, for both are cut alike.
    """
    fitting = [
        row
        for row in rows
        if row["layout"] in ("R", "S") and row["precision"] == "float16" and row["absent"] is None
    ]
    place = lambda row: (row["data"], row["n"], row["ratio"])  # noqa: E731
    imbalances = {place(row): row["work_imbalance"] for row in fitting if row["layout"] == "S"}
    return [
        Measured(
            *(row["layout"], *place(row), row["valid_ratio"], row["one_ms"], row["all_ms"]),
            imbalance=imbalances.get(place(row), 1.0),
            sent=row["sent"],
        )
        for row in fitting
    ]


def fit(cells, parts):
    """The Machine that comes nearest to the times of some Measured, on one device and on all.

    Least squares of the relative misses, by the Levenberg-Marquardt method on the logarithms of the
    machine's numbers, which are all positive.
    """
    names = list(dict.fromkeys(cell.data for cell in cells))
    of_all, of_each = _START

    def machine_of(logarithms):
        numbers = np.exp(logarithms).tolist()
        gammas = numbers[len(of_all) :]
        pairs = zip(names, gammas[::2], gammas[1::2], strict=True)
        return Machine(*numbers[: len(of_all)], gammas=tuple(pairs))

    def misses(logarithms):
        machine = machine_of(logarithms)
        return np.array(
            [machine.one_ms(cell.n, cell.valid, cell.data) / cell.one_ms - 1 for cell in cells]
            + [cell.predicted(machine, parts) / cell.all_ms - 1 for cell in cells]
        )

    x, damping = np.log(of_all + of_each * len(names)), 1e-2
    found = misses(x)
    for _ in range(_STEPS):
        slopes = np.stack([misses(x + step) - found for step in 1e-6 * np.eye(len(x))], 1) / 1e-6
        normal = slopes.T @ slopes
        move = np.linalg.solve(normal + damping * np.eye(len(x)), -slopes.T @ found)
        tried = misses(x + np.clip(move, -1, 1))
        if tried @ tried < found @ found:
            x, found, damping = x + np.clip(move, -1, 1), tried, damping / 3
        else:
            damping *= 4
    return machine_of(x)


def check(cells, parts):
    """Fits the model to the smaller sizes, and predicts the largest.

    Sizes from a quarter of the largest on are fitted, for below that launches count.

    Returns:
        The Machine, and the Measured of the largest size.

    Raises:
        ValueError: there are less than two sizes to fit, or no row of S among them.
    """
    largest = max((cell.n for cell in cells), default=0)
    fitted = [cell for cell in cells if largest / 4 <= cell.n < largest]
    if len({cell.n for cell in fitted}) < 2 or all(cell.sent is None for cell in fitted):
        raise ValueError("expected rows in layouts R and S at three sizes, the largest predicted")
    return fit(fitted, parts), [cell for cell in cells if cell.n == largest]


# ---- More devices than were measured ------------------------------------------------------------

_HOST_DEVICES = 8  # that reach each other at the fitted beta
_NETWORK = 50e6  # bytes a millisecond and device between hosts: 400 Gbit/s
_ROUND_MS = 0.04  # a round of messages between processes; also a stage's, in place of alpha
_HISTOGRAM_ROUNDS = 3
_MATRICES_KEPT = 3  # A, B and C
_BUFFERS = 3  # of stages of B


@dataclass(frozen=True)
class Forecast:
    """One line of the table: a mesh of devices, a product that fills them, and its costs."""

    parts: int
    mesh: tuple
    n: int
    compute_ms: float
    travel_ms: float
    efficiency: float  # one device's time over P times theirs
    efficiency_dense: float  # the same if everything travels
    replicated_ms: float | None  # a threshold search of all products by every device
    histogram_ms: float | None  # a search by counting, shared out
    memory: float  # bytes a device


def mesh_of(parts):
    """(rows, columns), rows <= columns, as near to a square as a power of two allows."""
    rows = 2 ** (int(math.log2(parts)) // 2)
    return rows, parts // rows


def moved_share(mesh):
    """w: the share of a matrix that each device of a mesh receives, of A and of B together."""
    rows, columns = mesh
    return (1 - 1 / columns) / rows + (1 - 1 / rows) / columns


def forecast(machine, parts, *, n, valid, data, sent, imbalance=1.0, search=None):
    """The Forecast of a product on a mesh of devices, one process each.

    Args:
        n: edge of the matrices. valid: valid ratio. data: name of their data set. sent: f.
        search: (n, ms) of a measured threshold search, which takes time as n cubed.
    """
    mesh = mesh_of(parts)
    beta = machine.beta if parts <= _HOST_DEVICES else _NETWORK
    there = replace(machine, beta=beta, alpha=_ROUND_MS)
    share = moved_share(mesh)
    one_ms = machine.one_ms(n, valid, data)
    time_if = lambda f: there.all_ms(n, valid, data, parts, imbalance, f * share)  # noqa: E731
    replicated = None if search is None else search[1] * (n / search[0]) ** 3
    histogram = None if search is None else replicated / parts + _HISTOGRAM_ROUNDS * _ROUND_MS
    size = ITEM_BYTES * n**2
    rows, columns = mesh
    buffers = _BUFFERS * size / (columns * _MOST_STAGES)
    return Forecast(
        parts=parts,
        mesh=mesh,
        n=n,
        compute_ms=there.multiply_ms(n, valid, data) / parts * imbalance,
        travel_ms=there.travel_ms(n, sent * share),
        efficiency=one_ms / parts / time_if(sent),
        efficiency_dense=one_ms / parts / time_if(1.0),
        replicated_ms=replicated,
        histogram_ms=histogram,
        memory=_MATRICES_KEPT * size / parts + size / rows + buffers,
    )
