"""Reading the weights of the routed experts that a step's tokens touch."""

import abc
import math

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Float

from akjax.arrays import Array
from akjax.cost.model import AbstractCostModel
from akjax.features import StepFeatures
from akjax.parameter import Parameter, as_parameter


class AbstractExpertUnion(eqx.Module):
    """How many distinct experts of a layer the tokens of a step touch together. Array leaves are parameters."""

    @abc.abstractmethod
    def __call__(self, step: StepFeatures) -> Float[Array, "*steps"]:
        """Experts touched, between 0 and the layer's number of experts."""

    @abc.abstractmethod
    def parameters(self) -> tuple[Parameter, ...]:
        """One entry for each scalar of the array leaves, in their order."""


class DiverseTokens(AbstractExpertUnion):
    """`E * (1 - (1 - top_k/E)**(diversity * tokens))`: the union of `diversity * tokens` independent tokens.

    A token leaves a given expert untouched with probability 1 - top_k/E, so n independent tokens all do with the
    n-th power of it (the coupon collector's expectation). Tokens of a batch are not independent: text that routes
    alike counts as fewer tokens, diversity < 1.

    Attributes:
        diversity: independent tokens per token. The text's own, so it drifts while serving.
        experts: routed experts of a layer (E).
        top_k: experts a token picks.
    """

    diversity: Float[Array, ""] = eqx.field(converter=as_parameter)
    experts: int = eqx.field(static=True)
    top_k: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        """Refuses a layer that cannot be."""
        if not 0 < self.top_k <= self.experts:
            raise ValueError(f"top_k={self.top_k} must lie between 1 and experts={self.experts}")

    def __call__(self, step: StepFeatures) -> Float[Array, "*steps"]:
        """The expected union; `expm1` and `log1p` keep it exact when top_k/E is small."""
        if self.top_k == self.experts:
            # Every token touches all of them; the formula's gradient there is 0 * inf.
            return jnp.full_like(step.tokens, self.experts)
        log_untouched = math.log1p(-self.top_k / self.experts)
        return -self.experts * jnp.expm1(self.diversity * step.tokens * log_untouched)

    def parameters(self) -> tuple[Parameter, ...]:
        """The diversity."""
        return (Parameter("diversity", "1", variance=0.1, drift=2e-3, lower=0.05, upper=2.0),)


class ExpertReads(AbstractCostModel):
    """`per_expert` ms for each expert of a layer that the step touches, whatever the rule of the union.

    Attributes:
        per_expert: ms per distinct expert touched (all layers together).
        union: how many experts the step touches.
    """

    per_expert: Float[Array, ""] = eqx.field(converter=as_parameter)
    union: AbstractExpertUnion

    def __call__(self, step: StepFeatures) -> Float[Array, "*steps"]:
        """`per_expert * union`."""
        return self.per_expert * self.union(step)

    def parameters(self) -> tuple[Parameter, ...]:
        """The price of an expert, then the union's own parameters."""
        return (Parameter("per_expert", "ms/expert", variance=4e-4), *self.union.parameters())
