"""Tables that stay readable where the terminal is narrower than they are."""

from collections.abc import Iterator
from copy import copy

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

# Texts of several words are wrapped in columns of at least this width.
_MIN_TEXT_WIDTH = 24
_ANY_WIDTH = 10_000


class Fitted:
    """Shows a table without its lines if it is too wide with them, else each cell on a line of its own.

    No cell is cut, because long words are broken.
    """

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        endless = options.update(max_width=_ANY_WIDTH)
        for column in self._table.columns:
            found = [Measurement.get(console, endless, one) for one in (column.header, *column.cells)]
            longest_word, longest = (max(sizes) for sizes in zip(*found, strict=True))
            column.min_width = max(longest_word, min(longest, _MIN_TEXT_WIDTH))
            column.no_wrap, column.overflow = longest == longest_word, "fold"
        plain = copy(self._table)
        plain.box, plain.pad_edge = None, False
        plain.padding = (0, 1, 0, 0)
        for table in (self._table, plain):
            if Measurement.get(console, endless, table).minimum <= options.max_width:
                yield table
                return
        if self._table.title:
            yield Text(str(self._table.title), self._table.title_style or "table.title")
        yield self._lines()
        yield ""

    def _lines(self) -> Table:
        """Returns a row for each cell that is not empty: the name of its column, and the cell."""
        lines = Table.grid(padding=(0, 1, 0, 0))
        lines.add_column(style="dim", no_wrap=True)
        lines.add_column(overflow="fold")
        names = [column.header for column in self._table.columns]
        for number, cells in enumerate(zip(*(column.cells for column in self._table.columns), strict=True)):
            if number:
                lines.add_row()
            for name, cell in zip(names, cells, strict=True):
                if cell:
                    lines.add_row(name, cell)
        return lines
