"""How sure a fit is of its parameters, in numbers and in words."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from jaxtyping import Bool, Float

from akjax.parameter import Parameter

# A parameter is known if its standard error is below this share of its value.
_KNOWN = 1 / 3
# Correlation of two parameters' errors beyond which the steps know only what they do together.
_ALIKE = 0.95
# Least eigenvalue of a curvature, its diagonal scaled to 1, that is more than rounding.
_LEAST_CURVATURE = 1e-8


def covariance_of(
    hessian: Float[np.ndarray, "q q"],
    squares: Float[np.ndarray, "q q"],
    units: Float[np.ndarray, " p"],
    fixed: Bool[np.ndarray, " p"],
) -> Float[np.ndarray, "p p"]:
    """The sandwich H^-1 S H^-1 (White, Econometrica 50, 1982), in the parameters' own units.

    A direction in which the loss does not curve has a standard error beyond all measure.

    Args:
        hessian: H, of the summed loss, at its minimum, in the coordinates of the search; the first p of them are the
            parameters', what comes after them is fitted too and of no interest.
        squares: S, the sum of the outer products of the single steps' slopes.
        units: what a unit of each coordinate is in the parameter's units.
        fixed: the parameters that cannot move, as they are on a bound or in none of the steps: certain, as far as this
            goes.
    """
    parameters = len(units)
    free = np.concatenate([np.flatnonzero(~fixed), np.arange(parameters, len(hessian))])
    among = np.ix_(free, free)
    scale = np.sqrt(np.maximum(np.abs(np.diag(hessian)[free]), 1e-100))
    values, vectors = np.linalg.eigh(hessian[among] / np.outer(scale, scale))
    curves = values > _LEAST_CURVATURE
    inverse = (vectors[:, curves] / values[curves]) @ vectors[:, curves].T
    beyond = vectors[:, ~curves] @ vectors[:, ~curves].T / _LEAST_CURVATURE
    # Rounding can leave squares that are none: without them no variance comes out negative.
    sizes, axes = np.linalg.eigh(squares[among] / np.outer(scale, scale))
    spread = inverse @ axes * np.sqrt(np.maximum(sizes, 0.0))
    sandwich = spread @ spread.T + beyond
    covariance = np.zeros((len(hessian), len(hessian)))
    covariance[among] = sandwich / np.outer(scale, scale)
    return covariance[:parameters, :parameters] * np.outer(units, units)


def determined(
    parameters: Sequence[Parameter],
    values: Float[np.ndarray, " p"],
    covariance: Float[np.ndarray, "p p"],
    fixed: Bool[np.ndarray, " p"],
) -> Bool[np.ndarray, " p"]:
    """Whether the steps say what a parameter is: not if it is fixed, or its error is no less than a third of it.

    One that may be 0 or negative is known if its error is less than a third of its prior's standard deviation.
    """
    sizes = [
        abs(value) if parameter.spread is not None else np.sqrt(parameter.variance)
        for parameter, value in zip(parameters, values, strict=True)
    ]
    return ~fixed & (np.sqrt(np.diag(covariance)) < _KNOWN * np.asarray(sizes))


def findings(
    parameters: Sequence[Parameter],
    values: Float[np.ndarray, " p"],
    covariance: Float[np.ndarray, "p p"],
    at_bound: Bool[np.ndarray, " p"],
    unseen: Bool[np.ndarray, " p"],
) -> list[str]:
    """What the steps cannot tell, a sentence each; none if they tell all."""
    errors = np.sqrt(np.diag(covariance))
    fixed = at_bound | unseen
    known = determined(parameters, values, covariance, fixed)
    said = []
    if np.any(unseen):
        said.append(f"{', '.join(parameters[at].name for at in np.flatnonzero(unseen))}: in none of these steps")
    for at in np.flatnonzero(at_bound):
        parameter = parameters[at]
        if np.isfinite(parameter.lower):
            said.append(
                f"{parameter.name} is at a bound, {values[at]:.3g} of {parameter.lower:g} to {parameter.upper:g}: the"
                " steps ask for more than the form allows"
            )
        else:
            said.append(f"{parameter.name} is 0 as far as these steps say")
    for at in np.flatnonzero(~known & ~fixed):
        said.append(
            f"{parameters[at].name} is not determined: {values[at]:.3g} with a standard error of {errors[at]:.2g}"
        )
    for one, other in combinations(np.flatnonzero(~fixed), 2):
        correlation = covariance[one, other] / max(errors[one] * errors[other], 1e-300)
        if abs(correlation) > _ALIKE:
            names = f"{parameters[one].name} and {parameters[other].name}"
            said.append(
                f"{names} are hard to tell apart: their errors are correlated by {correlation:.3f}, so trust what they"
                " predict together more than either"
            )
    return said
