"""What is found about one cell: figures, or why there are none."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    layout: str  # a key of LAYOUTS
    data: str
    precision: str
    n: int
    ratio: float  # asked for
    valid_ratio: float | None = None
    one_ms: float | None = None  # one device
    all_ms: float | None = None  # all of them
    spread: float | None = None  # of all_ms, quartile distance over median
    speedup: float | None = None
    equal: bool | None = None  # bit for bit with one device
    sent: float | None = None  # bytes of B that travel, over those without skipping
    work_imbalance: float | None = None  # the largest part's work over the mean
    device_ms: list | None = None  # of each device for its part, B being there
    imbalance: float | None = None  # their largest over their mean
    exposed_ms: float | None = None  # all_ms less the slowest device's time
    of_bound: float | None = None  # time to bring the operands from the host, over all_ms
    search_ms: float | None = None  # of the threshold, from norm maps on one device
    absent: str | None = None  # why there are no figures


@dataclass(frozen=True)
class PeerRow:
    peer: str  # a value of PEERS
    data: str
    precision: str
    n: int
    ms: float | None = None
    spread: float | None = None
    absent: str | None = None


@dataclass(frozen=True)
class Overhead:
    layout: str
    n: int
    one_us: float | None = None  # until mm on one device returns to Python
    all_us: float | None = None
    absent: str | None = None
