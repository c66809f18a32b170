"""The reference learner: an extended Kalman filter in the parameters' own units, and a gate by the size of the time."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Bool, Float

from akjax.arrays import Array
from akjax.cost.model import AbstractCostModel
from akjax.ekf import Belief, prior_belief, update
from akjax.features import StepFeatures
from akjax.learner.model import (
    AbstractCostLearner,
    CostForecast,
    CostState,
    Covariance,
    belief_is_sound,
    both,
    counted,
    linear_forecast,
    predicted_log_ms,
    with_prediction,
)


class RatioGate(AbstractCostLearner):
    """A step teaches if it took between half its prediction and twice that plus 20 ms.

    Attributes:
        relative_noise: of a step's time, for the filter.
    """

    relative_noise: float = eqx.field(static=True, default=0.05)

    @property
    def learns(self) -> bool:
        """Yes."""
        return True

    @property
    def expects_exact_times(self) -> bool:
        """No."""
        return False

    def admits(self, step: Any) -> Any:
        """Yes."""
        return True

    def init(self, cost: AbstractCostModel, covariance: Covariance | None = None) -> CostState:
        """The model and its prior, or what a fit has made of it."""
        belief = prior_belief(cost)
        if covariance is not None:
            both_ways = both(np.asarray(belief.covariance), covariance)
            belief = Belief(belief.model, jnp.asarray(both_ways))
        return CostState(belief, jnp.zeros(()), jnp.zeros((), jnp.int32), jnp.zeros(()), ())

    def learn(self, state: CostState, step: StepFeatures, ms: Float[Array, ""], teaches: Bool[Array, ""]) -> CostState:
        """One step of `akjax.ekf.update`, if the step is let in."""
        belief, innovation = update(state.belief, step, ms, self.relative_noise)
        predicted = innovation.predicted
        near = (0.5 * predicted < ms) & (ms < 2.0 * predicted + 20.0)
        state = counted(state, teaches & near, belief, jnp.abs(innovation.residual) / predicted)
        return with_prediction(state, step, predicted)

    def is_sound(self, state: CostState) -> Bool[Array, ""]:
        """By the belief."""
        return belief_is_sound(state)

    def forecast(self, state: CostState, steps: StepFeatures) -> CostForecast:
        """Predictions, and their covariance to first order."""
        mean, unravel = ravel_pytree(state.belief.model)

        return linear_forecast(lambda x, step: predicted_log_ms(unravel(x), step), steps, mean, state.belief.covariance)
