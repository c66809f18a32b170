"""Whether numbers are numbers."""

import operator

import jax
import jax.numpy as jnp
from jaxtyping import Bool, PyTree

from akjax.arrays import Array


def all_finite(tree: PyTree[Array]) -> Bool[Array, ""]:
    """Whether no number in the tree's arrays is infinite or NaN. Traceable."""
    return jax.tree.reduce(operator.and_, jax.tree.map(lambda leaf: jnp.all(jnp.isfinite(leaf)), tree))
