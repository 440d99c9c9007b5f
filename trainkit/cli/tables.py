"""Tables for pipes and narrow terminals: one line per record, and words are never broken or cut.

If the output is not a terminal, every column is printed, however long the line. On a terminal that
is too narrow some columns are left out, and a last line names them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from trainkit.base.printable import OutputClosed, PrintableStream, printable

GAP = 2  # blanks between columns
READABLE = 30  # columns in which a text may be broken between words
NO_LIMIT = 10_000  # columns, if the output is not a terminal


GIB = 2**30
Page = Iterable[str | RenderableType]  # lines as they are, and what rich prints


def gib(size: int | None, digits: int, absent: str = "-") -> str:
    """Bytes as GiB with so many digits; `absent` for None."""
    return absent if size is None else f"{size / GIB:,.{digits}f} GiB"


def marked(text: str) -> Text:
    """Text of rich's markup. `x.py:100:` of it stays as it is: rich would make a picture of it."""
    return Text.from_markup(text, emoji=False)


class Printer(Console):
    """A console that shows the text of others and does not obey it: see `printable`.

    Args:
        stderr: it prints on stderr instead of stdout.
    """

    def __init__(self, stderr: bool) -> None:
        stream = sys.stderr if stderr else sys.stdout
        if isinstance(stream, PrintableStream):  # it would write out rich's own colours
            stream = stream.raw
        super().__init__(
            file=stream,
            highlight=False,
            emoji=False,
            soft_wrap=True,
            width=None if stream.isatty() else NO_LIMIT,
        )

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=printable(segment.text))

    def on_broken_pipe(self) -> None:
        raise OutputClosed


class Listing:
    """Headings and rows, to be given to a console's `print`. Cells are rich's markup.

    Args:
        headings: one per column; if all are "", no line of headings is printed.
        right: headings of columns that are aligned to the right.
        drop: headings of columns that may be left out on a narrow terminal, the first one first.
        rows: records, of one cell per heading; `add_row` adds further ones.
    """

    def __init__(
        self,
        *headings: str,
        right: Collection[str] = (),
        drop: Sequence[str] = (),
        rows: Iterable[Iterable[str]] = (),
    ) -> None:
        unknown = {*right, *drop} - {*headings}
        if unknown:
            raise ValueError(f"no columns: {sorted(unknown)}")
        self.headings = headings
        self.right = right
        self.drop = drop
        self.rows: list[list[Text]] = []
        for row in rows:
            self.add_row(*row)

    def add_row(self, *cells: str) -> None:
        """Add a record: one cell per heading."""
        if len(cells) != len(self.headings):
            raise ValueError(f"{len(cells)} cells for {len(self.headings)} columns")
        self.rows.append([marked(cell.replace("\n", " ")) for cell in cells])

    def _widths(self) -> list[int]:
        return [
            max([Text(heading).cell_len, *(row[i].cell_len for row in self.rows)])
            for i, heading in enumerate(self.headings)
        ]

    def _shown(self, room: int) -> list[int]:
        """Which columns fit."""
        widths = self._widths()
        shown = list(range(len(self.headings)))
        widths[-1] = min(widths[-1], READABLE)
        for heading in self.drop:
            if sum(widths[i] + GAP for i in shown) - GAP <= room:
                break
            shown.remove(self.headings.index(heading))
        return shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = console.width if console.is_terminal else NO_LIMIT
        shown = self._shown(room)
        widths = self._widths()
        if any(self.headings):
            heading = [[Text(text, style="bold") for text in self.headings]]
        else:
            heading = []
        for row in [*heading, *self.rows]:
            yield from self._lines(row, [widths[i] for i in shown], shown, room)
        if left := [text for i, text in enumerate(self.headings) if i not in shown]:
            yield Text(
                f"(a wider terminal, a pipe or --json also shows: {', '.join(left)})",
                style="dim",
                no_wrap=True,
                overflow="ignore",
            )

    def _lines(
        self, row: Sequence[Text], widths: Sequence[int], shown: Sequence[int], room: int
    ) -> Iterator[Text]:
        """One line; where the last cell does not fit on a terminal, its further words on lines
        below it."""
        line = Text(no_wrap=True, overflow="ignore")
        for i, width in zip(shown[:-1], widths, strict=False):
            blanks = Text(" " * (width - row[i].cell_len))
            for part in (blanks, row[i]) if self.headings[i] in self.right else (row[i], blanks):
                line.append_text(part)
            line.append(" " * GAP)
        last = row[shown[-1]]
        before = line.cell_len
        if self.headings[shown[-1]] in self.right:
            line.append(" " * (widths[-1] - last.cell_len))
        parts = (
            last.divide(_breaks(last.plain, room - before))
            if room - before >= min(READABLE, widths[-1])
            else [last]
        )
        for number, part in enumerate(parts or [last]):
            whole = line if number == 0 else Text(" " * before, no_wrap=True, overflow="ignore")
            whole.append_text(part)
            whole.rstrip()
            yield whole


def _breaks(text: str, room: int) -> list[int]:
    """Offsets of the words that start new lines of at most `room` columns; a longer word gets its
    own line."""
    breaks = []
    start = 0
    for word in re.finditer(r"\S+", text):
        if word.start() > start and cell_len(text[start : word.end()]) > room:
            breaks.append(word.start())
            start = word.start()
    return breaks
