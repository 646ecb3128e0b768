"""Options that several scripts have, and the types of their values."""

import argparse
from pathlib import Path

from models.files import UserError


def make_parser(doc):
    """A parser whose help opens with a script's docstring."""
    as_it_is = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc.strip(), formatter_class=as_it_is)


def file_name(text):
    """A type for argparse: the name of files in a folder that another option names."""
    if not text or Path(text).name != text:
        raise argparse.ArgumentTypeError(f"expected a name without folders; got {text!r}")
    return text


def number(kind, fits, expected):
    """A type for argparse: a number of type ``kind`` that ``fits``; else ``expected`` is named."""

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"expected {expected}; got {text}")
        return value

    return parse


positive_integer = number(int, lambda value: value >= 1, "an integer of 1 or more")
natural_number = number(int, lambda value: value >= 0, "an integer of 0 or more")
valid_ratio = number(float, lambda value: 0 < value <= 1, "a valid ratio in (0, 1]")


def add(parser, flag, what, default, said=None, **rest):
    """An option whose help names its default: ``said``, or the value, or of {"cpu" or "cuda": {name
    of the option: value}} those that fill_in takes. ``rest``: of add_argument.
    """
    if isinstance(default, dict) and default.keys() == {"cpu", "cuda"}:
        on_cuda, on_cpu = (show(default[kind][flag[2:]]) for kind in ("cuda", "cpu"))
        said = said or (on_cuda if on_cuda == on_cpu else f"{on_cuda}; on the CPU {on_cpu}")
        default = None
    said = show(default) if said is None else said
    words = f"{what} (default: {said})".replace("%", "%%")
    parser.add_argument(flag, default=default, help=words, **rest)


def add_numbers(parser, flag, what, default, metavar, **rest):
    """An option of one or more positive integers."""
    rest = {"nargs": "+"} | rest
    add(parser, flag, what, default, metavar=metavar, type=positive_integer, **rest)


def add_choices(parser, flag, what, default, choices, said=None, **rest):
    """An option of one or more of some words."""
    add(parser, flag, what, default, said, choices=choices, **({"nargs": "+"} | rest))


def add_device_option(parser):
    choices = ("auto", "cpu", "cuda")
    add(parser, "--device", "auto: cuda where there is one", "auto", choices=choices)


def add_folder_option(parser, what):
    """``--out``, the folder of ``what`` the script writes."""
    what = f"folder of {what}, made where it is missing"
    add(parser, "--out", what, Path("results"), metavar="FOLDER", type=Path)


def add_repeats_option(parser, default):
    add_numbers(parser, "--repeats", "rounds of each timing", default, "ROUNDS", nargs=None)


def add_ratios_option(parser, ratios):
    what = "shares of block products to keep, in (0, 1]"
    add(parser, "--ratios", what, ratios, metavar="RATIO", type=valid_ratio, nargs="+")


def fill_in(options, defaults):
    """Makes ``options.device`` a torch.device, and gives options that were left out its
    ``defaults``, {"cpu" or "cuda": {name of the option: value}}. Those with ``parts`` get as many
    ``devices``: CUDA's, or the CPU for each part; UserError where there are fewer.
    """
    import torch  # not above: options are read without it, as by --help and by what draws pictures

    options.device = choose_device(options.device)
    if hasattr(options, "parts"):
        options.devices = [options.device] * options.parts
        if options.device.type == "cuda":
            if (found := torch.cuda.device_count()) < options.parts:
                raise UserError(
                    f"expected {options.parts} CUDA devices, one a part; got {found} (--device cpu "
                    "does without)"
                )
            options.devices = [torch.device("cuda", index) for index in range(options.parts)]
            options.device = options.devices[0]
    for name, value in defaults[options.device.type].items():
        if getattr(options, name, None) is None:
            setattr(options, name, value)


def choose_device(name):
    """The torch.device of an option --device; UserError: cuda where there is none."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("expected a CUDA device; torch finds none")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def show(values):
    """Default values as they would be typed."""
    values = values if isinstance(values, (list, tuple, dict)) else [values]
    return " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
