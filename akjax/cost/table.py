"""A cost measured at a few token counts, with straight lines between them."""

import math
from collections.abc import Iterable

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from akjax.arrays import Array
from akjax.cost.model import AbstractCostModel
from akjax.features import StepFeatures
from akjax.parameter import Parameter, as_parameter


class CostTable(AbstractCostModel):
    """Linear between points; the first point's value below them, the last segment's slope above.

    The last segment's slope is 0 if there is one point only, or if the last two stand at the same token count. Where
    points stand at the same token count, the last of them holds there.

    Attributes:
        ms: at each point.
        tokens: of each point, ascending.
    """

    ms: Float[Array, " points"] = eqx.field(converter=as_parameter)
    tokens: tuple[float, ...] = eqx.field(static=True)

    def __check_init__(self) -> None:
        """Refuses an empty table, and points out of order."""
        if not self.tokens or len(self.tokens) != self.ms.shape[0]:
            raise ValueError(f"a table needs one ms for each token count, given {self.tokens} and {self.ms}")
        if list(self.tokens) != sorted(self.tokens):
            raise ValueError(f"the token counts of a table must ascend, given {self.tokens}")

    def __call__(self, step: StepFeatures) -> Float[Array, "*steps"]:
        """The value of the line that the step's tokens lie on."""
        tokens = np.asarray(self.tokens, np.float64)
        widths = np.diff(tokens)
        rises = jnp.diff(self.ms)
        # Two points at one token count have no slope between them; a safe divisor keeps the gradient finite.
        slopes = jnp.where(widths > 0, rises / np.where(widths > 0, widths, 1.0), 0.0)
        # The line from each point on: the last one keeps the slope of the segment before it.
        slopes = jnp.concatenate([slopes, slopes[-1:] if len(widths) else jnp.zeros(1)])
        point = jnp.maximum(jnp.searchsorted(tokens, step.tokens, side="right") - 1, 0)
        beyond = jnp.maximum(step.tokens - jnp.asarray(tokens)[point], 0.0)
        return self.ms[point] + beyond * slopes[point]

    def parameters(self) -> tuple[Parameter, ...]:
        """One for each point, each as uncertain as a constant cost."""
        # By its token count alone where it can be, so that a fit finds the same point in another table.
        names = (
            f"ms_at_{tokens:.12g}" + (f"_{point}" if self.tokens.count(tokens) > 1 else "")
            for point, tokens in enumerate(self.tokens)
        )
        return tuple(Parameter(name, "ms", variance=25.0) for name in names)


def table_from_points(points: Iterable[tuple[float, float]]) -> CostTable:
    """The table through (tokens, ms) points in any order.

    Raises:
        ValueError: no point at all, or one that is not positive and finite.
    """
    ordered = sorted(points)
    if not ordered:
        raise ValueError("at least one tokens:ms point is needed")
    for tokens, ms in ordered:
        if not (math.isfinite(tokens) and math.isfinite(ms) and tokens > 0 and ms > 0):
            raise ValueError(f"tokens and ms must be positive and finite, given {tokens:g}:{ms:g}")
    return CostTable(np.asarray([ms for _, ms in ordered]), tuple(tokens for tokens, _ in ordered))


def parse_table(spec: str) -> CostTable:
    """The table written as "tokens:ms,tokens:ms,...", in any order.

    Raises:
        ValueError: an entry that is not tokens:ms, or what `table_from_points` refuses.
    """
    return table_from_points(_parse_point(entry) for entry in spec.split(",") if spec.strip())


def _parse_point(entry: str) -> tuple[float, float]:
    tokens, _, ms = entry.partition(":")
    try:
        # Without a colon `ms` is empty, which is no number either.
        return float(tokens), float(ms)
    except ValueError:
        raise ValueError(f"an entry must read tokens:ms, given {entry.strip()!r}") from None
