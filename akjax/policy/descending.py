"""A sort without a sort: compared pairs alone, for where the values matter and not where they came from."""

import jax.numpy as jnp
from jaxtyping import Float

from akjax.arrays import Array


def descending(values: Float[Array, " n"]) -> Float[Array, " n"]:
    """The values in descending order.

    By the bitonic network (Batcher, Sorting networks and their applications, AFIPS 1968). It compares the same places
    whatever the values, so each of its layers is an operation on whole arrays, which takes a CPU a quarter of a
    nanosecond a value. `jnp.sort` takes several times as long as the whole network on a thousand values, and is
    a call of a library, which would keep all that is around it from becoming one kernel: see `akjax.one_kernel`.
    """
    (count,) = values.shape
    base, lists = _lists_for(count)
    padded = jnp.pad(values, (0, base * lists - count), constant_values=-jnp.inf)
    # Down the columns, so that the innermost loop runs along many lists as long as those are short.
    columns = _triples_in_order(padded.reshape(base, lists)) if base == 3 else padded.reshape(base, lists)
    while columns.shape[1] > 1:
        columns = _merged(columns, base)
    return columns.reshape(-1)[:count]


def _lists_for(count: int) -> tuple[int, int]:
    """The length of the lists to begin with, 1 or 3, and how many: a power of two, and together at least `count`."""
    lists = 1 << max(count - 1, 0).bit_length()
    return (3, lists // 4) if lists >= 4 and count <= 3 * lists // 4 else (1, lists)


def _merged(columns: Float[Array, "a m"], base: int) -> Float[Array, "b l"]:
    """Columns in descending order, those of the one half with those of the other."""
    length, lists = columns.shape[0], columns.shape[1] // 2
    # Down and up again: of such a sequence the larger of opposite pairs are one themselves, and so are the smaller.
    merged = jnp.concatenate(_compared(columns[:, :lists], columns[::-1, lists:]))
    while length > base:
        length //= 2
        blocks = merged.reshape(-1, 2, length, lists)
        merged = jnp.stack(_compared(blocks[:, 0], blocks[:, 1]), axis=1).reshape(-1, lists)
    return _triples_in_order(merged) if base == 3 else merged


def _triples_in_order(columns: Float[Array, "a m"]) -> Float[Array, "a m"]:
    """Each three values below each other in descending order."""
    triples = columns.reshape(-1, 3, columns.shape[1])
    larger, smaller = _compared(triples[:, 0], triples[:, 1])
    first, rest = _compared(larger, triples[:, 2])
    second, third = _compared(smaller, rest)
    return jnp.stack([first, second, third], axis=1).reshape(columns.shape)


def _compared(a: Float[Array, "..."], b: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """The larger and the smaller of each pair."""
    # The maximum of JAX looks for NaN too, which takes longer.
    is_first = a > b
    return jnp.where(is_first, a, b), jnp.where(is_first, b, a)
