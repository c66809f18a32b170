"""What a file with a fitted cost model holds, and the model that it makes for an engine."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float

from akjax.cost import AbstractCostModel
from akjax.covariance import is_covariance
from akjax.forms import FORMS, Engine, form_named

VERSION = 1
"""Of the file's format."""

MOST_BYTES = 1 << 20
"""More than any fit is long: what is longer is none, and need not be read."""

# A parameter that the fit found to be 0 starts at this share of where its form starts: filters in logarithms need it
# above 0, and this low it says nothing.
_NEXT_TO_NOTHING = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedParameter:
    """A parameter as it was fitted.

    Attributes:
        name: in its form.
        unit: "1" if it has none.
        value: in that unit.
        standard_error: in that unit; None where it is not known: on a bound, in none of the steps, or from a table.
        determined: whether the steps said what it is.
    """

    name: str
    unit: str
    value: float
    standard_error: float | None
    determined: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FitFile:
    """A fitted cost model, where it comes from and how good it is: one JSON object.

    Attributes:
        form: its name, as `akjax.forms.form_named` takes it.
        engine: what the form was told of the engine: the fields of `akjax.forms.Engine`.
        parameters: in the form's order.
        covariance: of the parameters, in their units and order.
        noise: relative standard deviation of a step's time about the model.
        error_percent: mean of |predicted - measured| / measured over the steps, in percent.
        rows: steps fitted.
        logs: the files that they came from, or where the figures were published.
        findings: what the steps could not tell, a sentence each.
        created: Unix seconds.
        versions: of akjax and what it ran on.
        kind: "cost fit".
        version: of the file's format.
    """

    form: str
    engine: dict[str, float | int | list[int] | None]
    parameters: list[FittedParameter]
    covariance: list[list[float]]
    noise: float
    error_percent: float
    rows: int
    logs: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    created: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    kind: Literal["cost fit"] = "cost fit"
    version: int = VERSION


class CostStart(NamedTuple):
    """Where learning a cost model starts.

    Attributes:
        model: with its parameters there.
        covariance: of the parameters, in their units; None for the prior of the form.
        unmatched: names of parameters that the model or the fit has and the other has not.
    """

    model: AbstractCostModel
    covariance: Float[np.ndarray, "p p"] | None = None
    unmatched: tuple[str, ...] = ()


def decoded_fit(content: bytes, name: str) -> FitFile:
    """The fit that a file's content holds; of the file itself at most `MOST_BYTES + 1` need be read.

    Args:
        content: of the file.
        name: of the file, for errors.

    Raises:
        ValueError: it is no fit; the message says what is wrong with it.
    """
    if len(content) > MOST_BYTES:
        raise ValueError(f"{name} is longer than {MOST_BYTES} bytes, so it is no fit")
    try:
        return msgspec.json.decode(content, type=FitFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{name} is no fit of a cost model: {error}") from None


def start_of(fit: FitFile, engine: Engine, *, runs: str = "") -> CostStart:
    """The fitted model for an engine, which need not be the one that it was fitted on.

    The form is made for this engine, since its draft lengths and captured sizes may be others; parameters of the same
    name take the fit's value and covariance. One that only the model has starts as the form has it, as uncertain as
    the form says; one that the fit found on a bound, or in none of its steps, is as uncertain again. Where it gives no
    parameter an error, as figures from a table have none, there is no covariance.

    A form of akjax's own needs no leave. One of another module is code, and a file does not get to say which code runs.

    Args:
        fit: to start from.
        engine: that is to be served.
        runs: the form of another module, `package.module:name`, that may be imported.

    Raises:
        ValueError: another version, a covariance that does not fit the parameters or is none, values that are not
            finite, or a form that is not known or is of a module that `runs` does not name.
    """
    _check(fit)
    if fit.form not in FORMS and fit.form != runs:
        raise ValueError(
            f"the fit's form {fit.form!r} is none of akjax's ({', '.join(FORMS)}); if it is code of yours, name it as"
            " the form too"
        )
    model = form_named(fit.form)(engine)
    parameters = model.parameters()
    position = {parameter.name: at for at, parameter in enumerate(fit.parameters)}
    with jax.enable_x64(True):
        first, unravel = ravel_pytree(jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), model))
        values = np.array(first)
        prior = np.asarray([parameter.variance for parameter in parameters])
        covariance = np.diag(prior)
        known = [at for at, parameter in enumerate(parameters) if parameter.name in position]
        for at in known:
            fitted, parameter = fit.parameters[position[parameters[at].name]], parameters[at]
            floor = _NEXT_TO_NOTHING * abs(values[at]) if parameter.spread is not None else -np.inf
            values[at] = np.clip(max(fitted.value, floor), parameter.lower, parameter.upper)
        sure = [at for at in known if fit.parameters[position[parameters[at].name]].standard_error is not None]
        places = [position[parameters[at].name] for at in sure]
        covariance[np.ix_(sure, sure)] = np.asarray(fit.covariance)[np.ix_(places, places)]
        started = jax.tree.map(np.asarray, unravel(jnp.asarray(values)))
    unmatched = {parameter.name for parameter in parameters}.symmetric_difference(position)
    return CostStart(started, covariance if sure else None, tuple(sorted(unmatched)))


def _check(fit: FitFile) -> None:
    if fit.kind != "cost fit" or fit.version != VERSION:
        raise ValueError(
            f"this is a {fit.kind!r} of version {fit.version}; a 'cost fit' of version {VERSION} is needed"
        )
    size = len(fit.parameters)
    if len(fit.covariance) != size or any(len(row) != size for row in fit.covariance):
        raise ValueError(f"the covariance must be {size} by {size}, one row for each parameter")
    covariance = np.asarray(fit.covariance, np.float64)
    numbers = np.asarray([parameter.value for parameter in fit.parameters])
    if not np.all(np.isfinite(covariance)) or not np.all(np.isfinite(numbers)):
        raise ValueError("every value and covariance must be finite")
    if not is_covariance(covariance):
        raise ValueError("the covariance is none: a variance of some combination of parameters is negative")
    if len({parameter.name for parameter in fit.parameters}) != size:
        raise ValueError("every parameter must have a name of its own")
