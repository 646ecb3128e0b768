"""What bench_vgg13.py found, as a page."""

from common.report_files import page, table

_NOTES = """\
The accuracy is that on images that took no part in the choice of thresholds. Times are medians in
us for one batch, all networks in turns. Dense: batch norm folded; on CUDA, convolution, bias and
ReLU in one call of cuDNN. Nothing skipped: all convolutions with SpAMM at a threshold of 0, which
shows what fusing alone brings."""

_LAYERS = """\
Layers by themselves, with bias and ReLU; input norms are precomputed where a layer of ours or a max
pool comes before. Valid: the share of block products asked for; where tau is 0 only blocks of zeros
are skipped. For dense layers SpAMM's time is that of tau 0."""


def report(data, name):
    """The page and the conclusion; there is no picture."""
    return _markdown(data), None, conclusion(data)


def conclusion(data):
    """What was found, in one line."""
    header = data["header"]
    where = {"CUDA graph": "in one CUDA graph"}
    speeds = [
        f"{of['dense'] / of['SpAMM']:.2f}x as fast {where.get(mode, mode)} "
        f"({of['dense'] / of['nothing skipped']:.2f}x with nothing skipped)"
        for mode, of in data["times_ms"].items()
    ]
    network, inference = header["model"].partition(",")[0], header["inference"].rpartition(",")[0]
    return (
        f"Against the dense network, {network} with SpAMM ({inference}) is {', '.join(speeds)}; "
        f"accuracy {_change(data):+.2f} points."
    )


def _change(data):
    return data["accuracy"] - data["dense_accuracy"]


def _markdown(data):
    modes = data["times_ms"]
    networks = [
        (name, *(f"{1e3 * of[name]:.4g} ({of['dense'] / of[name]:.2f}x)" for of in modes.values()))
        for name in next(iter(modes.values()))
    ]
    layers = []
    for name, layer in data["layers"].items():
        dense, ours = 1e3 * layer["dense_ms"], 1e3 * layer["spamm_ms"]
        ratio, tau = layer["ratio"], layer["tau"]
        setting = (f"{ratio:.0%}", f"{tau:.3g}") if ratio else (layer["dense"], "")
        layers.append((name, *setting, f"{dense:.4g}", f"{ours:.4g}", f"{dense / ours:.2f}x"))
    body = [
        f"Accuracy: dense {data['dense_accuracy']:.2f}%, with SpAMM {data['accuracy']:.2f}%",
        f"({_change(data):+.2f} points; {data['changed_points']:.2f}% of the answers changed).",
        *_NOTES.splitlines(),
        "",
        *table(("network", *modes), networks),
        "",
        *_LAYERS.splitlines(),
        "",
        *table(("layer", "valid", "tau", "dense, us", "SpAMM, us", "speedup"), layers),
    ]
    return page("Whole-network inference: VGG13", conclusion(data), data["header"], body)
