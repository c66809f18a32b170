"""Pytrees of arrays laid out in one flat vector, since each array that crosses into a compiled call costs time."""

import math
from itertools import pairwise
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from akjax.arrays import Array

Tree = TypeVar("Tree")


class Layout(Generic[Tree]):
    """Where each array of a pytree lies in one flat float64 vector.

    Integers and booleans travel as floats, exactly up to 2**53.

    Attributes:
        size: of the vector.
    """

    def __init__(self, tree: Tree) -> None:
        """The layout of `tree`, whose leaves are arrays or anything with a shape and a dtype."""
        places, self._treedef = jax.tree.flatten_with_path(tree)
        leaves = [leaf for _, leaf in places]
        self._names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in places]
        self._shapes = [leaf.shape for leaf in leaves]
        self._dtypes = [leaf.dtype for leaf in leaves]
        ends = np.cumsum([0] + [math.prod(shape) for shape in self._shapes]).tolist()
        self._slices = [slice(start, end) for start, end in pairwise(ends)]
        self.size = ends[-1]

    def views(self, flat: Float[np.ndarray, " size"]) -> Tree:
        """The tree whose leaves are float64 views into `flat`: writing to them fills the vector."""
        return self._rebuild(
            [flat[where].reshape(shape) for where, shape in zip(self._slices, self._shapes, strict=True)]
        )

    def named(self, flat: Float[np.ndarray, " size"]) -> dict[str, Float[np.ndarray, "..."]]:
        """The views by name, such as `cost.belief.covariance`: where each stands in the tree."""
        return dict(zip(self._names, jax.tree.leaves(self.views(flat)), strict=True))

    def slices(self) -> Any:
        """The tree with the place of each array in the vector instead of it."""
        return self._rebuild(self._slices)

    def unpack(self, flat: Float[Array, " size"]) -> Tree:
        """The tree held by `flat`, each leaf of its own dtype. Traceable."""
        return self._rebuild(
            [
                flat[where].reshape(shape).astype(dtype)
                for where, shape, dtype in zip(self._slices, self._shapes, self._dtypes, strict=True)
            ]
        )

    def pack(self, tree: Tree) -> Float[Array, " size"]:
        """The vector that holds `tree`. Traceable."""
        leaves = jax.tree.leaves(tree)
        return jnp.concatenate([jnp.ravel(leaf).astype(jnp.float64) for leaf in leaves])

    def _rebuild(self, leaves: list[Any]) -> Tree:
        return jax.tree.unflatten(self._treedef, leaves)
