"""Reading and computing at the same time: a step takes the longer of the two, and a little of the other."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Float

from akjax.arrays import Array
from akjax.cost.model import AbstractCostModel
from akjax.features import StepFeatures
from akjax.parameter import Parameter, as_parameter


def smooth_maximum(
    one: Float[Array, "*steps"], other: Float[Array, "*steps"], softness: Float[Array, ""]
) -> Float[Array, "*steps"]:
    """`(one**p + other**p)**(1/p)` with `p = 1/softness`: how long two kinds of work take that overlap in part.

    What it has to be follows from what it is of. The unit of time must not matter, so it is homogeneous; the order in
    which a third and a fourth kind of work come in must not either, so it is commutative and associative. With
    continuity that leaves the p-norms and their limit (Bohnenblust, Duke Mathematical J. 6, 1940; Aczel, Lectures on
    Functional Equations, 1966, ch. 6.2). At softness 1 it is the sum, as if nothing overlapped; towards 0, and at 0
    itself, the maximum, as if everything did. It lies above the maximum by at most the factor `2**softness`, where
    both are equal.

    Args:
        one: ms, 0 or more.
        other: ms, 0 or more.
        softness: from 0 to 1.
    """
    longer, shorter = jnp.maximum(one, other), jnp.minimum(one, other)
    # Neither the ratio of nothing to nothing nor a power of infinity may reach a gradient.
    ratio = shorter / jnp.where(longer > 0, longer, 1.0)
    soft = softness > 0
    power = 1.0 / jnp.where(soft, softness, 1.0)
    return longer * jnp.where(soft, jnp.exp(softness * jnp.log1p(ratio**power)), 1.0)


class Roofline(AbstractCostModel):
    """The smooth maximum of what a step reads and what it computes.

    The roofline model (Williams, Waterman & Patterson, Communications of the ACM 52(4), 2009): memory and arithmetic
    work at the same time, so the slower of the two sets the pace. Few tokens are bound by the weights they read, many
    by their arithmetic. Real steps turn from one to the other gradually: their layers do so at different batches, and
    loads and arithmetic do not overlap in full.

    Attributes:
        reading: ms of memory traffic alone.
        computing: ms of arithmetic alone.
        softness: of the turn, 0 for a sharp one, 1 for the sum of both: see `smooth_maximum`.
    """

    reading: AbstractCostModel
    computing: AbstractCostModel
    softness: Float[Array, ""] = eqx.field(converter=as_parameter)

    def __call__(self, step: StepFeatures) -> Float[Array, "*steps"]:
        """The smooth maximum."""
        return smooth_maximum(self.reading(step), self.computing(step), self.softness)

    def parameters(self) -> tuple[Parameter, ...]:
        """Those of reading, those of computing, then the softness."""
        softness = Parameter("softness", "1", variance=0.02, lower=0.01, upper=1.0, spread=0.5)
        return (*self.reading.parameters(), *self.computing.parameters(), softness)
