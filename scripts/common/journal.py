"""Finished groups of a long measurement, kept on disk so that a stopped run can go on.

A journal is NAME.partial.json beside the results. It is written anew after each group, in full or
not at all, and removed when the results are written.
"""

import hashlib
import json
import os

import spamm_torch
from models.files import UserError, write_atomically


class Journal:
    """Groups by key, for one run and for those that go on with it.

    As a context manager, it says how to go on if the run is interrupted.
    """

    def __init__(self, folder, name, settings, *, fresh=False):
        """Groups of ``folder``/``name``, measured under these ``settings`` (options, machine,
        versions). ``fresh``: forget what an earlier run has finished.

        UserError: the journal is damaged, or is of a run with other settings.
        """
        self.path = folder / f"{name}.partial.json"
        self._settings = _plain(settings)
        self._groups = {} if fresh else self._load()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        if kind is KeyboardInterrupt and not str(error):
            kept = "no group of measurements was finished; the same command begins with the first"
            if self._groups:
                kept = f"finished groups are in {self.path}; the same command goes on from there"
            raise KeyboardInterrupt(kept) from None

    def __contains__(self, key):
        return key in self._groups

    def measured(self, key, measure):
        """The group ``key``: as it was measured before, else as ``measure()`` gives it now; plain
        data in both cases, as json reads it.
        """
        if key not in self._groups:
            self._groups[key] = _plain(measure())
            content = {"settings": self._settings, "groups": self._groups}
            write_atomically(self.path, lambda file: file.write(json.dumps(content).encode()))
        return self._groups[key]

    def remove(self):
        """The results are written: the next run measures anew."""
        self.path.unlink(missing_ok=True)

    def _load(self):
        try:
            content = json.loads(self.path.read_text())
            stored, groups = dict(content["settings"]), dict(content["groups"])
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"expected groups of an unfinished run; got something else in {self.path}: "
                "measure anew with --fresh"
            ) from error
        for name in {**self._settings, **stored}:
            old, new = (json.dumps(of.get(name)) for of in (stored, self._settings))
            if old != new:
                raise UserError(
                    f"expected {name} {old[:60]}, as in the unfinished run in {self.path}; got "
                    f"{new[:60]}: give the same options, or measure anew with --fresh"
                )
        return groups


def run_settings(header, **options):
    """The settings that decide a measurement: the header's machine and versions, the library, the
    options.
    """
    kept = ("device", "torch", "spamm_torch")
    return {
        **{name: header[name] for name in kept},
        "library": hashlib.sha256(spamm_torch.paths.library_path().read_bytes()).hexdigest()[:16],
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("SPAMM_TORCH")},
        **options,
    }


def model_digest(model):
    """A digest of a network's parameters, to tell trained networks apart."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _plain(value):
    return json.loads(json.dumps(value, default=str))
