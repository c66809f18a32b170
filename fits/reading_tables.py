"""Reads other people's measurements of steps: a table with a column for each quantity, whatever it is called there."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from jaxtyping import Float

from akjax.features import StepFeatures

from .reading_arrays import CostSteps, kept

QUANTITIES = ("ms", "tokens", "requests", "drafts", "context", "prefill", "drafting")
"""What a table may tell of a step.

- ms: that it took.
- tokens: verified, that is requests + drafts.
- requests: in it.
- drafts: verified, over all its requests.
- context: KV tokens read.
- prefill: tokens of prompts, beyond the one of each request that `tokens` counts.
- drafting: drafts made for each request, for its next step.
"""


def read_table(path: str | os.PathLike[str], columns: Mapping[str, str] | None = None) -> CostSteps:
    """The measured steps of a CSV file (.tsv: by tabs) or a Parquet file, a row each.

    Needed are ms, and tokens or both requests and drafts. Without tokens they are requests + drafts; without requests
    they are tokens - drafts, and without either every token is a request of its own. All else that the table does not
    tell is 0.

    Args:
        path: of the table.
        columns: of each quantity that is to be read, the column's name; None reads those that are called as in
            `QUANTITIES`.

    Raises:
        ValueError: a column that is not there, a quantity that is not known or is missing, or a file that is no table;
            the message says what there is.
        OSError: the file cannot be read.
    """
    path = Path(path)
    table = _table(path)
    there = ", ".join(map(repr, table.columns))
    if columns is None:
        columns = {name: name for name in QUANTITIES if name in table.columns}
    if unknown := [name for name in columns if name not in QUANTITIES]:
        raise ValueError(f"{', '.join(map(repr, unknown))} is no quantity of a step; there are {', '.join(QUANTITIES)}")
    if absent := [name for name in columns.values() if name not in table.columns]:
        raise ValueError(f"{path} has no column {', '.join(map(repr, absent))}; it has {there}")
    if "ms" not in columns or ("tokens" not in columns and not {"requests", "drafts"} <= {*columns}):
        raise ValueError(
            f"a table has to tell ms, and tokens or both requests and drafts: {path} is to tell"
            f" {', '.join(columns) or 'nothing'}, of its columns {there}; `columns` says which column is what"
        )

    told = {quantity: _numbers(table[name]) for quantity, name in columns.items()}
    ms = told["ms"]
    drafts = told.get("drafts", np.zeros(len(ms)))
    tokens = told["tokens"] if "tokens" in told else told["requests"] + drafts
    requests = told["requests"] if "requests" in told else tokens - drafts
    faults = {f"{quantity} is no finite number": ~np.isfinite(values) for quantity, values in told.items()}
    faults |= {
        "ms is not above 0": ms <= 0,
        "fewer than one request": requests < 1,
        "fewer tokens than requests": tokens < requests,
    }
    faults |= {f"{quantity} is negative": values < 0 for quantity, values in told.items() if quantity != "ms"}
    row, left_out = kept(len(ms), faults)
    tells = ("tokens", "requests", *(name for name in ("drafting", "context", "prefill") if name in told))

    features: dict[str, Any] = {"tokens": tokens[row], "requests": requests[row], "uneven": np.zeros(len(row))}
    for quantity in ("drafting", "context", "prefill"):
        features[quantity] = told[quantity][row] if quantity in told else np.zeros(len(row))
    return CostSteps(StepFeatures(**features), ms[row], np.zeros(len(row), np.int32), row, left_out, tells)


def _table(path: Path) -> pl.DataFrame:
    """The file as a table; the cells of a CSV are text, so that one that is no number spoils its own row only."""
    with path.open("rb") as file:
        start = file.read(4)
    try:
        if start == b"PAR1":
            _try_apart(path)
            return pl.read_parquet(path)
        return pl.read_csv(path, infer_schema=False, separator="\t" if path.suffix == ".tsv" else ",")
    except (pl.exceptions.PolarsError, OSError) as error:  # the latter where it seems compressed and is not whole
        raise ValueError(f"{path} cannot be read as a table, CSV or Parquet: {error}") from None


def _try_apart(path: Path) -> None:
    """Makes sure that a Parquet file can be read, in a process of its own: over some damaged ones polars ends its own.

    Raises:
        ValueError: it cannot.
    """
    read = "import polars, sys; polars.read_parquet(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", read, str(path)], capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [""]
        raise ValueError(f"{path} cannot be read as a table in Parquet, it may be damaged: {said[-1][:300]}")


def _numbers(column: pl.Series) -> Float[np.ndarray, " rows"]:
    """The cells as float64, NaN for what is no number."""
    if column.dtype == pl.String:
        column = column.str.strip_chars()
    elif not column.dtype.is_numeric():
        return np.full(len(column), np.nan)
    return column.cast(pl.Float64, strict=False).fill_null(np.nan).to_numpy()
