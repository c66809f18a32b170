"""Steps padded to the sizes that CUDA graphs were captured for, and what padding itself costs."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Float

from akjax.arrays import Array
from akjax.cost.model import AbstractCostModel
from akjax.features import StepFeatures
from akjax.parameter import Parameter, as_parameter


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
        _check_sizes(self.sizes)

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


class Unfilled(AbstractCostModel):
    """`model`, times `factor` for the steps that do not fill the captured graph that they run in.

    A graph's unused rows are not free: on an engine with graphs of 4, 8, 16, 24 and 32 tokens, steps of one to seven
    tokens fewer took about 3% longer than those that filled it, the same for each of the five (medians).

    Like `OwnPath`, it looks at the step as it is: `Unfilled(Padded(model, sizes), 1.0, sizes)`.

    Attributes:
        model: what the step would cost if it filled its graph.
        factor: ms of a step that does not, per ms of one that does.
        sizes: captured numbers of tokens, ascending. Steps of more than the last run in no graph.
    """

    model: AbstractCostModel
    factor: Float[Array, ""] = eqx.field(converter=as_parameter)
    sizes: tuple[int, ...] = eqx.field(static=True)

    def __check_init__(self) -> None:
        """Refuses no sizes, and sizes that are not positive or do not ascend."""
        _check_sizes(self.sizes)

    def __call__(self, step: StepFeatures) -> Float[Array, "*steps"]:
        """The model's ms, times the factor where the step's tokens are fewer than their graph's."""
        filled = jnp.greater(step.tokens, self.sizes[-1])
        for size in self.sizes:
            filled = filled | jnp.equal(step.tokens, size)
        return self.model(step) * jnp.where(filled, 1.0, self.factor)

    def parameters(self) -> tuple[Parameter, ...]:
        """The model's, then the factor."""
        return (*self.model.parameters(), Parameter("unfilled_factor", "1", variance=0.01, spread=0.1))


def _check_sizes(sizes: tuple[int, ...]) -> None:
    if not sizes or sizes[0] <= 0 or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"sizes must be positive and ascend, at least one and none twice, given {sizes}")
