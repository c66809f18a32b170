"""A cost that no step changes."""

import jax.numpy as jnp
from jaxtyping import Bool, Float

from akjax.arrays import Array
from akjax.cost.model import AbstractCostModel
from akjax.ekf import prior_belief
from akjax.features import StepFeatures
from akjax.learner.model import AbstractCostLearner, CostForecast, CostState, predicted_log_ms


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

    def init(self, cost: AbstractCostModel) -> CostState:
        """The model as it stands."""
        return CostState(prior_belief(cost), jnp.zeros(()), jnp.zeros((), jnp.int32), ())

    def learn(self, state: CostState, step: StepFeatures, ms: Float[Array, ""], teaches: Bool[Array, ""]) -> CostState:
        """The same state."""
        return state

    def forecast(self, state: CostState, steps: StepFeatures) -> CostForecast:
        """The model's predictions, without doubt."""
        log_ms = predicted_log_ms(state.belief.model, steps)
        return CostForecast(log_ms, jnp.zeros((*log_ms.shape, *log_ms.shape), log_ms.dtype))
