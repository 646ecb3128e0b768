"""Tables as text."""

from collections.abc import Callable, Sequence


def table(lines: Sequence[Sequence[str]], place: Callable[[str, int], str] = str.ljust) -> str:
    """Lines of cells as text in columns, all to the left; the first line is the head."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(place, line, widths)).rstrip() for line in lines)
