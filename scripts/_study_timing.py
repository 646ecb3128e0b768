"""Time of a layer, dense and by SpAMM, on its real activations.

All candidates of a layer take turns, round after round, so that they meet the same clocks and the
same neighbours on the machine; the median over the rounds counts. On CUDA a candidate is a graph of
several calls, timed with events: what the device needs, not how fast Python launches.
"""

import statistics
import time

import torch

import spamm_torch
from scripts._study_layouts import Im2colConv2d, ImageMajor, im2col_operands

_CALLS_A_GRAPH = 10


@torch.inference_mode()
def time_layer(conv, x, settings, repeats):
    """Times one convolution.

    Args:
        conv: the dense layer.
        x: its input, one batch.
        settings: (layout, valid ratio) pairs; each is timed with a held tau that gives this ratio
            on x. Norms are included, the search is not, as in the paper.
        repeats: number of rounds.

    Returns:
        Milliseconds: under "conv" (oneDNN or cuDNN), "im2col+gemm", "gemm" (the product alone, its
        matrices at hand), and for each setting under its candidate_name; for the paper's layout
        also under candidate_name(..., part="product") for the product alone.
    """
    a, b = im2col_operands(conv, x)
    im2col_gemm = Im2colConv2d(conv, torch.mm)
    candidates = {
        "conv": lambda: conv(x),
        "im2col+gemm": lambda: im2col_gemm(x),
        "gemm": lambda: torch.mm(a, b),
    }
    for layout, ratio in settings:
        tau = spamm_torch.find_tau(*layout.norm_maps(conv, x), ratio).item()
        module = layout.module(conv, tau)
        candidates[candidate_name(layout, ratio)] = lambda module=module: module(x)
        if isinstance(layout, ImageMajor):
            candidates[candidate_name(layout, ratio, part="product")] = (
                lambda product=module.product: product(a, b)
            )
    return _medians(candidates, _events if x.is_cuda else _wall_clock, repeats)


def candidate_name(layout, ratio, part="layer"):
    return f"{layout.label}, {100 * ratio:.2f}%, {part}"


@torch.inference_mode()
def layer_inputs(model, names, pictures):
    """The inputs of the named layers in the dense model: {name: activation}."""
    inputs = {}
    x = pictures
    for name, layer in model.named_children():
        if name in names:
            inputs[name] = x
        x = layer(x)
    return inputs


def _medians(candidates, measure, repeats):
    timers = dict(zip(candidates, measure(candidates.values()), strict=True))
    times = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, timer in timers.items():
            times[name].append(timer())
    return {name: statistics.median(measured) for name, measured in times.items()}


def _wall_clock(calls):
    """For each call a function that makes it and gives the milliseconds it took; warmed up."""

    def timer_of(call):
        def timer():
            start = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - start)

        return timer

    for call in calls:
        call()
    return [timer_of(call) for call in calls]


def _events(calls):
    """As above on CUDA, per call of a graph; the graphs take turns and share their memory."""
    pool = torch.cuda.graph_pool_handle()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timer_of(graph):
        def timer():
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / _CALLS_A_GRAPH

        return timer

    return [timer_of(_captured(call, pool)) for call in calls]


def _captured(call, pool):
    """A graph of several calls, replayed once."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # cuDNN picks its algorithm and libraries initialise before the capture
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for _ in range(_CALLS_A_GRAPH):
            call()
    graph.replay()
    return graph
