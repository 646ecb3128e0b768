"""What the study found, as plain data: for the report, the table and the picture."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Setting:
    """One layout at one valid ratio. Times and speedups are None where speed was not measured."""

    layout: str
    asked_ratio: float
    valid_ratio: float
    taus: dict[str, float]  # layer -> mean over the batches
    accuracy: float  # percent
    accuracy_change: float  # percentage points
    ms: float | None = None
    over_conv: float | None = None  # speedup over the dense convolution
    over_im2col_gemm: float | None = None  # speedup over im2col + dense GEMM
    over_gemm: float | None = None  # product alone over dense GEMM alone; the paper's layout only
    paper: dict | None = None  # what the paper reports at this ratio


@dataclass(frozen=True)
class GroupResult:
    """A group of convolutions in one precision. Times are sums over its layers."""

    title: str
    precision: str
    gemms: dict[str, tuple[int, int, int]]  # layer -> (M, K, N) of a batch
    dense_accuracy: float
    settings: list[Setting] = field(default_factory=list)
    conv_ms: float | None = None
    im2col_gemm_ms: float | None = None
    gemm_ms: float | None = None
    layers_ms: dict[str, dict[str, float]] | None = None  # layer -> candidate -> milliseconds


@dataclass(frozen=True)
class Results:
    """All groups, and the circumstances they were measured in."""

    header: dict[str, str]
    groups: list[GroupResult]
