"""What a cost model may know of a step before it runs."""

import equinox as eqx
import numpy as np
from jaxtyping import Float

from akjax.arrays import Array


def _none() -> Float[Array, ""]:
    return np.zeros(())  # pyright: ignore[reportReturnType]


class StepFeatures(eqx.Module):
    """What is known of a step before it runs, for one step or a batch of them.

    A cost model maps it to milliseconds of the shape of `tokens`, `()` for one step. The other fields have the same
    shape, or `()` where all steps share the value; those left out are 0.

    Attributes:
        tokens: verified tokens of the step: the sum over its requests of 1 + drafts. A request in prefill counts as 1.
        requests: requests in the step.
        drafting: drafts that the drafter makes for each request in the step, to be verified in the next one.
        context: KV tokens that the step reads, summed over its requests.
        prefill: tokens of prompts that the step takes in, beyond the one of each request that `tokens` counts.
        uneven: 1 if its requests verify different numbers of drafts, else 0.
    """

    tokens: Float[Array, "*steps"]
    requests: Float[Array, "*steps"]
    drafting: Float[Array, "..."] = eqx.field(default_factory=_none)
    context: Float[Array, "..."] = eqx.field(default_factory=_none)
    prefill: Float[Array, "..."] = eqx.field(default_factory=_none)
    uneven: Float[Array, "..."] = eqx.field(default_factory=_none)
