"""Table 5 as a page and a picture."""

from common import plots
from common.report_files import table
from study import report as study_report
from study.results import Results
from tables import paper

TITLE = "VGG13 on MNIST"
_PAPER, _OURS = "paper", "by position"  # layouts

_NOTES = """\
Convolutions of a trained VGG13 replaced by SpAMM: change of accuracy in percentage points on the
validation images, tau (the mean over the batches), and speedups for one batch, norms included. In
the paper's layout (blocks of 32, im2col image after image) the speedup is over the dense product of
the same im2col matrices, as in the paper; "conv" is over torch's convolution (cuDNN, oneDNN), of
which the layer pays im2col, too. By position is this library's layout: blocks of 64 that hold the
same pixel of 64 images. The paper's network and weights are others; dense it reaches 96.6%."""

_SHIFTED = """\
Every image shifted at random by up to 6 pixels, which MNIST's centred digits are not. Change of
accuracy by layout; speed does not depend on it."""

_SEVERAL = """\
The paper's speedups are those on 1, 2 and 4 GPUs. Ours on 2 is by position, over torch's
convolution on one, operands and result on the first."""

_NETWORK = """\
The whole network, for one batch of the validation images: as it is (its convolutions by cuDNN or
oneDNN), under torch.compile, and with the named convolutions by position, fused (`fuse_`) and with
tau held. On a GPU each is one CUDA graph; max-autotune is its mode without graphs of its own, and
left out on a CPU, where compiling takes long. "All" skips nothing: what fusing gains alone. The
change of accuracy at each ratio stands above."""

_CANDIDATES = {
    "dense": "as it is",
    "compiled": "torch.compile, default",
    "max-autotune": "torch.compile, max-autotune",
}


def conclusion(data):
    """What all layers together lose and gain."""
    results = _results(data)
    if not any(len(group.gemms) > 1 and group.conv_ms is not None for group in results.groups):
        return "All layers together could not be measured."
    return study_report.conclusion(results)


def beside(data):
    """A line for each layer and valid ratio, then the shifted images."""
    two = {
        (found["place"]["title"], found["place"]["precision"], row["ratio"]): row["speedup"]
        for found in data["cells"]
        if found["place"]["kind"] == "two"
        for row in found["rows"]
    }
    lines = [*_NOTES.splitlines(), *_SEVERAL.splitlines(), "", _about(data["settings"]), ""]
    head = ("layers", "type", "asked", "paper: change", "tau", "speedup")
    head += ("paper's layout: change", "tau", "over GEMM", "over conv")
    head += ("by position: valid", "change", "tau", "over conv", "2 GPUs")
    timed = [group for group in _results(data).groups if group.conv_ms is not None]
    lines += table(head, [line for group in timed for line in _lines(group, two)], left=(0, 1))
    shifted = [group for group in _results(data).groups if group.conv_ms is None]
    if shifted:
        head = ("layers", "type", "asked", "dense", "paper's layout: change", "by position: change")
        rows = [line for group in shifted for line in _shifted_lines(group)]
        lines += ["", *_SHIFTED.splitlines(), "", *table(head, rows, left=(0, 1))]
    of_kind = [found for found in data["cells"] if found["place"]["kind"] == "network"]
    networks = [found for found in of_kind if not found["absent"]]
    if networks:
        head = ("network", "type", "ms", "over the network as it is", "over torch.compile's best")
        rows = [line for found in networks for line in _network_lines(found)]
        lines += ["", *_NETWORK.splitlines(), "", *table(head, rows, left=(0, 1))]
    return lines + _absent_lines(data)


def body(data, picture):
    """The page below its header."""
    lines = [f"![speedup against accuracy lost]({picture})", "", *beside(data), ""]
    lines += ["## Every figure", "", *study_report.EXPLANATION.splitlines()]
    for group in _results(data).groups:
        lines += study_report.group_lines(group)
    return lines


def picture(data):
    """Speed against accuracy, as the study draws it."""
    results = _results(data)
    if any(group.conv_ms is not None for group in results.groups):
        return study_report.picture(results)
    figure, _ = plots.panels(1, 1, 2)
    return plots.png(figure, data["header"], "Nothing was measured")


def _about(settings):
    """Which network saw which images."""
    training = settings["training"]
    numbers = ", ".join(f"{name} {training[name]}" for name in ("width", "epochs", "batch", "seed"))
    return f"Network: {training['model']}, {numbers}. Images: {settings['images']}; 80% to train."


def _results(data):
    groups = [
        study_report.group_from_data(group)
        for found in data["cells"]
        if found["place"]["kind"] == "group"
        for group in found["rows"]
    ]
    return Results(data["header"], groups)


def _by_ratio(group):
    """(ratio, {layout: Setting})."""
    found = {}
    for setting in group.settings:
        found.setdefault(setting.asked_ratio, {})[setting.layout] = setting
    return found.items()


def _lines(group, two):
    for ratio, of in _by_ratio(group):
        old, new = of[_PAPER], of[_OURS]
        on_two = two.get((group.title, group.precision, ratio))
        papers = ("", "", "")
        if old.paper:
            speedups = (old.paper["speedup"], *paper.CONVOLUTION_ON_GPUS[group.title, ratio])
            change = f"{old.paper['accuracy_change']:+.1f}"
            papers = (change, old.paper["tau"], " / ".join(map(str, speedups)))
        yield (
            *(group.title, group.precision, f"{ratio:.2%}", *papers),
            *(f"{old.accuracy_change:+.2f}", study_report.tau_range(old)),
            *(f"{old.over_gemm:.2f}", f"{old.over_conv:.2f}"),
            *(f"{new.valid_ratio:.2%}", f"{new.accuracy_change:+.2f}", study_report.tau_range(new)),
            *(f"{new.over_conv:.2f}", "" if on_two is None else f"{on_two:.2f}"),
        )


def _shifted_lines(group):
    for ratio, of in _by_ratio(group):
        changes = (f"{of[layout].accuracy_change:+.2f}" for layout in (_PAPER, _OURS))
        title = group.title.partition(",")[0]
        yield title, group.precision, f"{ratio:.2%}", f"{group.dense_accuracy:.2f}%", *changes


def _network_lines(found):
    place, rows = found["place"], found["rows"]
    times = {row["candidate"]: row["ms"] for row in rows if row["ratio"] is None and row["ms"]}
    compiled = min((ms for name, ms in times.items() if name != "dense"), default=None)
    for row in rows:
        name = _CANDIDATES.get(row["candidate"])
        if name is None:
            kept = "all" if row["ratio"] == 1 else f"{row['ratio']:.0%}"
            name = f"SpAMM in {place['title']}, {kept}"
        figures = (f"not measured: {row['absent']}", "", "")
        if row["ms"]:
            figures = (f"{row['ms']:.4g}", _over(times.get("dense"), row), _over(compiled, row))
        yield name, place["precision"], *figures


def _over(peer_ms, row):
    return "" if peer_ms is None else f"{peer_ms / row['ms']:.2f}"


_ON = {"two": "on 2 GPUs, ", "network": "whole network, ", "group": ""}


def _absent_lines(data):
    lines = []
    for found in data["cells"]:
        if found["absent"]:
            at = found["place"]
            what = f"{at['title']}, {at['precision']}, {_ON[at['kind']]}"
            lines.append(f"- {what}not measured: {found['absent']}")
    return ["", *lines] if lines else []
