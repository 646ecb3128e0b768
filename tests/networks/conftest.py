"""What the tests of networks share."""

import pytest

from spamm_torch._timing import Timing


@pytest.fixture
def measured(monkeypatch):
    """Replaces measured times: ``measured(of_layers, of_models)``, in the order of candidates.

    A time is a number, or a Timing. The calls whose parts are timed run.
    """

    def timing(time):
        return time if isinstance(time, Timing) else Timing(time)

    def replace(of_layers, of_models):
        def times_of_parts(calls, _, around):
            found = []
            for call, context, time in zip(calls, around, of_layers, strict=False):
                names = []
                with context():
                    call(names.append)
                found.append(dict.fromkeys(names, timing(time)))
            return found

        def times_of(calls, *_, **__):
            return list(map(timing, of_models[: len(calls)]))

        for function in (times_of_parts, times_of):
            name = f"spamm_torch.networks.engines.{function.__name__}"
            monkeypatch.setattr(name, function)

    return replace
