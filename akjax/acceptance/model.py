"""What every acceptance model is: how likely each draft of a request is to be accepted, learned as it serves."""

import abc
from typing import Generic, TypeVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from akjax.arrays import Array
from akjax.features import StepFeatures

Pool = TypeVar("Pool")
Request = TypeVar("Request")


class Verified(eqx.Module):
    """What became of the drafts of some requests in a step, in the output's order; for one mode, or for all of them.

    Attributes:
        drafted: drafts verified, from 1 to K.
        accepted: of them, from 0 to `drafted`.
        counts: whether the row is a request at all, and one that this state is to learn from.
        fresh: whether it is the request's first observation, so that its state is yet to be made.
        apart: whether its drafts tell of itself and not of others, as where its sampling is of its own kind.
    """

    drafted: Int[Array, " n *modes"]
    accepted: Int[Array, " n *modes"]
    counts: Bool[Array, " n *modes"]
    fresh: Bool[Array, " n *modes"]
    apart: Bool[Array, " n *modes"]


class DraftForecast(eqx.Module):
    """What is believed of the next drafts of some requests.

    Attributes:
        survival: P(draft i and all before it accepted).
        upside: one standard deviation of that, upwards, from what the current draft length cannot tell; 0 where a
            model does not know how sure it is.
        afresh: the survival of any request's if all had changed since drafts were last tested, and was as it was at
            first.
        changed: the chance of that.
    """

    survival: Float[Array, "n K"]
    upside: Float[Array, "n K"]
    afresh: Float[Array, " K"]
    changed: Float[Array, " n"]


class AbstractAcceptanceModel(eqx.Module, Generic[Pool, Request]):
    """Learns which drafts get accepted, for each request and for all of them together.

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
    def observe_step(
        self, pool: Pool, requests: Request, verified: Verified, step: StepFeatures
    ) -> tuple[Pool, Request]:
        """Both, after a step's output; `requests` has a row for each row of `verified`.

        A `step` without requests stands for no output at all, and nothing may change.
        """

    @abc.abstractmethod
    def pool_is_sound(self, pool: Pool) -> Bool[Array, ""]:
        """Whether the pool is one that observations can have made: its numbers finite, its rates rates."""

    @abc.abstractmethod
    def request_is_sound(self, request: Request) -> Bool[Array, ""]:
        """The same of a request's state."""

    @abc.abstractmethod
    def forecast(
        self, pools: Pool, requests: Request, of: Int[Array, " n"], draft_length: Int[Array, ""]
    ) -> DraftForecast:
        """What is believed of the next drafts of requests, a row each.

        Args:
            pools: along a leading axis.
            requests: the state of each row.
            of: the pool that each row belongs to.
            draft_length: the batch's at present: what it verifies will be known anyway.
        """


def survival(rates: Float[Array, "*batch K"]) -> Float[Array, "*batch K"]:
    """P(draft i and all before it accepted): the running product of conditional rates."""
    return jnp.cumprod(rates, axis=-1)
