"""The measurements of a calibration on disk, so that a stopped one can go on."""

import ctypes
import hashlib
import json
import os
import re
import types
from collections.abc import Callable, Collection
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._library import VERSION
from .._output import write_text
from ..networks.config import SpAMMConfig
from ..networks.example import Example

_FORMAT = "spamm_torch calibration 6"
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")  # in texts of objects, another in each process

Result = TypeVar("Result")


class Journal:
    """Results by key. Without a path nothing is kept."""

    def __init__(self, path: str | os.PathLike[str] | None, settings: dict[str, Any]) -> None:
        """Raises ValueError for a file that is no journal, of something else, or not writable."""
        self._path = None if path is None else Path(path)
        self._settings = settings
        self._results: dict[str, Any] = {} if self._path is None else self._load(self._path)
        self._save()  # a file that cannot be written raises before anything is measured

    def measured(
        self,
        key: str,
        measure: Callable[[], Result],
        kind: type[Result],
        names: Collection[str] = (),
    ) -> Result:
        """The result as kept, else measured: numbers, dataclasses of such, dicts with ``names``."""
        if key not in self._results:
            self._results[key] = json.loads(json.dumps(measure(), default=asdict))
            self._save()
        try:
            for name in names:
                self._results[key][name]
            found: Result = _read(kind, self._results[key])
            return found
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(
                "journal must be an undamaged one of a calibration; got "
                f"{str(self._path)!r}, whose result {key!r} cannot be read "
                "(remove it, or name another file)"
            ) from None

    def forget(self, *keys: str) -> None:
        """Drops these results, so that they are measured again the next time."""
        for key in keys:
            self._results.pop(key, None)
        self._save()

    def _save(self) -> None:
        if self._path is None:
            return
        content = {"format": _FORMAT, "settings": self._settings, "results": self._results}
        try:
            write_text(self._path, json.dumps(content))
        except OSError as error:
            raise ValueError(f"journal must be a file that can be written; got {error}") from None

    def _load(self, path: Path) -> dict[str, Any]:
        try:
            content = json.loads(path.read_text())
            settings, results = content["settings"], content["results"]
            is_journal = content["format"] == _FORMAT and type(settings) is type(results) is dict
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ValueError(f"journal must be a file that can be read; got {error}") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            is_journal, settings, results = False, {}, {}
        if not is_journal:
            raise ValueError(f"journal must be one of a calibration; got {os.fspath(path)!r}")
        for name, value in self._settings.items():
            if settings.get(name) != value:
                raise ValueError(
                    f"journal must be of the same {name}; got {os.fspath(path)!r}, which is of "
                    "another (remove it, or name another file)"
                )
        return results


def _read(kind: Any, kept: Any) -> Any:
    """An object of this kind, of what JSON made of it."""
    of = get_args(kind)
    if kind is SpAMMConfig:
        return SpAMMConfig.from_dict(kept)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: _read(hints[name], value) for name, value in kept.items()})
    if get_origin(kind) is dict:
        return {name: _read(of[1], value) for name, value in kept.items()}
    if get_origin(kind) is tuple:
        return tuple(_read(of[0], value) for value in kept)
    if get_origin(kind) is types.UnionType:  # of the first one and None
        return None if kept is None else _read(of[0], kept)
    return kind(kept)


def journal_settings(
    model: nn.Module, inputs: list[Example], example: Example, device: str
) -> dict[str, Any]:
    """The inputs that decide the results; a journal of others is refused. ``example``: its form."""
    state = model.state_dict()
    given = pytree.tree_leaves([(each.args, each.kwargs) for each in inputs])
    return {
        "model": _digest([_text(model), *state.keys(), *state.values()]),
        "data": _digest(given),
        "example_input": _form(example),
        "device": device,
        "version of spamm_torch": VERSION,
        "version of torch": torch.__version__,
    }


def _text(value: Any) -> str:
    return _ADDRESS.sub("", str(value))


def _form(example: Example) -> str:
    """The structure of an example, and of its tensors all but the values."""
    leaves, structure = pytree.tree_flatten((example.args, example.kwargs))
    forms = [
        f"{tuple(x.shape)} {x.stride()} {x.dtype}" if isinstance(x, Tensor) else _text(x)
        for x in leaves
    ]
    return f"{_text(structure)}: {', '.join(forms)}"


def _digest(values: Any) -> str:
    """A digest of tensors and texts; anything else does not count."""
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, str):
            digest.update(f"{value}\n".encode())
        if isinstance(value, Tensor):
            digest.update(f"{tuple(value.shape)} {value.dtype}".encode())
            plain = value.detach().cpu().contiguous()
            digest.update(ctypes.string_at(plain.data_ptr(), plain.nbytes))
    return digest.hexdigest()[:16]
