"""Whether a matrix of numbers from outside is a covariance."""

import numpy as np
from jaxtyping import Float

# Of the correlation's eigenvalues: below 0 by no more than rounding.
_ROUNDING = 1e-6


def is_covariance(matrix: Float[np.ndarray, "p p"]) -> bool:
    """Whether all is finite and no combination of the variables has a negative variance, rounding apart."""
    if not np.all(np.isfinite(matrix)):
        return False
    scale = np.sqrt(np.maximum(np.diag(matrix), 1e-300))
    with np.errstate(over="ignore"):
        correlation = matrix / np.outer(scale, scale)
    # The eigenvalues of what is not finite are NaN, and NaN is not negative.
    possible = np.all(np.diag(matrix) >= 0) and np.all(np.isfinite(correlation))
    return bool(possible and np.min(np.linalg.eigvalsh(correlation), initial=0.0) >= -_ROUNDING)
