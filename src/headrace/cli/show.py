"""How the commands write: sizes, tables, and progress that suits a terminal and a log alike."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from headrace.errors import HeadraceError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as a shell reports a program that Ctrl-C ended."""
UNITS = ("kB", "MB", "GB", "TB")


def human(nbytes: float) -> str:
    """Bytes with three digits: ``1.50 GB`` (powers of 1000, as disks and networks count)."""
    if nbytes < 999.5:
        return f"{nbytes:.0f} B"
    step = 0
    while nbytes >= 999.5 and step < len(UNITS):
        nbytes, step = nbytes / 1000, step + 1
    return f"{nbytes:.0f} {UNITS[step - 1]}" if nbytes >= 99.95 else f"{nbytes:#.3g} {UNITS[step - 1]}"


def table(rows: Sequence[Sequence[object]], right: Sequence[int] = ()) -> str:
    """Rows as aligned columns; those in ``right`` are set to the right."""
    text = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    lines = []
    for row in text:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def tell(error: HeadraceError) -> None:
    """An error in one line."""
    note(f"headrace: {' '.join(str(error).split())}")


def note(line: str) -> None:
    """A line for the person at the terminal; stdout is for results."""
    print(line, file=sys.stderr, flush=True)


class Bar:
    """Progress of long work: one line that is rewritten on a terminal, a line each tenth elsewhere. Safe to call often.

    A context manager, so that the line is finished however the work ends.
    """

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = 0.0
        self._tenth = ("", -1)
        self._open = False
        self._began: dict[str, tuple[float, int]] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        start, first = self._began.setdefault(what, (now, done))
        rate = (done - first) / (now - start) if now > start else 0.0
        line = f"{what}: {human(done)} of {human(total)} ({100 * done // max(1, total)}%)"
        line += f", {human(rate)}/s" if rate > 0 else ""
        if self._terminal:
            if now - self._last >= 0.1 or done >= total:
                self._last, self._open = now, True
                print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
        elif self._tenth != (what, 10 * done // max(1, total)):
            self._tenth = (what, 10 * done // max(1, total))
            note(line)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            print(file=sys.stderr)
            self._open = False
