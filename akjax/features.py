"""What a cost model may know of a step before it runs."""

import equinox as eqx
from jaxtyping import Float

from akjax.arrays import Array


class StepFeatures(eqx.Module):
    """What is known of a decode step before it runs, for one step or a batch of them.

    Every field has the same shape, `()` for one step; a cost model maps it to milliseconds of that shape.

    Attributes:
        tokens: verified tokens of the step: the sum over its requests of 1 + drafts.
        requests: requests in the step.
    """

    tokens: Float[Array, "*steps"]
    requests: Float[Array, "*steps"]
