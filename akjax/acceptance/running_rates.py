"""The reference acceptance model: running rates, a request's own and the pool's."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from akjax.acceptance.model import AbstractAcceptanceModel, DraftForecast, Verified, survival
from akjax.arrays import Array
from akjax.features import StepFeatures
from akjax.parameter import as_parameter


class RunningRates(AbstractAcceptanceModel[Float[Array, " K"], Float[Array, " K"]]):
    """Exponential averages of each position's outcomes; a rejection says nothing of the positions after it.

    The pool and a request's state are both K conditional rates; a request starts as a copy of the pool. When all
    drafts were accepted, deeper positions were not tested: the request's move towards the pool's, shifted by the
    lead it showed at the last tested position, and the pool's drift towards that position, so that a depth left
    unused for long is tried again.

    Attributes:
        alpha: rate of a request's averages.
        global_alpha: rate of the pool's.
        global_drift: rate at which the pool's untested positions drift.
        prior: every rate of the pool before any observation.
    """

    alpha: Float[Array, ""] = eqx.field(default=0.25, converter=as_parameter)
    global_alpha: Float[Array, ""] = eqx.field(default=0.05, converter=as_parameter)
    global_drift: Float[Array, ""] = eqx.field(default=0.01, converter=as_parameter)
    prior: Float[Array, ""] = eqx.field(default=0.8, converter=as_parameter)

    def init_pool(self, draft_length: int) -> Float[Array, " K"]:
        """`prior` at every position."""
        return jnp.broadcast_to(self.prior, draft_length)

    def init_request(self, pool: Float[Array, " K"]) -> Float[Array, " K"]:
        """A copy of the pool's rates."""
        return pool

    def observe(
        self,
        pool: Float[Array, " K"],
        request: Float[Array, " K"],
        drafted: Int[Array, ""],
        accepted: Int[Array, ""],
    ) -> tuple[Float[Array, " K"], Float[Array, " K"]]:
        """Moves the tested positions, then, if all drafts were accepted, the untested ones."""
        position = jnp.arange(pool.shape[0], dtype=drafted.dtype)
        all_accepted = accepted == drafted

        def tested(rates: Float[Array, " K"], rate: Float[Array, ""]) -> Float[Array, " K"]:
            missing = jnp.where(position < accepted, 1.0 - rates, 0.0)
            excess = jnp.where((position == accepted) & ~all_accepted, rates, 0.0)
            return rates + rate * (missing - excess)

        request, pool = tested(request, self.alpha), tested(pool, self.global_alpha)
        untested = all_accepted & (position >= drafted)
        last = jnp.maximum(drafted - 1, 0)
        expected = jnp.clip(pool + (request[last] - pool[last]), 0.0, 1.0)
        request = request + jnp.where(untested, self.alpha * (expected - request), 0.0)
        pool = pool + jnp.where(untested, self.global_drift * (pool[last] - pool), 0.0)
        return pool, request

    def observe_step(
        self,
        pool: Float[Array, " K"],
        requests: Float[Array, "n K"],
        verified: Verified,
        step: StepFeatures,
    ) -> tuple[Float[Array, " K"], Float[Array, "n K"]]:
        """One request after the other: each moves the pool that the next ones are compared with."""

        def one(
            pool: Float[Array, " K"], row: tuple[Float[Array, " K"], Verified]
        ) -> tuple[Float[Array, " K"], Float[Array, " K"]]:
            request, seen = row
            known = jnp.where(seen.fresh, self.init_request(pool), request)
            new_pool, new_request = self.observe(pool, known, seen.drafted, seen.accepted)
            return jnp.where(seen.counts, new_pool, pool), jnp.where(seen.counts, new_request, request)

        return jax.lax.scan(one, pool, (requests, verified))

    def pool_is_sound(self, pool: Float[Array, " K"]) -> Bool[Array, ""]:
        """Whether every rate is between 0 and 1."""
        return jnp.all((pool >= 0.0) & (pool <= 1.0))

    def request_is_sound(self, request: Float[Array, " K"]) -> Bool[Array, ""]:
        """Whether every rate is between 0 and 1."""
        return self.pool_is_sound(request)

    def forecast(
        self,
        pools: Float[Array, "modes K"],
        requests: Float[Array, "n K"],
        of: Int[Array, " n"],
        draft_length: Int[Array, ""],
    ) -> DraftForecast:
        """By the requests' own rates, which do not say how sure they are."""
        alive = survival(requests)
        rows, length = alive.shape
        return DraftForecast(
            survival=alive,
            upside=jnp.zeros_like(alive),
            afresh=survival(self.init_pool(length)),
            changed=jnp.zeros(rows),
        )
