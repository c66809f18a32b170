"""What every learner of step costs is: a belief about a cost model that measured steps change, or do not."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, PyTree

from akjax.arrays import Array
from akjax.cost.model import FLOOR_MS, AbstractCostModel
from akjax.ekf import Belief
from akjax.features import StepFeatures
from akjax.finite import all_finite

# Of a cost model's parameters.
Covariance = Float[np.ndarray, "p p"]
# Rate of the running mean of the relative prediction error.
ERROR_RATE = 0.05


class CostState(eqx.Module):
    """What is known of the cost of a step.

    Attributes:
        belief: the cost model and its covariance, in the learner's own coordinates.
        error: running mean of |measured - predicted| / predicted over the steps taught, from 0.
        taught: steps that taught the cost model.
        predicted_ms: of the last step, as it was predicted before it taught, whether or not it did; 0 before the first.
        memory: what else the learner keeps.
    """

    belief: Belief
    error: Float[Array, ""]
    taught: Int[Array, ""]
    predicted_ms: Float[Array, ""]
    memory: PyTree[Array]


class CostForecast(eqx.Module):
    """What some steps would cost.

    Attributes:
        log_ms: the logarithm of each step's milliseconds.
        covariance: of these logarithms: how wrong the model may be about each, and together.
    """

    log_ms: Float[Array, " steps"]
    covariance: Float[Array, "steps steps"]


class AbstractCostLearner(eqx.Module):
    """Learns a cost model from measured steps. A learner holds settings only; what it learns is in a `CostState`."""

    @property
    @abc.abstractmethod
    def learns(self) -> bool:
        """Whether any step changes the belief."""

    @property
    @abc.abstractmethod
    def expects_exact_times(self) -> bool:
        """Whether every time it is taught must be a step's own, prompts included; else it goes by their size itself."""

    @abc.abstractmethod
    def admits(self, step: Any) -> Any:
        """Whether the own time of such a step may teach at all, however long it is.

        Args:
            step: `StepFeatures`, or plain numbers of the same names.
        """

    @abc.abstractmethod
    def init(self, cost: AbstractCostModel, covariance: Covariance | None = None) -> CostState:
        """The state before any step was measured.

        Args:
            cost: where learning starts.
            covariance: of its parameters in their units, as a fit found it; None for the prior of the form alone.
        """

    @abc.abstractmethod
    def learn(self, state: CostState, step: StepFeatures, ms: Float[Array, ""], teaches: Bool[Array, ""]) -> CostState:
        """The state after a step of `ms` milliseconds; `teaches` says whether that is the step's own time."""

    @abc.abstractmethod
    def is_sound(self, state: CostState) -> Bool[Array, ""]:
        """Whether the state is one that learning can have made; see `belief_is_sound`."""

    @abc.abstractmethod
    def forecast(self, state: CostState, steps: StepFeatures) -> CostForecast:
        """What steps with these features, along one axis, would cost."""


def belief_is_sound(state: CostState) -> Bool[Array, ""]:
    """Whether all in the state is finite, every parameter's variance positive, and no count or error negative.

    No start is certain of a parameter, and no step of noise makes a filter certain of one.
    """
    certain = jnp.diagonal(state.belief.covariance) <= 0.0
    return all_finite(state) & ~jnp.any(certain) & (state.taught >= 0) & (state.error >= 0.0)


def predicted_log_ms(
    model: AbstractCostModel, step: StepFeatures, floor_ms: float = FLOOR_MS
) -> Float[Array, "*steps"]:
    """The logarithm of the step's predicted milliseconds, which are at least `floor_ms`."""
    return jnp.log(jnp.maximum(model(step), floor_ms))


def linear_forecast(
    log_ms: Callable[[Float[Array, " p"], StepFeatures], Float[Array, ""]],
    steps: StepFeatures,
    mean: Float[Array, " p"],
    covariance: Float[Array, "p p"],
) -> CostForecast:
    """What steps would cost by a belief about parameters, to first order about its mean.

    Args:
        log_ms: of a step, as a function of the parameters in the coordinates of the belief.
        steps: with these features, along one axis.
        mean: of the belief.
        covariance: of the belief.
    """
    leaves, features = jax.tree.flatten(steps)
    steps = jax.tree.unflatten(features, jnp.broadcast_arrays(*leaves))
    # Backwards, a step at a time: forwards each parameter would go through the model of every step.
    at_mean, slopes = jax.vmap(jax.value_and_grad(log_ms), in_axes=(None, 0))(mean, steps)
    return CostForecast(at_mean, slopes @ covariance @ slopes.T)


def both(prior: Covariance, fitted: Covariance) -> Covariance:
    """The covariance by two sources that know of each other nothing: no less sure than either."""
    return prior @ np.linalg.pinv(prior + fitted, hermitian=True) @ fitted


def counted(state: CostState, accepted: Bool[Array, ""], belief: Belief, relative_error: Float[Array, ""]) -> CostState:
    """`state` with the new belief, error and count where the step was accepted."""
    error = state.error + ERROR_RATE * (relative_error - state.error)
    taught = (belief, error, state.taught + 1)
    kept = (state.belief, state.error, state.taught)
    chosen = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), taught, kept)
    return eqx.tree_at(lambda s: (s.belief, s.error, s.taught), state, chosen)


def with_prediction(state: CostState, step: StepFeatures, predicted_ms: Float[Array, ""]) -> CostState:
    """`state` with what a step was predicted to take; without a step, which has no tokens, as it was."""
    kept = jnp.where(step.tokens > 0, predicted_ms, state.predicted_ms)
    return eqx.tree_at(lambda s: s.predicted_ms, state, kept)
