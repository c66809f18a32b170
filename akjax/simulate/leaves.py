"""How a scenario's numbers are held."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import ArrayLike, Float, Int

from akjax.arrays import Array

# Lists too, as `[[8], [32]]` reads better than an array.
Numbers = ArrayLike | Sequence[Any]


def as_real(value: Numbers) -> Float[Array, "..."]:
    """`value` in float64: times and amounts of work, which add up over a run."""
    return value if isinstance(value, jax.Array) else np.asarray(value, np.float64)  # pyright: ignore[reportReturnType]


def as_single(value: Numbers) -> Float[Array, "..."]:
    """`value` in float32: chances and logits, which need no more and are cheaper so."""
    return value if isinstance(value, jax.Array) else np.asarray(value, np.float32)  # pyright: ignore[reportReturnType]


def as_count(value: Numbers) -> Int[Array, "..."]:
    """`value` in int32: tokens and requests."""
    return value if isinstance(value, jax.Array) else np.asarray(value, np.int32)  # pyright: ignore[reportReturnType]
