"""A cost that no step changes."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Bool, Float

from akjax.arrays import Array
from akjax.cost.model import AbstractCostModel, predicted_ms
from akjax.ekf import prior_belief
from akjax.features import StepFeatures
from akjax.learner.model import (
    AbstractCostLearner,
    CostForecast,
    CostState,
    Covariance,
    belief_is_sound,
    predicted_log_ms,
    with_prediction,
)


class FixedCost(AbstractCostLearner):
    """Keeps the cost model as it was given, and takes it for certain."""

    @property
    def learns(self) -> bool:
        """No."""
        return False

    @property
    def expects_exact_times(self) -> bool:
        """No."""
        return False

    def admits(self, step: Any) -> Any:
        """No."""
        return False

    def init(self, cost: AbstractCostModel, covariance: Covariance | None = None) -> CostState:
        """The model as it stands."""
        return CostState(prior_belief(cost), jnp.zeros(()), jnp.zeros((), jnp.int32), jnp.zeros(()), ())

    def learn(self, state: CostState, step: StepFeatures, ms: Float[Array, ""], teaches: Bool[Array, ""]) -> CostState:
        """The same state, but for the prediction."""
        return with_prediction(state, step, predicted_ms(state.belief.model, step))

    def is_sound(self, state: CostState) -> Bool[Array, ""]:
        """By the belief."""
        return belief_is_sound(state)

    def forecast(self, state: CostState, steps: StepFeatures) -> CostForecast:
        """The model's predictions, without doubt."""
        log_ms = predicted_log_ms(state.belief.model, steps)
        return CostForecast(log_ms, jnp.zeros((*log_ms.shape, *log_ms.shape), log_ms.dtype))
