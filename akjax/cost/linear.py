"""Costs that do not depend on the step, or grow with its tokens in a straight line."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Float

from akjax.arrays import Array
from akjax.cost.model import AbstractCostModel
from akjax.features import StepFeatures
from akjax.parameter import Parameter, as_parameter


class Constant(AbstractCostModel):
    """What every step costs: weights that any token reads, launches, the host.

    Attributes:
        base: ms.
    """

    base: Float[Array, ""] = eqx.field(converter=as_parameter)

    def __call__(self, step: StepFeatures) -> Float[Array, "*steps"]:
        """`base` for every step."""
        return jnp.broadcast_to(self.base, jnp.shape(step.tokens))

    def parameters(self) -> tuple[Parameter, ...]:
        """The base."""
        return (Parameter("base", "ms", variance=25.0),)


class PerToken(AbstractCostModel):
    """What each verified token costs: arithmetic, attention, sampling.

    Attributes:
        per_token: ms per verified token.
    """

    per_token: Float[Array, ""] = eqx.field(converter=as_parameter)

    def __call__(self, step: StepFeatures) -> Float[Array, "*steps"]:
        """`per_token * tokens`."""
        return self.per_token * step.tokens

    def parameters(self) -> tuple[Parameter, ...]:
        """The slope."""
        return (Parameter("per_token", "ms/token", variance=4e-3),)
