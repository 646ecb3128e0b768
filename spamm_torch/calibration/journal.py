"""What a calibration has measured, on disk, so that a stopped one can go on."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..networks.example import Example

_FORMAT = "spamm_torch calibration 1"


class Journal:
    """Results by key. Without a path nothing is kept."""

    def __init__(self, path: str | os.PathLike[str] | None, settings: dict[str, Any]) -> None:
        """Raises ValueError for a file that is no journal, or of another model or data."""
        self._path = None if path is None else Path(path)
        self._settings = settings
        self._results: dict[str, Any] = {} if self._path is None else self._load(self._path)

    def measured(self, key: str, measure: Callable[[], Any]) -> Any:
        """The result as it was kept, else as ``measure()`` gives it: plain data, as JSON has it."""
        if key not in self._results:
            self._results[key] = json.loads(json.dumps(measure()))
            self._save()
        return self._results[key]

    def __contains__(self, key: str) -> bool:
        return key in self._results

    def _save(self) -> None:
        if self._path is None:
            return
        content = {"format": _FORMAT, "settings": self._settings, "results": self._results}
        unfinished = self._path.with_name(self._path.name + ".tmp")
        unfinished.write_text(json.dumps(content))
        os.replace(unfinished, self._path)  # in full or not at all

    def _load(self, path: Path) -> dict[str, Any]:
        try:
            content = json.loads(path.read_text())
            is_journal = content["format"] == _FORMAT
            settings, results = content["settings"], content["results"]
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError):
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


def journal_settings(model: nn.Module, inputs: list[Example], device: str) -> dict[str, Any]:
    """What decides the results, by name: a journal of others is refused."""
    from .. import __version__

    given = pytree.tree_leaves([(example.args, example.kwargs) for example in inputs])
    return {
        "model": _digest(model.state_dict().values()),
        "data": _digest(given),
        "device": device,
        "version of spamm_torch": __version__,
        "version of torch": torch.__version__,
    }


def _digest(values: Any) -> str:
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            digest.update(f"{tuple(value.shape)} {value.dtype}".encode())
            plain = value.detach().cpu().contiguous()
            digest.update(ctypes.string_at(plain.data_ptr(), plain.nbytes))
    return digest.hexdigest()[:16]
