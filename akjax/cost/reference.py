"""The cost forms that serving starts from."""

from akjax.cost.experts import DiverseTokens, ExpertReads
from akjax.cost.linear import Constant, PerToken
from akjax.cost.model import AbstractCostModel


def reference_cost(base: float, per_expert: float, per_token: float, *, experts: int, top_k: int) -> AbstractCostModel:
    """The cost of a Mixture-of-Experts step, `base + per_expert * experts(diversity * t) + per_token * t`.

    Starts at diversity 1, tokens that route independently.

    Args:
        base: ms of any step.
        per_expert: ms per distinct expert touched.
        per_token: ms per verified token.
        experts: routed experts of a layer.
        top_k: experts a token picks.
    """
    return Constant(base) + ExpertReads(per_expert, DiverseTokens(1.0, experts, top_k)) + PerToken(per_token)


def dense_cost(base: float, per_token: float) -> AbstractCostModel:
    """The cost of a dense model's step, `base + per_token * t`: no experts to read."""
    return Constant(base) + PerToken(per_token)
