"""A draft length of its own for each request."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from akjax.arrays import Array
from akjax.cost.model import AbstractCostModel, predicted_ms
from akjax.features import StepFeatures


def per_request_draft_lengths(
    survival: Float[Array, "n K"],
    decoding: Bool[Array, " n"],
    cost: AbstractCostModel,
    least: int = 1,
    step_of: Callable[[Float[Array, " budgets"], Float[Array, " budgets"]], StepFeatures] = StepFeatures,
) -> Int[Array, " n"]:
    """The draft lengths whose step has the most expected tokens per ms.

    Every draft that could be verified is worth its survival and costs one more token, so the best b drafts to verify
    are those most likely to survive: a request's are always its first ones, as survival falls with position. All
    budgets b are tried, and the first best is taken. Ties between drafts go to the earlier row, then the earlier
    position.

    Args:
        survival: P(draft i and all before it accepted) of each row.
        decoding: the rows that count; the others get `least`.
        cost: ms of the step.
        least: draft length that every row gets at least.
        step_of: the features of steps with these tokens and requests.

    Returns:
        The draft length of each row, from `least` to K.
    """
    rows, length = survival.shape
    requests = jnp.sum(decoding, dtype=survival.dtype)
    worth = jnp.where(decoding[:, None], survival, -1.0).reshape(-1)
    order = jnp.argsort(worth, stable=True, descending=True)
    budgets = jnp.arange(rows * length + 1, dtype=survival.dtype)
    expected_tokens = requests + jnp.concatenate([jnp.zeros(1, survival.dtype), jnp.cumsum(worth[order])])
    step = step_of(requests + budgets, jnp.broadcast_to(requests, budgets.shape))
    goodput = jnp.where(budgets <= requests * length, expected_tokens / predicted_ms(cost, step), -jnp.inf)
    within = jnp.arange(rows * length) < jnp.argmax(goodput)
    chosen = jnp.zeros(rows * length, jnp.int32).at[order].set(within.astype(jnp.int32), unique_indices=True)
    return jnp.maximum(jnp.sum(chosen.reshape(rows, length), axis=1, dtype=jnp.int32), least)
