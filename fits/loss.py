"""What a fit minimises: how far predicted times are from measured ones."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Float

from akjax.arrays import Array

LossName = Literal["robust", "squares"]
LOSSES: tuple[LossName, ...] = get_args(LossName)

# Degrees of freedom of Student's t: its tails let one step in a few hundred be far off for reasons of its own. With 4
# the fit is 0.89 as efficient as least squares on normal noise, and a step that is far off hardly counts.
FREEDOM = 4.0
# The scale that t takes on normal noise of standard deviation 1: where E[5 z**2 / (4 scale**2 + z**2)] = 1.
SCALE_OF_NORMAL = 0.8310034937788784
# Below this share of the measured time a prediction's logarithm goes on as a straight line, so that a search that
# strays to negative times still finds its way back.
_LEAST_SHARE = 1e-3
# Least relative noise of a step.
_LEAST_SCALE = 1e-6


def log_residuals(predicted_ms: Float[Array, " steps"], ms: Float[Array, " steps"]) -> Float[Array, " steps"]:
    """`log(ms / predicted_ms)`, continued in a straight line below a thousandth of `ms`."""
    share = predicted_ms / ms
    inside = jnp.maximum(share, _LEAST_SHARE)
    return -(jnp.log(inside) + jnp.minimum(share - _LEAST_SHARE, 0.0) / _LEAST_SHARE)


def weighted_mean(values: Float[Array, " steps"], weights: Float[Array, " steps"]) -> Float[Array, ""]:
    """The mean of what has a weight, each value as often as its weight says."""
    return weighted_sum(values, weights) / jnp.sum(weights)


def weighted_sum(values: Float[Array, " steps"], weights: Float[Array, " steps"]) -> Float[Array, ""]:
    """The sum of what has a weight, each value as often as its weight says."""
    return jnp.sum(jnp.where(weights > 0, weights * values, 0.0))


def robust_loss(residuals: Float[Array, "*steps"], log_scale: Float[Array, ""]) -> Float[Array, "*steps"]:
    """Of each residual the negative log-likelihood under Student's t, up to a constant (Lange, Little & Taylor, J.
    American Statistical Association 84, 1989).

    In the parameters its sum has the minimum of scipy's "cauchy" loss with `f_scale` of the scale times the root of 4.

    Args:
        residuals: of the logarithms of the times.
        log_scale: logarithm of t's scale, which is fitted too: about the relative noise of a step.
    """
    square = square_scale(log_scale)
    return 0.5 * jnp.log(square) + (FREEDOM + 1.0) / 2.0 * jnp.log1p(residuals**2 / (FREEDOM * square))


def square_scale(log_scale: Float[Array, ""]) -> Float[Array, ""]:
    """t's scale, squared; a millionth is added, or steps without any noise would have a likelihood without bound."""
    return jnp.exp(2.0 * log_scale) + _LEAST_SCALE**2


def robust_log_scale(residuals: Float[Array, " steps"], weights: Float[Array, " steps"]) -> Float[Array, ""]:
    """Where the search for the scale begins: the mean logarithm of a residual's size, which for t with 4 degrees of
    freedom and scale 1 is -1/2.

    A few residuals that are far off hardly change it, and none is sorted, as for a median.
    """
    return 0.5 + weighted_mean(jnp.log(jnp.maximum(jnp.abs(residuals), _LEAST_SCALE)), weights)


def relative_residuals(predicted_ms: Float[Array, " steps"], ms: Float[Array, " steps"]) -> Float[Array, " steps"]:
    """`(predicted_ms - ms) / ms`, whose mean square is the loss "squares"."""
    return (predicted_ms - ms) / ms


def check_loss(loss: str) -> None:
    """Refuses what is no loss.

    Raises:
        ValueError: `loss` is none.
    """
    if loss not in LOSSES:
        raise ValueError(f"loss={loss!r} must be one of {', '.join(LOSSES)}")


def slopes_of(function: object, at: Float[Array, " p"]) -> Float[Array, "steps p"]:
    """The derivative of a function of p parameters with many values, forwards: p passes, and no more memory."""
    return jax.jacfwd(function)(at)  # pyright: ignore[reportArgumentType]
