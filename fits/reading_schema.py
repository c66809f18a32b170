"""What reading a log of steps gives: the steps as columns, and an account of what was refused."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple, get_args

import polars as pl

from akjax.step_log import LogHeader, Untaught

_LISTS = {"request": pl.Int32, "drafted": pl.Int16, "accepted": pl.Int16, "cut": pl.Int16, "mode": pl.Int8}

SCHEMA = pl.Schema(
    {
        "log": pl.Int32(),
        "time": pl.Float64(),
        "gap_ms": pl.Float64(),
        "untaught": pl.Enum(get_args(Untaught)),
        "tokens": pl.Int64(),
        "requests": pl.Int64(),
        "prefill": pl.Int64(),
        "context": pl.Int64(),
        "drafts": pl.Int64(),
        "drafting": pl.Int64(),
        "uneven": pl.Boolean(),
        "k": pl.Int64(),
        "forced": pl.Boolean(),
        "predicted_ms": pl.Float64(),
        **{name: pl.List(dtype()) for name, dtype in _LISTS.items()},
    }
)
"""The columns of `StepLog.steps`: those of `StepRecord`, and `log`, the number of the run that a step belongs to.

Signed, so that a difference of two of them means what it says; lists as narrow as they may be, as they are most of it.
"""

LIST_COLUMNS = tuple(_LISTS)
NULLABLE = ("gap_ms", "predicted_ms")


class LogError(ValueError):
    """A file that is no step log, or none that can be read."""


class Refused(NamedTuple):
    """Rows of a file that were left out for one reason.

    Attributes:
        path: of the file.
        reason: in a few words, the same for all such rows.
        rows: how many.
        line: the number of the first of them, from 1; 0 for what is wrong with the file and not with a line.
        found: what was wrong with that one.
    """

    path: str
    reason: str
    rows: int
    line: int
    found: str

    def __str__(self) -> str:
        """A line for people."""
        where = f"{self.rows} refused, the first in line {self.line}: " if self.line else ""
        return f"{self.path}: {self.reason}; {where}{self.found}"


class Refusals:
    """Counts what is refused in a file."""

    def __init__(self, path: Path) -> None:
        """Nothing yet, of the file at `path`."""
        self._path = str(path)
        self._first: dict[str, tuple[int, str]] = {}
        self._rows: Counter[str] = Counter()

    def add(self, reason: str, line: int, found: str) -> None:
        """One more row, with the number of its line and what was wrong with it."""
        self._first.setdefault(reason, (line, found))
        self._rows[reason] += 1

    def report(self) -> tuple[Refused, ...]:
        """The account, a reason after the other."""
        return tuple(Refused(self._path, reason, rows, *self._first[reason]) for reason, rows in self._rows.items())


class FilePart(NamedTuple):
    """What one file gives: as `StepLog`, with `log` counting the headers of this file."""

    headers: tuple[LogHeader, ...]
    steps: pl.DataFrame
    refusals: tuple[Refused, ...]


class StepLog(NamedTuple):
    """Logged steps of one run of an engine or of several.

    A request is told by `log` and `request` together: its number is its own in a run only.

    Attributes:
        headers: of the runs, that of each as its first file has it. What `log` numbers.
        paths: the files that were read.
        steps: a row for each step, with the columns of `SCHEMA`: a run after the other, in the order of its files.
        refusals: what was left out of which file, and why.
    """

    headers: tuple[LogHeader, ...]
    paths: tuple[Path, ...]
    steps: pl.DataFrame
    refusals: tuple[Refused, ...]

    @property
    def refused(self) -> dict[str, int]:
        """How many rows of all files were left out, by reason."""
        rows: Counter[str] = Counter()
        for each in self.refusals:
            rows[each.reason] += each.rows
        return dict(rows)
