"""Fits a cost form to many sets of steps at once, each with parameters of its own."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float

from akjax.arrays import Array
from akjax.cost import AbstractCostModel
from akjax.features import StepFeatures

from .compiling import quick_options
from .loss import relative_residuals
from .search import coordinates_of, scattered

# Levenberg-Marquardt: the damping to begin with, what a step that was taken and one that was not make of it, and the
# damping at which no step is left that would help.
_DAMPING, _TAKEN, _REFUSED, _MOST_DAMPING = 1e-2, 0.3, 4.0, 1e10
# A step that gains less than this share of the loss ends the search.
_GAIN = 1e-10


class ManyFits(NamedTuple):
    """A cost form, fitted to each set of steps.

    Attributes:
        model: with the fitted parameters, along a leading axis of sets.
        relative_error: of each set, the weighted root mean square of (predicted - measured) / measured.
    """

    model: AbstractCostModel
    relative_error: Float[np.ndarray, " sets"]

    def predicted(self, steps: StepFeatures, shape: tuple[int, int]) -> Float[np.ndarray, "sets steps"]:
        """The milliseconds of steps by each set's own fit, the features broadcast to the shape."""
        with jax.enable_x64(True):
            features = _broadcast(steps, shape)
            return np.asarray(jax.jit(jax.vmap(lambda model, step: model(step)))(self.model, features))


def fit_many(
    start: AbstractCostModel,
    steps: StepFeatures,
    ms: Float[np.ndarray, "sets steps"],
    weights: Float[np.ndarray, "sets steps"],
    *,
    noise: float = 0.0,
    searches: int = 8,
    max_iterations: int = 200,
) -> ManyFits:
    """Of each set of steps, the parameters with the least squares of the relative error, within the form's bounds.

    The loss, the coordinates and the places where searches begin are those of `fit_cost` with `loss="squares"`, and
    the best search counts. Its problems are large and few, these are small and many: so each search is one of
    Levenberg and Marquardt (Nocedal & Wright, Numerical Optimization, 2006, ch. 10), and all of them run in one
    compiled call, in float64.

    Args:
        start: the form, and where the searches begin once its times are brought to each set's own speed.
        steps: the features of the measured steps, each of a shape that broadcasts to that of `ms`.
        ms: that they took, a row for each set.
        weights: of each step in its set's loss: 0 for one that is left out.
        noise: relative standard deviation of a time about the form. Above 0 a form's parameters without a unit are held
            to their priors, about the start, as firmly as steps of that noise would let them be: for sets of few steps.
        searches: for each set.
        max_iterations: of each search.

    Raises:
        ValueError: a time that is not positive and finite, weights of another shape than the times, negative or all 0
            in a set, or a form with a parameter that is bounded on one side only.
    """
    if not np.all(np.isfinite(ms) & (ms > 0)):
        raise ValueError("every ms must be positive and finite")
    if weights.shape != ms.shape or np.any(weights < 0) or not np.all(np.any(weights > 0, axis=1)):
        raise ValueError("weights must be one for each time, none negative and not all 0 in any set")
    parameters = start.parameters()
    natural: Any = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(start)]).astype(np.float64)
    coordinates = coordinates_of(parameters, natural)
    is_time = np.asarray([parameter.is_time for parameter in parameters])
    prior = np.asarray([0.0 if p.unit != "1" else noise / np.sqrt(p.variance) for p in parameters])
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        _, unravel = ravel_pytree(jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), start))
        starts = scattered(parameters, natural, searches)

        def fit_set(step: StepFeatures, ms: Any, weights: Any) -> tuple[AbstractCostModel, Any]:
            share = jnp.sqrt(weights / jnp.sum(weights))

            def speed(values: Any) -> Any:
                if not np.any(is_time):
                    return 1.0
                ratio = unravel(values)(step) / ms
                return jnp.sum(share**2 * ratio) / jnp.sum((share * ratio) ** 2)

            # As if the set were of the start's own speed: then one scale of the coordinates suits all sets.
            slower = speed(natural)

            def residuals(free: Any) -> Any:
                values = coordinates.natural(free)
                relative = share * relative_residuals(unravel(values)(step), ms / slower)
                return jnp.concatenate([relative, prior * (values - natural) / jnp.sqrt(jnp.sum(weights))])

            def search(values: Any) -> tuple[Any, Any]:
                values = jnp.where(is_time, values * speed(values) / slower, values)
                return _levenberg_marquardt(residuals, coordinates.free(values), max_iterations)

            ends, losses = jax.vmap(search)(starts)
            best = ends[jnp.argmin(jnp.where(jnp.isfinite(losses), losses, jnp.inf))]
            values = coordinates.natural(best)
            error = jnp.sqrt(jnp.sum(residuals(best)[: len(ms)] ** 2))
            return unravel(jnp.where(is_time, values * slower, values)), error

        fit_sets = jax.jit(jax.vmap(fit_set), compiler_options=quick_options())
        models, errors = fit_sets(_broadcast(steps, ms.shape), ms, weights)
        return ManyFits(jax.tree.map(np.asarray, models), np.asarray(errors))


def _broadcast(steps: StepFeatures, shape: tuple[int, ...]) -> StepFeatures:
    return jax.tree.map(lambda leaf: np.broadcast_to(np.asarray(leaf, np.float64), shape), steps)


def _levenberg_marquardt(residuals: Any, start: Float[Array, " p"], max_iterations: int) -> tuple[Any, Any]:
    """Where the sum of the squared residuals is least, and that sum."""
    jacobian = jax.jacfwd(residuals)

    def go_on(carry: Any) -> Any:
        *_, damping, gain, iterations = carry
        return (iterations < max_iterations) & (damping < _MOST_DAMPING) & (gain > _GAIN)

    def iterate(carry: Any) -> Any:
        x, loss, damping, gain, iterations = carry
        residual, slope = residuals(x), jacobian(x)
        curvature = slope.T @ slope
        # A parameter that no residual feels, such as a price that has gone to nothing, must not make it singular.
        scale = jnp.diag(jnp.diag(curvature) + 1e-12 * (1.0 + jnp.trace(curvature)))
        tried = x - jnp.linalg.solve(curvature + damping * scale, slope.T @ residual)
        reached = jnp.sum(residuals(tried) ** 2)
        taken = reached < loss
        return (
            jnp.where(taken, tried, x),
            jnp.where(taken, reached, loss),
            damping * jnp.where(taken, _TAKEN, _REFUSED),
            jnp.where(taken, (loss - reached) / (loss + 1e-30), gain),
            iterations + 1,
        )

    first = jnp.sum(residuals(start) ** 2)
    x, loss, *_ = jax.lax.while_loop(
        go_on, iterate, (start, first, jnp.asarray(_DAMPING), jnp.asarray(jnp.inf), jnp.asarray(0))
    )
    return x, loss
