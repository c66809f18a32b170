"""A draft length of its own for each request."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from akjax.arrays import Array
from akjax.cost.model import AbstractCostModel, predicted_ms
from akjax.features import StepFeatures
from akjax.policy.descending import descending
from akjax.policy.first_best import first_best


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
    worth = jnp.where(decoding[:, None], survival, -1.0)
    falling = descending(worth.reshape(-1))
    budgets = jnp.arange(rows * length + 1, dtype=survival.dtype)
    ms = predicted_ms(cost, step_of(requests + budgets, jnp.broadcast_to(requests, budgets.shape)))
    # Without any draft apart from the rest: joined to them, it would keep a CPU from dividing several numbers at once.
    goodput = jnp.where(budgets[1:] <= requests * length, (requests + jnp.cumsum(falling)) / ms[1:], -jnp.inf)
    budget = jnp.where(requests / ms[0] < jnp.max(goodput), first_best(goodput) + 1, 0)
    return jnp.maximum(_first_of(worth, falling, budget), least)


def _first_of(worth: Float[Array, "n K"], falling: Float[Array, " drafts"], budget: Int[Array, ""]) -> Int[Array, " n"]:
    """How many of each row are among the `budget` largest, ties going to the earlier row; `falling` is all in order.

    The smallest of those says it all: what is above it belongs to them, and as many of its equals as are left. So
    nothing needs to know where in the order a draft went.
    """
    smallest = falling[jnp.maximum(budget - 1, 0)]
    above = jnp.sum(worth > smallest, axis=1, dtype=jnp.int32)
    equal = jnp.sum(worth == smallest, axis=1, dtype=jnp.int32)
    earlier = jnp.cumsum(equal, dtype=jnp.int32) - equal
    left = budget - jnp.sum(above, dtype=jnp.int32) - earlier
    # Without a budget the smallest is the largest of all, above which there is none.
    return above + jnp.clip(left, 0, equal)
