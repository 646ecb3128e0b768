"""What one candidate of a network, and all candidates of a layer, gave."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NetworkRow:
    network: str
    batch: int
    candidate: str
    ms: dict | None = None  # {mode: median}
    spread: dict | None = None  # {mode: quartile distance over median}
    error: float | None = None  # relative Frobenius error of the output, against float32
    prepare_s: float | None = None  # conversion and compilation
    actions: dict | None = None  # {what convert_ did: number of layers}
    absent: str | None = None  # why there are no figures


@dataclass(frozen=True)
class LayerRow:
    layer: str
    batch: int
    ms: dict  # {candidate: median}
    spread: dict  # {candidate: quartile distance over median}
    error: dict  # {candidate: relative Frobenius error against float64}
