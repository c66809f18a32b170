"""How measured steps teach a cost model."""

from akjax.learner.fixed import FixedCost
from akjax.learner.innovation_gate import InnovationGate
from akjax.learner.model import AbstractCostLearner, CostForecast, CostState, Covariance, predicted_log_ms
from akjax.learner.ratio_gate import RatioGate

__all__ = [
    "AbstractCostLearner",
    "CostForecast",
    "CostState",
    "Covariance",
    "FixedCost",
    "InnovationGate",
    "RatioGate",
    "predicted_log_ms",
]
