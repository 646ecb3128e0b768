"""What converted networks are meant to reach with nothing skipped, as ratios of measured times."""

from dataclasses import dataclass

_SMALL = (1, 8, 32)
_FASTEST = ("ours", "ours-compiled")


@dataclass(frozen=True)
class Goal:
    title: str
    least: float  # ratio: the peer's time over ours
    ours: tuple[str, ...]  # candidates of which the fastest counts
    peer: str
    mode: str
    networks: tuple[str, ...] | None = None  # None: all
    batches: tuple[int, ...] | None = None  # None: all


def _goals():
    graph = "CUDA graph"
    yield Goal(
        "over torch.compile", 1.4, _FASTEST, "compiled", graph, ("resnet18", "resnet50"), (64,)
    )
    yield Goal("over torch.compile", 1.4, _FASTEST, "compiled", graph, ("vgg13_32",), (128, 512))
    yield Goal("over torch.compile", 1.15, _FASTEST, "compiled", graph, ("unet",), (8,))
    yield Goal("over max-autotune", 1.15, _FASTEST, "max-autotune", graph, ("vgg13_bn",), (32,))
    others = ("densenet121", "mobilenet_v3_large", "convnext_tiny", "efficientnet_b0")
    yield Goal("compiled, over torch.compile", 0.98, _FASTEST[1:], "compiled", graph, others)
    yield Goal("over dense", 1.0, _FASTEST[:1], "dense", "eager", others)
    for mode in ("eager", graph):
        yield Goal("over dense, small batches", 1.0, _FASTEST[:1], "dense", mode, None, _SMALL)
    yield Goal(
        "compiled, over torch.compile, small batches",
        1.0,
        _FASTEST[1:],
        "compiled",
        graph,
        None,
        _SMALL,
    )
    yield Goal("held tau, over dense", 0.9, ("held-tau",), "dense", graph, None, _SMALL)


def _cpu_goals():
    yield Goal("over dense", 1.0, ("ours",), "dense", "eager", ("resnet18", "vgg11"), (16,))
    yield Goal("held tau, over dense", 0.9, ("held-tau",), "dense", "eager", None, _SMALL)


GOALS = {"cuda": tuple(_goals()), "cpu": tuple(_cpu_goals())}
