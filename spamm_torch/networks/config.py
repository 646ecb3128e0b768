"""The setting by which a layer skips."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from .._arguments import check_block, check_knobs, check_pixel_block, is_number, norm_dtype


@dataclass(frozen=True)
class SpAMMConfig:
    """The setting by which a layer of a converted model skips. Exactly one knob is given.

    A frozen dataclass: settings compare, hash and print by what they hold, and go to JSON and back.
    ``SpAMMConfig(tau=0.0)`` skips nothing and chooses the op ``conv2d``.

    Attributes:
        tau, valid_ratio, max_error, block, pixel_block: as of :func:`conv2d`, and None what that
            picks; a tau is a number.

    Raises as that function.

    Example:
        >>> report = convert_(model, SpAMMConfig(tau=0.1), overrides={"0": None})
        >>> print([(row.name, row.action) for row in report])
        [('0', 'left')]
        >>> model = revert_(model)
    """

    tau: float | None = None
    valid_ratio: float | None = None
    max_error: float | None = None
    block: int | tuple[int, int, int] | None = None
    pixel_block: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        if self.tau is not None and not is_number(self.tau):
            raise TypeError(f"tau must be a number in a SpAMMConfig; got {self.tau!r}")
        check_knobs(self.tau, self.valid_ratio, self.max_error)
        # Lists, as JSON has them, become tuples: a frozen setting can be hashed and compared.
        if self.block is not None:
            triple = check_block(self.block)
            object.__setattr__(self, "block", self.block if type(self.block) is int else triple)
        if self.pixel_block is not None:
            triple = check_pixel_block(self.pixel_block, self.block)
            object.__setattr__(self, "pixel_block", triple)

    def op_arguments(self) -> dict[str, Any]:
        """The keyword arguments of the op ``conv2d``, without those that are None."""
        found = self.to_dict()
        if self.tau is not None:
            found["threshold"] = float(found.pop("tau"))
        if self.block is not None:
            found["block"] = check_block(self.block)
        return found

    def to_dict(self) -> dict[str, Any]:
        """The values that are set, as JSON holds them: :meth:`from_dict` reads them."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SpAMMConfig":
        """The setting that :meth:`to_dict` wrote; ValueError for a name that is none of its."""
        if not isinstance(values, Mapping):
            raise TypeError(f"a SpAMMConfig is made of a dict; got {type(values).__name__}")
        known = [field.name for field in fields(cls)]
        unknown = sorted(map(str, set(values) - set(known)))
        if unknown:
            raise ValueError(f"a SpAMMConfig holds {', '.join(known)}; got {', '.join(unknown)}")
        return cls(**values)

    def to_json(self) -> str:
        """The setting as a line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "SpAMMConfig":
        """The setting that :meth:`to_json` wrote; ValueError for other text."""
        if not isinstance(text, str):
            raise TypeError(f"a SpAMMConfig is made of a str of JSON; got {type(text).__name__}")
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a SpAMMConfig must be JSON; got {text[:40]!r} ({error})") from None
        if not isinstance(values, dict):
            raise ValueError(f"a SpAMMConfig must be a JSON object; got {text[:40]!r}")
        return cls.from_dict(values)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.to_dict().items())


NOTHING_SKIPPED = SpAMMConfig(tau=0.0)


def lossless(dtype: torch.dtype) -> "SpAMMConfig":
    """The setting, image by image, that skips products of exactly zero: tau is the least number."""
    info = torch.finfo(norm_dtype(dtype))
    return SpAMMConfig(tau=info.smallest_normal * info.eps, pixel_block=(1, 8, 8))
