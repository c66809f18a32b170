"""Fits a cost model to measured steps, all at once."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Float

from akjax.arrays import Array
from akjax.cost import AbstractCostModel
from akjax.features import StepFeatures

# How far inside a parameter's bounds a search begins, as a share of their distance.
_INSIDE = 1e-3


class CostFit(NamedTuple):
    """A fitted cost model.

    Attributes:
        model: with the fitted parameters.
        relative_error: root mean square of (predicted - measured) / measured over the steps.
        iterations: that it took.
        converged: whether the gradient vanished; if not, more iterations may fit better.
    """

    model: AbstractCostModel
    relative_error: float
    iterations: int
    converged: bool


def fit_cost(
    start: AbstractCostModel,
    steps: StepFeatures,
    ms: Float[Array, " steps"],
    *,
    max_iterations: int = 1000,
    tolerance: float = 1e-9,
) -> CostFit:
    """The parameters of `start`'s form with the least squares of the relative error, within the form's bounds.

    By L-BFGS with exact gradients (Nocedal & Wright, Numerical Optimization, 2006, ch. 7), from `start`, in float64.
    Each parameter is scaled by its prior spread, or if both its bounds are finite mapped onto the whole line by a
    logistic function.

    Args:
        start: the form, and where the search begins.
        steps: the features of the measured steps, along one axis.
        ms: that they took.
        max_iterations: after which to give up.
        tolerance: of the gradient's largest element, in the scaled parameters.

    Raises:
        ValueError: no steps, features of other shapes than `ms` or not finite, a time that is not positive and finite,
            or a form with a parameter that is bounded on one side only.
    """
    measured = np.asarray(ms, np.float64)
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(steps)]
    fits = np.shape(steps.tokens) == measured.shape and all(shape in (measured.shape, ()) for shape in shapes)
    if measured.ndim != 1 or not measured.size or not fits:
        raise ValueError(f"features and ms must have one equal axis, given shapes {shapes} and {measured.shape}")
    if not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(steps)):
        raise ValueError("every feature must be finite")
    if not np.all(np.isfinite(measured) & (measured > 0)):
        raise ValueError("every ms must be positive and finite")
    for parameter in start.parameters():
        if np.isfinite(parameter.lower) != np.isfinite(parameter.upper):
            raise ValueError(f"{parameter.name} is bounded on one side only, which no fit keeps to; bound the other")
    # optax mixes int32 with int64, which a process with strict promotion would refuse.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        features = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), steps)
        values, unravel = ravel_pytree(jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), start))
        scaled, natural = _scaling(start, values)

        def loss(z: Float[Array, " p"]) -> Float[Array, ""]:
            return jnp.mean(((unravel(natural(z))(features) - measured) / measured) ** 2)

        z, iterations, largest = jax.jit(lambda z: _minimise(loss, z, max_iterations, tolerance))(scaled)
        model = jax.tree.map(np.asarray, unravel(natural(z)))
        return CostFit(model, float(jnp.sqrt(loss(z))), int(iterations), bool(largest <= tolerance))


def _scaling(start: AbstractCostModel, values: Float[Array, " p"]) -> tuple[Float[Array, " p"], Any]:
    """Where the search begins in scaled parameters, and the way back from scaled to natural ones."""
    parameters = start.parameters()
    lower = np.asarray([parameter.lower for parameter in parameters])
    upper = np.asarray([parameter.upper for parameter in parameters])
    spread = np.sqrt([parameter.variance for parameter in parameters])
    bounded = np.isfinite(lower) & np.isfinite(upper)
    low, width = np.where(bounded, lower, 0.0), np.where(bounded, upper - lower, 1.0)
    # On a bound itself, where the filter may have clipped it, the logistic function has no way back inside.
    share = jnp.where(bounded, jnp.clip((values - low) / width, _INSIDE, 1 - _INSIDE), 0.5)

    def natural(z: Float[Array, " p"]) -> Float[Array, " p"]:
        return jnp.where(bounded, low + width * jax.nn.sigmoid(z), values + spread * z)

    return jnp.where(bounded, jax.scipy.special.logit(share), 0.0), natural


def _minimise(loss: Any, start: Float[Array, " p"], max_iterations: int, tolerance: float) -> Any:
    """The minimum, the iterations it took, and the gradient's largest element there."""
    solver = optax.lbfgs()
    value_and_gradient = optax.value_and_grad_from_state(loss)

    def go_on(carry: Any) -> Any:
        _, _, gradient, iterations = carry
        return (jnp.max(jnp.abs(gradient)) > tolerance) & (iterations < max_iterations)

    def iterate(carry: Any) -> Any:
        z, state, _, iterations = carry
        value, gradient = value_and_gradient(z, state=state)
        updates, state = solver.update(gradient, state, z, value=value, grad=gradient, value_fn=loss)
        z = optax.apply_updates(z, updates)
        return z, state, optax.tree.get(state, "grad"), iterations + 1

    z, _, gradient, iterations = jax.lax.while_loop(
        go_on, iterate, (start, solver.init(start), jnp.full_like(start, jnp.inf), jnp.asarray(0))
    )
    return z, iterations, jnp.max(jnp.abs(gradient))
