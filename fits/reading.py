"""Reads step logs, of one file or many, in whatever form they are."""

import glob
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import polars as pl

from akjax.step_log import LogHeader

from .reading_arrays import (
    AcceptanceSequences,
    CostSteps,
    acceptance_sequences,
    cost_steps,
    draft_sequence,
    engine_of,
)
from .reading_lines import read_lines
from .reading_parquet import read_parquet, write_parquet
from .reading_schema import SCHEMA, FilePart, LogError, Refused, StepLog
from .reading_tables import read_table

__all__ = [
    "SCHEMA",
    "AcceptanceSequences",
    "CostSteps",
    "LogError",
    "Refused",
    "StepLog",
    "acceptance_sequences",
    "convert",
    "cost_steps",
    "draft_sequence",
    "engine_of",
    "read_log",
    "read_table",
]

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A file, a pattern with wildcards, or several of them."""

_ZSTD, _PARQUET = b"\x28\xb5\x2f\xfd", b"PAR1"
_UNREADABLE = {b"\x1f\x8b": "compressed by gzip", b"PK": "a zip archive", b"\xfd7zXZ": "compressed by xz"}


def read_log(paths: Paths) -> StepLog:
    """The steps of all files, and an account of the rows that were refused.

    A file is JSON Lines, plain or compressed by Zstandard, or what `convert` made; its first bytes tell. The files of
    one run, by their headers' `run`, are one log, in the order in which they are given; a pattern gives them by name.
    A file that is named twice is read once.

    Raises:
        LogError: a file that is no step log, or one of a later version.
        OSError: a file that is not there or cannot be opened, or a pattern that fits none.
    """
    files = _files(paths)
    return _joined(files, [_part(path) for path in files])


def convert(paths: Paths, out: str | os.PathLike[str]) -> StepLog:
    """Reads logs and writes them all into one Parquet file, which reads as the same log; returns that.

    Raises:
        ValueError: `out` does not end in .parquet, so that it may well be a log that was meant to be read.
        LogError: as `read_log`.
        OSError: as `read_log`, or `out` cannot be written.
    """
    out = Path(out)
    if out.suffix != ".parquet":
        raise ValueError(f"the file to write must end in .parquet, given {out}")
    log = read_log(paths)
    write_parquet(log, out)
    return log


def _files(paths: Paths) -> list[Path]:
    """The files that paths and patterns name, each once."""
    named: list[Path] = []
    for each in [paths] if isinstance(paths, str | os.PathLike) else paths:
        path = Path(each)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder: name its files, as in {path / '*.jsonl*'}")
        if path.exists() or not glob.has_magic(str(path)):
            named.append(path)
            continue
        found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if not os.path.isdir(name)]
        if not found:
            raise FileNotFoundError(f"no file fits {path}")
        named += found
    if not named:
        raise ValueError("no step log was named")
    return [*{os.path.realpath(path): path for path in reversed(named)}.values()][::-1]


def _part(path: Path) -> FilePart:
    """What a file holds, read by what its first bytes say it is."""
    with path.open("rb") as file:
        start = file.peek(8)[:8]
        if start.startswith(_PARQUET):
            return read_parquet(path)
        for magic, what in _UNREADABLE.items():
            if start.startswith(magic):
                raise LogError(f"{path} is {what}; step logs are JSON Lines, plain or compressed by zstd, or Parquet")
        return read_lines(file, path, compressed=start.startswith(_ZSTD))


def _joined(files: list[Path], parts: list[FilePart]) -> StepLog:
    """The parts as one log, files of the same run together."""
    headers: list[LogHeader] = []
    numbers: dict[str, int] = {}
    frames: list[pl.DataFrame] = []
    for part in parts:
        logs: list[int] = []
        for header in part.headers:
            number = numbers.get(header.run, len(headers))
            if number == len(headers):
                headers.append(header)
            if header.run:
                numbers[header.run] = number
            logs.append(number)
        log = np.asarray(logs, np.int32)[part.steps["log"].to_numpy()]
        frames.append(part.steps.with_columns(pl.Series("log", log)))
    steps = pl.concat(frames) if len(frames) > 1 else frames[0]
    if not steps["log"].is_sorted():
        steps = steps.sort("log", maintain_order=True)
    return StepLog(tuple(headers), tuple(files), steps, tuple(each for part in parts for each in part.refusals))
