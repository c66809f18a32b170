"""A step log as a Parquet file: the steps as its columns, headers and refusals as JSON beside them."""

import os
from pathlib import Path

import msgspec
import polars as pl

from akjax.step_log import VERSION, LogHeader

from .reading_schema import LIST_COLUMNS, NULLABLE, SCHEMA, FilePart, LogError, Refused, StepLog
from .seal import UNSEALED, is_sealed, seal

# The key of the file's metadata.
_KEY = "akjax.step_log"


class _Beside(msgspec.Struct):
    """What is kept beside the steps."""

    version: int
    headers: list[LogHeader]
    refusals: list[Refused]
    sha256: str


class _Version(msgspec.Struct):
    version: int


def write_parquet(log: StepLog, path: Path) -> None:
    """Writes a log; whatever was at `path` is replaced when all is written, and not before."""
    beside = _Beside(VERSION, list(log.headers), list(log.refusals), UNSEALED)
    partial = path.with_name(f"{path.name}.partial")
    try:
        log.steps.write_parquet(partial, metadata={_KEY: msgspec.json.encode(beside).decode()})
        seal(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_parquet(path: Path) -> FilePart:
    """A log that `write_parquet` wrote.

    Raises:
        LogError: it did not, or what it wrote was changed.
    """
    if not is_sealed(path):
        raise LogError(
            f"{path} is no step log that convert wrote in Parquet, or it was damaged or changed since: the sum of its"
            " bytes is missing or wrong; a table of your own is read by read_table"
        )
    try:
        text = pl.read_parquet_metadata(path).get(_KEY)
        if text is None:
            raise LogError(f"{path} is a Parquet file but no step log: it has no {_KEY} in its metadata")
        version = msgspec.json.decode(text, type=_Version).version
        if version > VERSION:
            raise LogError(
                f"{path} is a step log of version {version}, and this akjax reads versions up to {VERSION}: read it"
                " with the akjax that wrote it, or a later one"
            )
        beside = msgspec.json.decode(text, type=_Beside)
        steps = pl.read_parquet(path)
        missing = [name for name in SCHEMA if name not in steps.columns]
        if missing:
            raise LogError(f"{path}: the steps lack {', '.join(missing)}; they have {', '.join(steps.columns)}")
        steps = steps.select(SCHEMA.names()).cast(SCHEMA)
    except (pl.exceptions.PolarsError, msgspec.MsgspecError) as error:
        raise LogError(f"{path} cannot be read as a step log in Parquet: {error}") from None
    faults = steps.select(_faults(len(beside.headers))).row(0, named=True) if len(steps) else {}
    if any(faults.values()):
        found = ", ".join(name for name, there in faults.items() if there)
        raise LogError(f"{path} was changed since it was written as a step log: it has steps with {found}")
    return FilePart(tuple(beside.headers), steps, tuple(beside.refusals))


def _faults(logs: int) -> list[pl.Expr]:
    """What no step that was written has, each a truth value by its name."""
    nulls = [pl.col(name).is_null().any() for name in SCHEMA if name not in NULLABLE]
    counts = ("tokens", "requests", "prefill", "context", "drafts", "drafting", "k", "gap_ms")
    rows = pl.col("request").list.len()
    return [
        pl.any_horizontal(*nulls).alias("nothing where there was something"),
        pl.any_horizontal(
            *((pl.col(name) < 0).any() for name in counts), *((pl.col(n).list.min() < 0).any() for n in LIST_COLUMNS)
        ).alias("negative numbers"),
        pl.any_horizontal(*((pl.col(name).list.len() != rows).any() for name in LIST_COLUMNS)).alias(
            "lists of unequal length"
        ),
        (~pl.col("log").is_between(0, logs - 1)).any().alias("no header"),
    ]
