"""One draft length for the whole batch."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from akjax.arrays import Array
from akjax.cost.model import AbstractCostModel, predicted_ms
from akjax.features import StepFeatures
from akjax.policy.first_best import first_best


def batch_draft_length(
    survival: Float[Array, "n K"],
    decoding: Bool[Array, " n"],
    cost: AbstractCostModel,
    levels: tuple[int, ...],
    current: Int[Array, ""],
    margin: Float[Array, ""] | float,
) -> Int[Array, ""]:
    """The level with the most expected tokens per ms, unless the current one is nearly as good.

    Each of the n decoding requests yields 1 + the sum of its first k survivals tokens, and the step verifies
    n * (k + 1). The goodput of a level is the ratio of the two, tokens per ms.

    Args:
        survival: P(draft i and all before it accepted) of each row.
        decoding: the rows that count.
        cost: ms of the step.
        levels: the draft lengths that may be chosen, ascending, each at most K.
        current: the draft length that stays if the best level is not better by more than `margin`, relatively, or
            if no request is decoding. A current length that is no level gives way to the best.
        margin: relative gain below which a change does not pay.
    """
    requests = jnp.sum(decoding, dtype=survival.dtype)
    lengths = np.asarray(levels, current.dtype)
    per_draft = jnp.sum(jnp.where(decoding[:, None], survival, 0.0), axis=0)
    expected_tokens = requests + jnp.cumsum(per_draft)[lengths - 1]
    step = StepFeatures(
        tokens=requests * (lengths + 1).astype(survival.dtype), requests=jnp.broadcast_to(requests, lengths.shape)
    )
    goodput = expected_tokens / predicted_ms(cost, step)

    best = first_best(goodput)
    is_current = lengths == current
    # A length that is no level has goodput -inf, so that any level beats it.
    current_goodput = jnp.max(jnp.where(is_current, goodput, -jnp.inf))
    changes = (requests > 0) & (goodput[best] > current_goodput * (1.0 + margin))
    return jnp.where(changes, jnp.asarray(lengths)[best], current)
