"""The golden recordings of the reference algorithm; `AKJAX_GOLDEN=DIR` names another folder of the same files."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike

FOLDER = Path(os.environ.get("AKJAX_GOLDEN") or Path(__file__).parent / "golden")

RELATIVE = 1e-9
COVARIANCE = 1e-7


def scenarios(kind: str) -> list[Any]:
    """A pytest parameter for each scenario of a kind; a kind without any fails, as its recording is not there."""
    path = FOLDER / f"{kind}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    if not lines:
        raise FileNotFoundError(f"no recording of {kind} at {path}")
    return [pytest.param(json.loads(line), id=f"{kind}-{number}") for number, line in enumerate(lines)]


def assert_close(actual: ArrayLike, recorded: ArrayLike, relative: float = RELATIVE) -> None:
    """Each number within `relative` of the recorded one; rates of exactly or nearly 0 within 1e-12."""
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), np.asarray(recorded, np.float64), rtol=relative, atol=1e-12
    )
