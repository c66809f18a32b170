"""Steps padded to the sizes that CUDA graphs were captured for."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Float

from akjax.arrays import Array
from akjax.cost.model import AbstractCostModel
from akjax.features import StepFeatures
from akjax.parameter import Parameter


class Padded(AbstractCostModel):
    """`model` of the step's tokens rounded up to the next captured size; above the largest they stay as they are.

    A captured graph runs for its own number of tokens, so a step of fewer costs as much. The other features are not
    padded. Terms that depend on the step's own tokens belong outside: wrap `Padded` inside an `OwnPath` or a
    `ByDraftLength`, not around it.

    Attributes:
        model: what a step of a captured size costs.
        sizes: captured numbers of tokens, ascending.
    """

    model: AbstractCostModel
    sizes: tuple[int, ...] = eqx.field(static=True)

    def __check_init__(self) -> None:
        """Refuses no sizes, and sizes that are not positive or do not ascend."""
        if not self.sizes or self.sizes[0] <= 0 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes must be positive and ascend, at least one and none twice, given {self.sizes}")

    def __call__(self, step: StepFeatures) -> Float[Array, "*steps"]:
        """The model's ms at the padded number of tokens."""
        sizes = jnp.asarray(self.sizes, jnp.result_type(step.tokens))
        # Unrolled, a search of 8 or 64 steps among 50 sizes takes the least time on a CPU, and no loop of XLA's.
        size = jnp.searchsorted(sizes, step.tokens, method="scan_unrolled")
        captured = size < len(self.sizes)
        padded = jnp.where(captured, sizes[jnp.minimum(size, len(self.sizes) - 1)], step.tokens)
        return self.model(dataclasses.replace(step, tokens=padded))

    def parameters(self) -> tuple[Parameter, ...]:
        """The model's: padding has none of its own."""
        return self.model.parameters()
