"""Steps that take another path through the engine than the others."""

from typing import Literal, get_args

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Bool, Float

from akjax.arrays import Array
from akjax.cost.model import AbstractCostModel
from akjax.features import StepFeatures
from akjax.parameter import Parameter, as_parameter

When = Literal["one_token", "undrafted", "uneven"]


class OwnPath(AbstractCostModel):
    """`model`, times `factor` for the steps that run other kernels or outside the captured graphs.

    A factor and not a term: what differs is the rate at which the path does the same work. It looks at the step as it
    is, so a `Padded` belongs inside `model`: around it, one token padded to two would no longer be one.

    Attributes:
        model: what the step would cost on the common path.
        factor: ms on the own path per ms on the common one.
        when: which steps take the own path: "one_token", those of a single token; "undrafted", those that verify no
            drafts; "uneven", those whose requests verify different numbers of drafts. None of them takes in prompts:
            such a step runs on the path of prompts.
    """

    model: AbstractCostModel
    factor: Float[Array, ""] = eqx.field(converter=as_parameter)
    when: When = eqx.field(static=True)

    def __check_init__(self) -> None:
        """Refuses a path that is not known."""
        if self.when not in get_args(When):
            raise ValueError(f"when={self.when!r} must be one of {', '.join(get_args(When))}")

    def __call__(self, step: StepFeatures) -> Float[Array, "*steps"]:
        """The model's ms, times the factor where the step takes the own path."""
        # The choice is between factors and not between costs: then no branch is left whose gradient could leak.
        return self.model(step) * jnp.where(self._holds(step), self.factor, 1.0)

    def parameters(self) -> tuple[Parameter, ...]:
        """The model's, then the factor."""
        return (*self.model.parameters(), Parameter(f"{self.when}_factor", "1", variance=0.25, spread=0.5))

    def _holds(self, step: StepFeatures) -> Bool[Array, "..."]:
        decodes_only = jnp.equal(step.prefill, 0)
        if self.when == "one_token":
            return decodes_only & jnp.equal(step.tokens, 1)
        if self.when == "undrafted":
            return decodes_only & jnp.equal(step.tokens, step.requests)
        return decodes_only & jnp.not_equal(step.uneven, 0)
