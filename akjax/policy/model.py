"""What every policy is: it turns beliefs about drafts and costs into draft lengths."""

import abc
from typing import Generic, TypeVar

import equinox as eqx
from jaxtyping import Bool, Float, Int

from akjax.acceptance import DraftForecast
from akjax.arrays import Array
from akjax.learner import AbstractCostLearner, CostState

Memory = TypeVar("Memory")


class Prospect(eqx.Module):
    """What a policy chooses by.

    Attributes:
        drafts: what is believed of the next drafts of each row.
        decoding: the rows that are requests.
        context: KV tokens that the next step will read.
        learner: of the cost.
        cost: its state.
    """

    drafts: DraftForecast
    decoding: Bool[Array, " n"]
    context: Float[Array, ""]
    learner: AbstractCostLearner
    cost: CostState


class Decision(eqx.Module):
    """How many drafts to verify next.

    Attributes:
        draft_length: for the whole batch: the largest of `per_request` if the step has lengths of its own.
        per_request: of each request of the batch, or None if the policy never chooses them.
    """

    draft_length: Int[Array, ""]
    per_request: Int[Array, " n"] | None


class AbstractPolicy(eqx.Module, Generic[Memory]):
    """Chooses draft lengths, for the batch or for each request.

    Attributes:
        levels: the draft lengths that the batch may have, ascending.
        per_request: whether requests may get lengths of their own.
    """

    levels: eqx.AbstractVar[tuple[int, ...]]
    per_request: eqx.AbstractVar[bool]

    @property
    @abc.abstractmethod
    def counts_unobserved(self) -> bool:
        """Whether requests that were never observed are rows too, as they will be in the next step."""

    @abc.abstractmethod
    def init(self, draft_limit: int) -> Memory:
        """What the policy remembers before its first choice."""

    @abc.abstractmethod
    def draft_length(self, memory: Memory) -> Int[Array, ""]:
        """The draft length that the batch has now."""

    @abc.abstractmethod
    def is_sound(self, memory: Memory, draft_limit: int) -> Bool[Array, ""]:
        """Whether the memory is one that choosing can have made, from `init` of the same `draft_limit` on."""

    @abc.abstractmethod
    def choose(self, memory: Memory, prospect: Prospect) -> tuple[Memory, Decision]:
        """The draft lengths of the next step."""


def check_levels(levels: tuple[int, ...], least: int) -> None:
    """Refuses levels that no step could have.

    Raises:
        ValueError: none, not ascending, or one below `least`.
    """
    if not levels or list(levels) != sorted({*levels}):
        raise ValueError(f"levels must be distinct and ascending, given {levels}")
    if levels[0] < least:
        raise ValueError(f"levels must be at least {least}, given {levels}")
