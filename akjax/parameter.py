"""What is known of a model's parameters, and how they are held."""

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import ArrayLike, Float

from akjax.arrays import Array


@dataclass(frozen=True)
class Parameter:
    """What is known of one scalar parameter before any data.

    Two filters learn parameters: the reference filter in their own units, by `variance` and `drift`; the log filter
    in logarithms, by `spread` and `log_drift`.

    Attributes:
        name: unique within its form, in the words of reports and logs.
        unit: of the parameter, such as "ms" or "ms/token"; "1" if it has none.
        variance: of the prior around the starting value, in the unit squared.
        drift: variance added at each step that teaches: 0 for what does not change while serving.
        lower: least value that learning allows.
        upper: greatest value that learning allows.
        spread: standard deviation of the prior of its logarithm, apart from the speed of the machine, which all
            parameters in ms share. None for a parameter that need not be positive: its own value is learned instead.
        log_drift: variance that its logarithm gains at each step that teaches.
    """

    name: str
    unit: str
    variance: float
    drift: float = 0.0
    lower: float = -np.inf
    upper: float = np.inf
    spread: float | None = 0.5
    log_drift: float = 0.0

    @property
    def is_time(self) -> bool:
        """Whether a machine that is twice as slow has twice the value."""
        return self.unit.split("/")[0] == "ms"


def as_parameter(value: ArrayLike) -> Float[Array, "..."]:
    """`value` as a leaf that learning can change: float64, unless it is a JAX array or tracer already.

    NumPy and not JAX makes it, so that building a model touches no JAX backend and needs no global x64 flag.
    """
    return value if isinstance(value, jax.Array) else np.asarray(value, np.float64)  # pyright: ignore[reportReturnType]
