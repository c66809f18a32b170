"""Writes a fit into a file that serving can start from, and reads it back."""

import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Float

from akjax.arrays import Array
from akjax.features import StepFeatures
from akjax.fit_file import MOST_BYTES, FitFile, FittedParameter, decoded_fit
from akjax.forms import Engine

from .certainty import findings
from .cost import CostFit


def fit_file_of(
    fit: CostFit, form: str, engine: Engine, steps: StepFeatures, ms: Float[Array, " steps"], logs: Sequence[str] = ()
) -> FitFile:
    """A fit with all that is to be known of it later.

    Args:
        fit: of the steps.
        form: its name, as `akjax.forms.form_named` takes it.
        engine: that the form was made for.
        steps: that were fitted.
        ms: that they took.
        logs: names of the files that they came from.
    """
    parameters = fit.model.parameters()
    with jax.enable_x64(True):
        features = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), steps)
        predicted = np.asarray(fit.model(features))
    measured = np.asarray(ms)
    return FitFile(
        form=form,
        engine={name: list(value) if isinstance(value, tuple) else value for name, value in engine._asdict().items()},
        parameters=[
            FittedParameter(
                name=parameter.name,
                unit=parameter.unit,
                value=float(value),
                standard_error=None if fixed else float(error),
                determined=bool(known),
            )
            for parameter, value, error, known, fixed in zip(
                parameters, fit.values, fit.standard_errors, fit.determined, fit.at_bound | fit.unseen, strict=True
            )
        ],
        covariance=fit.covariance.tolist(),
        noise=fit.noise,
        error_percent=float(100.0 * np.mean(np.abs(predicted - measured) / measured)),
        rows=len(measured),
        logs=list(logs),
        findings=findings(parameters, fit.values, fit.covariance, fit.at_bound, fit.unseen),
        created=time.time(),
        versions={"akjax": version("akjax"), "jax": version("jax"), "python": platform.python_version()},
    )


def write_fit(path: Path, fit: FitFile) -> None:
    """Writes a fit as JSON, whole or not at all: a file that is there already is replaced at the end."""
    beside = path.with_name(path.name + ".part")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(fit), indent=2) + b"\n")
    beside.replace(path)


def read_fit(path: Path) -> FitFile:
    """A fit from its file.

    Raises:
        ValueError: the file is no fit; the message says what is wrong with it.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return decoded_fit(file.read(MOST_BYTES + 1), str(path))
