"""What a form gets wrong at each draft length, learned where that length is served."""

import itertools

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Float

from akjax.arrays import Array
from akjax.cost.model import AbstractCostModel
from akjax.features import StepFeatures
from akjax.parameter import Parameter, as_parameter


class ByDraftLength(AbstractCostModel):
    """`model`, times a factor that depends on the drafts verified per request.

    The factor is linear between the lengths and constant beyond both ends. No form is right everywhere; one that
    learns at a draft length that is served for long would bend its other parameters until it is right there, and
    with them what it says of the other lengths. Here that error goes into the factor of the length itself, and the
    factors of lengths never served keep their uncertainty.

    Starts as `model` alone with factors of 1: `ByDraftLength(model, np.ones(len(lengths)), lengths)`.

    Attributes:
        model: what the step costs before the correction.
        factors: at each length.
        lengths: drafts per request, ascending.
        spread: standard deviation of a factor's prior, relative.
        spread_undrafted: the same at length 0, where a step runs other kernels and skips most of the drafter.
        log_drift: variance that a factor's logarithm gains at each step that teaches.
    """

    model: AbstractCostModel
    factors: Float[Array, " lengths"] = eqx.field(converter=as_parameter)
    lengths: tuple[int, ...] = eqx.field(static=True)
    spread: float = eqx.field(default=0.05, static=True)
    spread_undrafted: float = eqx.field(default=0.25, static=True)
    log_drift: float = eqx.field(default=0.0, static=True)

    def __check_init__(self) -> None:
        """Refuses no lengths, lengths that are negative or do not ascend, and other than one factor for each."""
        if not self.lengths or self.lengths[0] < 0 or list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(
                f"draft lengths must be 0 or more and ascend, at least one and none twice, given {self.lengths}"
            )
        if len(self.lengths) != self.factors.shape[0]:
            raise ValueError(f"one factor is needed for each of the draft lengths {self.lengths}, given {self.factors}")

    def __call__(self, step: StepFeatures) -> Float[Array, "*steps"]:
        """The model's ms, times the factor at the step's drafts per request, or 1 if it takes in prompts.

        Requests in prefill have no drafts, so of a step with prompts the drafts per request say little.
        """
        # A step without requests is padding: it must not turn the batch's gradient into NaN.
        drafts = (step.tokens - step.requests) / jnp.maximum(step.requests, 1.0)
        return self.model(step) * jnp.where(jnp.equal(step.prefill, 0), self._factor(drafts), 1.0)

    def parameters(self) -> tuple[Parameter, ...]:
        """The model's, then the factors, one for each length."""
        spreads = (self.spread if length else self.spread_undrafted for length in self.lengths)
        own = (
            Parameter(f"factor_at_{length}", "1", variance=spread**2, spread=spread, log_drift=self.log_drift)
            for length, spread in zip(self.lengths, spreads, strict=True)
        )
        return (*self.model.parameters(), *own)

    def _factor(self, drafts: Float[Array, "*steps"]) -> Float[Array, "*steps"]:
        # The sum of the rises up to `drafts`: half the time of `jnp.interp` for a batch on a CPU. Away from its own
        # segment a share is exactly 0 or 1, so a step teaches the factors at the two lengths around it and no other.
        factor = jnp.broadcast_to(self.factors[0], jnp.shape(drafts))
        for at, (low, high) in enumerate(itertools.pairwise(self.lengths)):
            share = jnp.clip((drafts - low) / (high - low), 0.0, 1.0)
            factor = factor + share * (self.factors[at + 1] - self.factors[at])
        return factor
