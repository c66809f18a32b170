"""An acceptance model that knows how sure it is: a filter over the logits of each position's acceptance."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from akjax.acceptance.model import AbstractAcceptanceModel, DraftForecast, Verified
from akjax.arrays import Array
from akjax.features import StepFeatures
from akjax.finite import all_finite

# Gauss-Hermite quadrature of three points for a standard normal variable: exact for polynomials up to degree 5.
NODES = np.sqrt(3.0) * np.array([-1.0, 0.0, 1.0])
WEIGHTS = np.array([1.0, 4.0, 1.0]) / 6.0
# What a step leaves of the surprise of those before it, and the surprise, in standard deviations, that is no chance.
SURPRISE_DECAY = 0.8
SURPRISE_LIMIT = 4.0
# The change of a logit beyond which a step's output counts for less.
LONGEST_STEP = 2.0


class PoolLogits(eqx.Module):
    """Logit of P(draft i accepted | draft i-1 accepted) over all requests.

    Attributes:
        mean: of each position.
        covariance: of the positions.
        surprise: fading sum of the steps' scores, each in its expected standard deviations; itself of variance 1 if
            the pool is right.
        untested: steps since any draft of this pool was tested.
        steps: that this pool has seen.
        jumps: abrupt changes in them.
        alone: steps since a request that was not apart had a draft tested.
    """

    mean: Float[Array, "*modes K"]
    covariance: Float[Array, "*modes K K"]
    surprise: Float[Array, "*modes"]
    untested: Float[Array, "*modes"]
    steps: Float[Array, "*modes"]
    jumps: Float[Array, "*modes"]
    alone: Float[Array, "*modes"]


class RequestLead(eqx.Module):
    """By how much a request's logits lie above the pool's, at all positions alike.

    Attributes:
        mean: of the lead.
        variance: of it.
    """

    mean: Float[Array, "*n"]
    variance: Float[Array, "*n"]


class LogitFilter(AbstractAcceptanceModel[PoolLogits, RequestLead]):
    """A dynamic logistic model: logit P(draft i of request r) = pool_i + lead_r.

    Text that is easy for the drafter is easy at every position, so one number tells a request from the rest, and
    every tested position teaches it at once; a running average for each position needs several times the steps for
    the same certainty. The pool's positions move together (`shared_spread`) and each a little on its own
    (`own_spread`), which is how a short draft length keeps the longer ones up to date.

    Both drift. A lead forgets within `lead_steps`: an Ornstein-Uhlenbeck process about 0, as text that is easy now will
    be ordinary again. The pool's uncertainty grows back within `pool_steps` to what it was at first and no further,
    and its mean stays where it was seen last: a pull towards the prior would count drafts as good for being untested.

    Some changes are no drift: another kind of text, a drafter that fails or recovers. A lasting surprise to one side
    therefore widens the pool's common logit by `jump_spread` at once. Without drafts there is nothing to be surprised
    by; then the chance that all is as it was at first grows with every step, at the rate at which such changes have
    happened so far, which is what brings drafts back.

    An observation is a Bernoulli trial at each tested position, taken in as a Gaussian one by its score and
    information at the mean (West, Harrison & Migon, J. American Statistical Association 80, 1985; Fahrmeir, J.
    American Statistical Association 87, 1992). The pool sees each request's lead as noise, and the lead the pool's.
    All requests of a step are taken in together. Those that are apart have leads as all others have, and teach the pool
    only where nobody else has for `apart_steps`: an engine may have no other requests.

    Attributes:
        prior: acceptance at every position before any observation.
        shared_spread: standard deviation of the pool's common logit.
        own_spread: of each position's own, besides.
        lead_spread: of the requests' leads.
        pool_steps: steps after which the pool's uncertainty has grown back, all but 1/e.
        jump_spread: standard deviation of an abrupt change of the pool's common logit.
        jump_steps: steps in which one such change is expected beforehand.
        lead_steps: steps after which a request has lost all but 1/e of its lead.
        apart_steps: steps without any other request after which those apart teach the pool.
    """

    prior: float = eqx.field(static=True, default=0.8)
    shared_spread: float = eqx.field(static=True, default=1.0)
    own_spread: float = eqx.field(static=True, default=0.4)
    lead_spread: float = eqx.field(static=True, default=0.5)
    pool_steps: float = eqx.field(static=True, default=3000.0)
    jump_spread: float = eqx.field(static=True, default=2.0)
    jump_steps: float = eqx.field(static=True, default=1000.0)
    lead_steps: float = eqx.field(static=True, default=30.0)
    apart_steps: float = eqx.field(static=True, default=30.0)

    def __check_init__(self) -> None:
        """Refuses a prior that is no probability strictly between 0 and 1."""
        if not 0 < self.prior < 1:
            raise ValueError(f"the prior acceptance must lie between 0 and 1, given {self.prior}")

    def init_pool(self, draft_length: int) -> PoolLogits:
        """Every position at `prior`."""
        return PoolLogits(
            mean=jnp.full(draft_length, np.log(self.prior / (1.0 - self.prior))),
            covariance=jnp.asarray(self._first_covariance(draft_length)),
            surprise=jnp.zeros(()),
            untested=jnp.zeros(()),
            steps=jnp.zeros(()),
            jumps=jnp.zeros(()),
            alone=jnp.zeros(()),
        )

    def init_request(self, pool: PoolLogits) -> RequestLead:
        """No lead."""
        return RequestLead(mean=jnp.zeros(()), variance=jnp.full((), self.lead_spread**2))

    def observe_step(
        self, pool: PoolLogits, requests: RequestLead, verified: Verified, step: StepFeatures
    ) -> tuple[PoolLogits, RequestLead]:
        """A step passes for the pool, and for the requests that were verified in it; then both learn."""
        length = pool.mean.shape[0]
        passed = jnp.where(step.requests > 0, 1.0, 0.0)
        others = verified.counts & ~verified.apart
        teach = jnp.where(pool.alone < self.apart_steps, others, verified.counts)
        pool = eqx.tree_at(
            lambda p: (p.covariance, p.untested, p.steps, p.alone),
            pool,
            (
                jnp.where(passed > 0.0, self._drifted(pool.covariance), pool.covariance),
                jnp.where(jnp.any(teach), 0.0, pool.untested + passed),
                pool.steps + passed,
                jnp.where(jnp.any(others), 0.0, pool.alone + passed),
            ),
        )
        keep = np.exp(-2.0 / self.lead_steps)
        lead = jnp.where(verified.fresh, 0.0, np.sqrt(keep) * requests.mean)
        variance = jnp.where(
            verified.fresh, self.lead_spread**2, keep * requests.variance + (1.0 - keep) * self.lead_spread**2
        )

        position = np.arange(length, dtype=np.int32)[None, :]
        accepted = position < verified.accepted[:, None]
        tested = (accepted | (position < verified.drafted[:, None]) & (position == verified.accepted[:, None])) & (
            verified.counts[:, None]
        )
        chance = jax.nn.sigmoid(pool.mean[None, :] + lead[:, None])
        score = jnp.where(tested, jnp.where(accepted, 1.0, 0.0) - chance, 0.0)
        information = jnp.where(tested, chance * (1.0 - chance), 0.0)
        total_score, total_information = jnp.sum(score, axis=1), jnp.sum(information, axis=1)

        # With the lead integrated out (Sherman-Morrison), a request says that much less of the pool.
        weight = jnp.where(teach, 1.0 / (1.0 + variance * total_information), 0.0)
        pool = self._surprised(pool, weight @ total_score, weight @ total_information)
        learned = _condition(pool, weight @ score, weight @ information)
        # Near 0 and 1 a trial has next to no information at the mean, and the step that it asks for goes far beyond
        # where that holds. Then it counts for less, in the mean and in the certainty alike.
        longest = jnp.max(jnp.abs(learned.mean - pool.mean))
        weight = weight * LONGEST_STEP / jnp.maximum(longest, LONGEST_STEP)
        learned = _condition(pool, weight @ score, weight @ information)

        # How unsure the pool was at what was tested here, seen as one common logit.
        unsure = jnp.sum(information * jnp.diag(pool.covariance)[None, :], axis=1) / jnp.maximum(
            total_information, 1e-12
        )
        posterior = 1.0 / (1.0 / variance + total_information / (1.0 + unsure * total_information))
        lead = lead + posterior * total_score / (1.0 + unsure * total_information)
        return learned, RequestLead(
            mean=jnp.where(verified.counts, lead, requests.mean),
            variance=jnp.where(verified.counts, posterior, requests.variance),
        )

    def pool_is_sound(self, pool: PoolLogits) -> Bool[Array, ""]:
        """Whether all is finite, no variance is negative, and nothing was counted below 0."""
        counted = jnp.minimum(jnp.minimum(pool.untested, pool.steps), jnp.minimum(pool.jumps, pool.alone))
        return all_finite(pool) & jnp.all(jnp.diagonal(pool.covariance) >= 0.0) & (counted >= 0.0)

    def request_is_sound(self, request: RequestLead) -> Bool[Array, ""]:
        """Whether the lead is finite and its variance not negative."""
        return all_finite(request) & (request.variance >= 0.0)

    def forecast(
        self, pools: PoolLogits, requests: RequestLead, of: Int[Array, " n"], draft_length: Int[Array, ""]
    ) -> DraftForecast:
        """Survival averaged over the belief, whose error is taken to be common to a request's positions.

        The current draft length tells about the positions that it tests, so the upside is the pool's doubt about deeper
        ones. A request's lead is no reason to look: it is another by the time that a look has told it.
        """
        variance = jnp.diagonal(pools.covariance, axis1=-2, axis2=-1)
        logits = pools.mean[of] + requests.mean[:, None]
        doubt = jnp.sqrt(variance[of] + requests.variance[:, None])
        at_nodes = jnp.stack([jnp.cumprod(jax.nn.sigmoid(logits + node * doubt), axis=1) for node in NODES])
        expected = jnp.einsum("j,jnk->nk", WEIGHTS, at_nodes)

        untested = np.arange(logits.shape[1], dtype=np.int32) >= draft_length
        hope = jnp.where(untested[None, :], jnp.sqrt(variance[of]), 0.0)
        # By the upper node, since far more than one deviation up may be where drafts pay.
        hopeful = jnp.cumprod(jax.nn.sigmoid(logits + NODES[-1] * hope), axis=1)
        # The rate of changes is learned too: a Poisson process, with a Gamma prior of one change in `jump_steps`.
        rate = (1.0 + pools.jumps) / (self.jump_steps + pools.steps)
        changed = -jnp.expm1(-rate * pools.untested)
        return DraftForecast(
            survival=expected,
            upside=(hopeful - at_nodes[1]) / NODES[-1],
            afresh=jnp.asarray(self.prior ** np.arange(1.0, logits.shape[1] + 1.0)),
            changed=changed[of],
        )

    def _first_covariance(self, length: int) -> Float[np.ndarray, "K K"]:
        return np.full((length, length), self.shared_spread**2) + self.own_spread**2 * np.eye(length)

    def _drifted(self, covariance: Float[Array, "K K"]) -> Float[Array, "K K"]:
        keep = np.exp(-2.0 / self.pool_steps)
        return keep * covariance + (1.0 - keep) * self._first_covariance(covariance.shape[0])

    def _surprised(self, pool: PoolLogits, score: Float[Array, ""], information: Float[Array, ""]) -> PoolLogits:
        """The pool with the step's surprise counted, and widened if it has become too much."""
        common = jnp.min(pool.covariance)
        expected = jnp.sqrt(information * (1.0 + information * common))
        fresh = jnp.where(information > 0, score / jnp.maximum(expected, 1e-12), 0.0)
        faded = SURPRISE_DECAY * pool.surprise + np.sqrt(1.0 - SURPRISE_DECAY**2) * fresh
        surprise = jnp.where(information > 0, faded, pool.surprise)
        jumps = jnp.abs(surprise) > SURPRISE_LIMIT
        return eqx.tree_at(
            lambda p: (p.covariance, p.surprise, p.jumps),
            pool,
            (
                pool.covariance + jnp.where(jumps, self.jump_spread**2, 0.0),
                jnp.where(jumps, 0.0, surprise),
                pool.jumps + jnp.where(jumps, 1.0, 0.0),
            ),
        )


def _condition(pool: PoolLogits, score: Float[Array, " K"], information: Float[Array, " K"]) -> PoolLogits:
    """The pool after a Gaussian observation of each position with this score and information at the pool's mean.

    One position after the other, each a rank-one update: no inverse, and a position without information changes
    nothing.
    """

    def conditioned(
        i: Int[Array, ""], belief: tuple[Float[Array, " K"], Float[Array, "K K"]]
    ) -> tuple[Float[Array, " K"], Float[Array, "K K"]]:
        mean, covariance = belief
        here, told = mean[i], information[i]
        column = covariance[:, i]
        gain = column / (1.0 + told * column[i])
        # The score was taken at the pool's mean; earlier positions have moved this one since.
        mean = mean + gain * (score[i] - told * (here - pool.mean[i]))
        return mean, covariance - told * jnp.outer(gain, column)

    # A loop that is not unrolled: XLA would compute the positions before one again for each number of that one.
    mean, covariance = jax.lax.fori_loop(0, pool.mean.shape[0], conditioned, (pool.mean, pool.covariance))
    return eqx.tree_at(lambda p: (p.mean, p.covariance), pool, (mean, covariance))
