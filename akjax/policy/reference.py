"""The reference policy: the level of most goodput, unless the current one is within a margin."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from akjax.arrays import Array
from akjax.policy.batch import batch_draft_length
from akjax.policy.model import AbstractPolicy, Decision, Prospect, check_levels
from akjax.policy.per_request import per_request_draft_lengths


class ReferencePolicy(AbstractPolicy[Int[Array, ""]]):
    """Takes the beliefs for what they say, and remembers the batch's draft length.

    Attributes:
        levels: the draft lengths that the batch may have, ascending, from 1.
        margin: relative gain below which the batch's draft length stays.
        per_request: whether each request gets a length of its own, in steps of two or more decoding requests.
    """

    levels: tuple[int, ...] = eqx.field(static=True, kw_only=True)
    margin: float = eqx.field(static=True, kw_only=True, default=0.03)
    per_request: bool = eqx.field(static=True, kw_only=True, default=False)

    def __check_init__(self) -> None:
        """Refuses levels that no step could have, and 0, which the rule does not know."""
        check_levels(self.levels, least=1)

    @property
    def counts_unobserved(self) -> bool:
        """No: it knows decoding requests only."""
        return False

    def init(self, draft_limit: int) -> Int[Array, ""]:
        """K, whether or not it is a level."""
        return jnp.asarray(draft_limit, jnp.int32)

    def draft_length(self, memory: Int[Array, ""]) -> Int[Array, ""]:
        """What it remembers."""
        return memory

    def is_sound(self, memory: Int[Array, ""], draft_limit: int) -> Bool[Array, ""]:
        """Whether it is a level, or K, with which it began."""
        return jnp.any(memory == np.asarray([*self.levels, draft_limit], np.int32))

    def choose(self, memory: Int[Array, ""], prospect: Prospect) -> tuple[Int[Array, ""], Decision]:
        """By `batch_draft_length` or, for two requests and more, by `per_request_draft_lengths`."""
        model, survival, decoding = prospect.cost.belief.model, prospect.drafts.survival, prospect.decoding
        of_batch = batch_draft_length(survival, decoding, model, self.levels, memory, self.margin)
        if not self.per_request:
            return of_batch, Decision(of_batch, None)
        own = per_request_draft_lengths(survival, decoding, model)
        each_its_own = jnp.sum(decoding) >= 2
        of_batch = jnp.where(each_its_own, memory, of_batch)
        largest = jnp.max(jnp.where(decoding, own, 1))
        return of_batch, Decision(
            draft_length=jnp.where(each_its_own, largest, of_batch),
            per_request=jnp.where(each_its_own, own, of_batch),
        )
