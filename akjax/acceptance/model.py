"""What every acceptance model is: how likely each draft of a request is to be accepted, learned as it serves."""

import abc
from typing import Generic, TypeVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Float, Int

from akjax.arrays import Array

Pool = TypeVar("Pool")
Request = TypeVar("Request")


class AbstractAcceptanceModel(eqx.Module, Generic[Pool, Request]):
    """Learns P(draft i accepted | draft i-1 accepted) for i = 0..K-1, for each request and for all of them together.

    A model holds hyperparameters only. What it learns is in two pytrees of arrays that it makes and updates: the
    pool, shared by all requests, and one state for each request.
    """

    @abc.abstractmethod
    def init_pool(self, draft_length: int) -> Pool:
        """The pool before any observation, for at most `draft_length` (K) drafts."""

    @abc.abstractmethod
    def init_request(self, pool: Pool) -> Request:
        """A request's state before its first observation."""

    @abc.abstractmethod
    def observe(
        self, pool: Pool, request: Request, drafted: Int[Array, ""], accepted: Int[Array, ""]
    ) -> tuple[Pool, Request]:
        """Both, after `accepted` of the `drafted` drafts were: 0 <= accepted <= drafted, 1 <= drafted <= K."""

    @abc.abstractmethod
    def conditional_rates(self, pool: Pool, request: Request) -> Float[Array, " K"]:
        """P(draft i accepted | draft i-1 accepted) of the request's next drafts."""


def survival(rates: Float[Array, "*batch K"]) -> Float[Array, "*batch K"]:
    """P(draft i and all before it accepted): the running product of conditional rates."""
    return jnp.cumprod(rates, axis=-1)
