"""What is known of a model's parameters, and how they are held."""

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import ArrayLike, Float

from akjax.arrays import Array


@dataclass(frozen=True)
class Parameter:
    """What is known of one scalar parameter before any data.

    Attributes:
        name: unique within its form, in the words of reports and logs.
        unit: of the parameter, such as "ms" or "ms/token".
        variance: of the prior around the starting value, in the unit squared.
        drift: variance added at each step that teaches: 0 for what does not change while serving.
        lower: least value that learning allows.
        upper: greatest value that learning allows.
    """

    name: str
    unit: str
    variance: float
    drift: float = 0.0
    lower: float = -np.inf
    upper: float = np.inf


def as_parameter(value: ArrayLike) -> Float[Array, "..."]:
    """`value` as a leaf that learning can change: float64, unless it is a JAX array or tracer already.

    NumPy and not JAX makes it, so that building a model touches no JAX backend and needs no global x64 flag.
    """
    return value if isinstance(value, jax.Array) else np.asarray(value, np.float64)  # pyright: ignore[reportReturnType]
