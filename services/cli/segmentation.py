"""Prints two models' tokens of the same text, one row above the other, for `draftbridge translate`."""

import unicodedata
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

# Two alternating styles for the tokens of each row.
_STYLES = (("black on bright_cyan", "black on cyan"), ("black on bright_yellow", "black on yellow"))
# Visible symbols for white space and control characters.
_VISIBLE = {" ": "·", "\n": "⏎", "\r": "␍", "\t": "⇥", "\x7f": "␡"} | {
    chr(code): chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\r\t"
}
# Unicode categories of characters that a terminal interprets or hides, such as controls and right-to-left overrides.
_INVISIBLE = ("Cc", "Cf", "Zl", "Zp", "Cs", "Co", "Cn")


@dataclass(frozen=True)
class Segmentation:
    """A text as one model's tokens, each as its bytes. A control token is empty."""

    name: str
    tokens: Sequence[bytes]

    @cached_property
    def ends(self) -> list[int]:
        """The byte offset at which each token ends."""
        return list(accumulate(map(len, self.tokens)))


def show(console: Console, above: Segmentation, below: Segmentation) -> None:
    """Prints both rows, aligned at byte offsets, with a mark at each token's end, and counts tokens and bytes."""
    data = b"".join(above.tokens)
    # A tokenizer that normalizes its input may spell other bytes. Then the rows cannot be aligned.
    if data == b"".join(below.tokens):
        segments = list(_segments(data, {*above.ends, *below.ends}))
        width = max(console.width - len(str(len(data))) - 2, 8)
        for line in _lines(segments, width):
            offset = str(line[0][0]).rjust(len(str(len(data))))
            console.print(Text(f"{offset}  ", "dim") + _row(line, above, _STYLES[0]), soft_wrap=True)
            console.print(Text(" " * len(offset) + "  ") + _row(line, below, _STYLES[1]), soft_wrap=True)
            console.print()
    else:
        for one, styles in zip((above, below), _STYLES, strict=True):
            spelled = b"".join(one.tokens)
            console.print(_row(list(_segments(spelled, set(one.ends))), one, styles), soft_wrap=True)
    for one, styles in zip((above, below), _STYLES, strict=True):
        count = len(one.tokens)
        bytes_each = f"{len(b''.join(one.tokens)) / count:.2f} bytes per token" if count else "no bytes"
        console.print(Text("  ", styles[0]) + Text(f" {one.name}: {count} tokens, {bytes_each}"))
    if data == b"".join(below.tokens):
        common = len(set(above.ends) & set(below.ends) - {0})
        summary = f"{len(data)} bytes; a token of each model ends at {common} common offsets"
    else:
        summary = "a tokenizer here normalizes the text: the rows spell different bytes and cannot be aligned"
    console.print(summary, style="dim", highlight=False)


def _segments(data: bytes, ends: set[int]) -> Iterator[tuple[int, int, str]]:
    """Yields start, end and display text of each stretch between two offsets of `ends`."""
    for start, end in pairwise(sorted({0, len(data), *ends})):
        yield start, end, _shown(data[start:end])


def _shown(data: bytes) -> str:
    """Returns bytes as text, and those of an incomplete character in hex."""
    try:
        return "".join(map(_visible, data.decode()))
    except UnicodeDecodeError as error:
        part = "".join(f"‹{byte:02x}›" for byte in data[error.start : error.end])
        return _shown(data[: error.start]) + part + _shown(data[error.end :])


def _visible(character: str) -> str:
    if character in _VISIBLE:
        return _VISIBLE[character]
    return f"‹U+{ord(character):04X}›" if unicodedata.category(character) in _INVISIBLE else character


def _lines(segments: Sequence[tuple[int, int, str]], width: int) -> Iterator[list[tuple[int, int, str]]]:
    line: list[tuple[int, int, str]] = []
    used = 0
    for segment in segments:
        cells = cell_len(segment[2]) + 1
        if line and used + cells > width:
            yield line
            line, used = [], 0
        line.append(segment)
        used += cells
    if line:
        yield line


def _row(line: Sequence[tuple[int, int, str]], of: Segmentation, styles: tuple[str, str]) -> Text:
    """Renders one model's line: `│` where its token ends, a space in the token's style where only the other's does."""
    row, ends = Text(), of.ends
    for _, end, shown in line:
        index = bisect_left(ends, end)
        style = styles[index % 2]
        row.append(shown, style)
        row.append("│" if ends[index] == end else " ", style)
    return row
