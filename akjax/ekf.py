"""One extended Kalman filter that learns the parameters of any cost model from measured steps."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float

from akjax.arrays import Array
from akjax.cost.model import FLOOR_MS, AbstractCostModel
from akjax.features import StepFeatures


class Belief(eqx.Module):
    """A cost model and how sure its parameters are.

    Attributes:
        model: at the mean of the belief.
        covariance: of the parameters, in the order of `model.parameters()`, in their units.
    """

    model: AbstractCostModel
    covariance: Float[Array, "p p"]


class Innovation(eqx.Module):
    """What a measured step said against what was believed before it.

    Attributes:
        predicted: ms, floored at `FLOOR_MS`.
        residual: measured - predicted, ms.
        variance: of the residual as the filter expected it, ms squared.
    """

    predicted: Float[Array, ""]
    residual: Float[Array, ""]
    variance: Float[Array, ""]


def prior_belief(model: AbstractCostModel) -> Belief:
    """`model` as it stands, each parameter as uncertain as its form says, none correlated with another.

    Raises:
        ValueError: the model names more or fewer parameters than it has scalars in array leaves.
    """
    parameters = model.parameters()
    scalars = sum(np.size(leaf) for leaf in jax.tree.leaves(model))
    if scalars != len(parameters):
        names = ", ".join(parameter.name for parameter in parameters)
        raise ValueError(f"{type(model).__name__} has {scalars} scalars in array leaves, but names: {names}")
    return Belief(model, np.diag([parameter.variance for parameter in parameters]))  # pyright: ignore[reportArgumentType]


def update(
    belief: Belief, step: StepFeatures, ms: Float[Array, ""], relative_noise: float = 0.05
) -> tuple[Belief, Innovation]:
    """The belief after a step of `ms` milliseconds was measured.

    A standard extended Kalman step (Anderson & Moore, Optimal Filtering, 1979, ch. 8) for one scalar observation:
    the parameters' drift is added to the covariance, the model is linearised at the mean by autodiff, and the
    bounds are kept by clipping. The observation's noise is `relative_noise * predicted`: steps vary in proportion
    to their length. The covariance is updated in Joseph's form, which stays positive under rounding.

    Needs float64: call it under `jax.enable_x64(True)`, or the parameters are rounded to float32.

    The prediction has the floor and the gradient has not: at the floor a step that takes longer still says which
    way the parameters have to go.
    """
    mean, unravel = ravel_pytree(belief.model)
    parameters = belief.model.parameters()
    drift = np.diag([parameter.drift for parameter in parameters])
    lower = np.asarray([parameter.lower for parameter in parameters])
    upper = np.asarray([parameter.upper for parameter in parameters])

    unfloored, gradient = jax.value_and_grad(lambda x: unravel(x)(step))(mean)
    predicted = jnp.maximum(unfloored, FLOOR_MS)
    prior = belief.covariance + drift
    noise = (relative_noise * predicted) ** 2
    variance = gradient @ prior @ gradient + noise
    gain = prior @ gradient / variance
    residual = ms - predicted

    mean = jnp.clip(mean + gain * residual, lower, upper)
    keep = jnp.eye(len(parameters)) - jnp.outer(gain, gradient)
    covariance = keep @ prior @ keep.T + noise * jnp.outer(gain, gain)
    return Belief(unravel(mean), covariance), Innovation(predicted, residual, variance)
