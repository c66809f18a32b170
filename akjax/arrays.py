"""What stands for an array in a type."""

from typing import TYPE_CHECKING

import jax
import numpy as np

if TYPE_CHECKING:
    from jax import Array as Array
else:
    # NumPy's count too: models are built from them, so that describing one touches no JAX backend.
    Array = jax.Array | np.ndarray | np.generic
