"""What every cost model is: a differentiable map from a step's features to its milliseconds."""

import abc

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Float

from akjax.arrays import Array
from akjax.features import StepFeatures
from akjax.parameter import Parameter

# No step is faster: below it a ratio of measured to predicted ms says nothing, and a learned model far from its
# data could otherwise predict zero or negative time.
FLOOR_MS = 1.0


class AbstractCostModel(eqx.Module):
    """Milliseconds of a step, as a differentiable function of its features.

    The array leaves of a model, in the order of `jax.tree.leaves`, are its parameters; everything else is static.
    Models add up: `Constant(27.0) + PerToken(0.5)`.
    """

    @abc.abstractmethod
    def __call__(self, step: StepFeatures) -> Float[Array, "*steps"]:
        """The step's predicted milliseconds, without the floor."""

    @abc.abstractmethod
    def parameters(self) -> tuple[Parameter, ...]:
        """One entry for each scalar of the array leaves, in their order."""

    def __add__(self, other: "AbstractCostModel") -> "Sum":
        """The model whose cost is the sum of both."""
        return Sum((*terms_of(self), *terms_of(other)))


class Sum(AbstractCostModel):
    """The sum of its terms."""

    terms: tuple[AbstractCostModel, ...]

    def __call__(self, step: StepFeatures) -> Float[Array, "*steps"]:
        """The sum of the terms' milliseconds."""
        first, *rest = (term(step) for term in self.terms)
        return sum(rest, start=first)

    def parameters(self) -> tuple[Parameter, ...]:
        """The terms' parameters, one term after the other."""
        return tuple(parameter for term in self.terms for parameter in term.parameters())


def terms_of(model: AbstractCostModel) -> tuple[AbstractCostModel, ...]:
    """The terms of a sum, or the model itself as the only one."""
    return model.terms if isinstance(model, Sum) else (model,)


def predicted_ms(model: AbstractCostModel, step: StepFeatures) -> Float[Array, "*steps"]:
    """The step's predicted milliseconds, at least `FLOOR_MS`."""
    return jnp.maximum(model(step), FLOOR_MS)
