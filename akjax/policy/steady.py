"""The default policy: moves when staying has cost as much as a move, and looks where looking may pay."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from akjax.arrays import Array
from akjax.features import StepFeatures
from akjax.policy.first_best import first_best
from akjax.policy.model import AbstractPolicy, Decision, Prospect, check_levels
from akjax.policy.per_request import per_request_draft_lengths

# A number for each level.
Levels = Float[Array, " levels"]
NO_ARM = NO_LOOK = -1
# Keeps quotients of variances finite; no doubt that matters is as small.
TINY = 1e-12


class SteadyMemory(eqx.Module):
    """What the steady policy remembers.

    Attributes:
        arm: index of the current arm: a level or, after them, lengths of their own; `NO_ARM` before the first choice.
        work: of each arm, what having always been there would have cost more than the cheapest course so far,
            moves included, in steps.
        look: steps left of a look: of staying at an arm that was taken for what it may turn out to be, and not for what
            it was believed; -1 if the current arm is none.
    """

    arm: Int[Array, ""]
    work: Float[Array, " arms"]
    look: Int[Array, ""]


class SteadyPolicy(AbstractPolicy[SteadyMemory]):
    """Goodput with two corrections, each in the unit of a step's worth of tokens.

    **Steadiness.** A change of k costs `switch_steps`: the pipeline is two steps deep, and a change that is taken
    back gains nothing. The policy follows the work function (Borodin, Linial & Saks, J. ACM 39, 1992): each arm's
    loss against the best adds up, and the current arm is left once its losses reach the price of a move more than
    another's. A gain of 30% moves within a few steps, one of 1% only if it lasts; noise around equal values adds up
    to nothing.

    **Looking.** The value of an arm is uncertain where its cost was not measured lately and its drafts not tested. An
    arm's goodput counts as higher by what a look could bring: the knowledge gradient (Frazier, Powell & Dayanik, SIAM
    J. Control Optim. 47, 2008), E[max(goodput - best, 0)] under what `look_steps` there would change in the belief,
    which is less than the whole doubt, as steps and tokens are noisy. Knowledge of costs serves for `cost_steps`, that
    of drafts for `draft_steps`; a look takes `look_steps`. What the current arm reveals anyway is no reason to look:
    its doubt is taken out of the others'. A look that brings nothing shrinks the doubt, so looks become rare by
    themselves; the drift of the beliefs brings them back. Without drafts nothing shows whether they would be accepted
    again, so there the chance counts too that all has changed since the last look, for `change_steps`.

    Prompts that the next step takes in do not count: their time is spent once, whatever k is then, so a step that
    has them is not the place to verify more for being long anyway.

    Attributes:
        levels: the draft lengths that the batch may have, ascending, from 0.
        per_request: whether lengths of their own for each request are an arm too, in steps of two or more.
        switch_steps: what a change costs, in steps.
        look_steps: how long a look takes.
        cost_steps: how long what it finds out about a cost will serve. The machine does not change, but the batch does.
        draft_steps: how long what it finds out about drafts will serve, as the text goes on changing.
        change_steps: how long an abrupt change that it finds will last.
        noise: relative standard deviation of a step's time, as far as a look is concerned.
    """

    levels: tuple[int, ...] = eqx.field(static=True, kw_only=True)
    per_request: bool = eqx.field(static=True, kw_only=True, default=False)
    switch_steps: float = eqx.field(static=True, kw_only=True, default=0.3)
    look_steps: int = eqx.field(static=True, kw_only=True, default=4)
    cost_steps: float = eqx.field(static=True, kw_only=True, default=300.0)
    draft_steps: float = eqx.field(static=True, kw_only=True, default=8.0)
    change_steps: float = eqx.field(static=True, kw_only=True, default=32.0)
    noise: float = eqx.field(static=True, kw_only=True, default=0.05)

    def __check_init__(self) -> None:
        """Refuses levels that no step could have."""
        check_levels(self.levels, least=0)

    @property
    def counts_unobserved(self) -> bool:
        """Yes: the next step verifies their drafts too."""
        return True

    def init(self, draft_limit: int) -> SteadyMemory:
        """No arm yet, and no losses."""
        arms = len(self.levels) + self.per_request
        return SteadyMemory(
            arm=jnp.asarray(NO_ARM, jnp.int32), work=jnp.zeros(arms), look=jnp.asarray(NO_LOOK, jnp.int32)
        )

    def draft_length(self, memory: SteadyMemory) -> Int[Array, ""]:
        """Of the current level; the deepest before the first choice, and while requests have lengths of their own."""
        deepest = len(self.levels) - 1
        level = jnp.where(memory.arm == NO_ARM, deepest, jnp.minimum(memory.arm, deepest))
        return jnp.asarray(self.levels, jnp.int32)[level]

    def is_sound(self, memory: SteadyMemory, draft_limit: int) -> Bool[Array, ""]:
        """Whether there is such an arm and such a look, and every arm's losses are finite and not negative."""
        arms = (memory.arm >= NO_ARM) & (memory.arm < memory.work.shape[0])
        looks = (memory.look >= NO_LOOK) & (memory.look < self.look_steps)
        return arms & looks & jnp.all((memory.work >= 0.0) & jnp.isfinite(memory.work))

    def choose(self, memory: SteadyMemory, prospect: Prospect) -> tuple[SteadyMemory, Decision]:
        """One step of the work function over the arms' hopeful goodput."""
        alive, decoding = prospect.drafts.survival, prospect.decoding
        requests = jnp.sum(decoding, dtype=alive.dtype)
        expected, upside, variance, afresh, steps = self._of_levels(prospect, requests)
        changed = jnp.max(jnp.where(decoding, prospect.drafts.changed, 0.0))
        own = None
        possible = np.ones(len(self.levels), bool)
        if self.per_request:
            own = self._own_lengths(prospect)
            rows = decoding[:, None] & (np.arange(alive.shape[1], dtype=np.int32)[None, :] < own[:, None])
            drafts = jnp.sum(rows, dtype=alive.dtype)
            expected = jnp.append(expected, requests + jnp.sum(jnp.where(rows, alive, 0.0)))
            upside = jnp.append(upside, jnp.sum(jnp.where(rows, prospect.drafts.upside, 0.0)))
            variance = jnp.append(variance, variance[-1])
            afresh = jnp.append(afresh, requests)
            of_own = StepFeatures(
                tokens=requests + drafts,
                requests=requests,
                drafting=jnp.max(jnp.where(decoding, own, 0)).astype(alive.dtype),
                context=prospect.context,
                prefill=jnp.zeros(()),
                uneven=jnp.ones(()),
            )
            steps = jax.tree.map(jnp.append, steps, of_own)
            possible = jnp.append(possible, requests >= 2)

        cost = prospect.learner.forecast(prospect.cost, steps)
        goodput = jnp.where(possible, jnp.log(jnp.maximum(expected, 1.0)) - cost.log_ms, -jnp.inf)
        # The share of a doubt's variance that a look takes away is what its own noise leaves of it.
        of_cost = _doubt_of_cost(cost.covariance, memory.arm)
        of_cost = of_cost / jnp.sqrt(of_cost + self.noise**2 / self.look_steps)
        of_drafts = jnp.log1p(upside / jnp.maximum(expected, 1.0)) ** 2
        of_drafts = of_drafts / jnp.sqrt(
            of_drafts + variance / jnp.maximum(expected, 1.0) ** 2 / self.look_steps + TINY
        )
        # Whether all has changed, a look tells for certain, and what has changed stays so for long.
        risen = jnp.log(jnp.maximum(afresh, 1.0)) - cost.log_ms - jnp.max(goodput)
        worth = (
            self.cost_steps * _expected_gain(goodput, of_cost)
            + self.draft_steps * _expected_gain(goodput, of_drafts)
            + self.change_steps * changed * jnp.maximum(risen, 0.0)
        )
        hopeful = jnp.where(possible, goodput + worth / self.look_steps, -jnp.inf)

        # An impossible arm is infinitely bad for now, which the price of a move bounds at once.
        work = memory.work + (jnp.max(hopeful) - hopeful)
        work = jnp.minimum(work, jnp.min(work) + self.switch_steps)
        leaves = work[memory.arm] >= jnp.min(work) + self.switch_steps * (1.0 - 1e-9)
        # A look takes its time, or it would end before it has shown anything; and nobody meant to stay after it.
        over = (memory.look == 0) & (hopeful[memory.arm] < jnp.max(hopeful))
        best = jnp.where((memory.arm == NO_ARM) | over, first_best(hopeful), first_best(-work))
        stays = (memory.look > 0) & jnp.asarray(possible)[memory.arm]
        leaves = (leaves & ~stays) | over | (memory.arm == NO_ARM)
        is_look = leaves & (goodput[best] < jnp.max(goodput))
        left = jnp.where(leaves, NO_LOOK, jnp.maximum(memory.look - 1, NO_LOOK))
        moved = SteadyMemory(
            arm=jnp.where(leaves, best, memory.arm),
            work=work - jnp.min(work),
            look=jnp.where(is_look, self.look_steps - 1, left).astype(jnp.int32),
        )
        memory = jax.tree.map(lambda new, old: jnp.where(requests > 0, new, old), moved, memory)

        of_batch = self.draft_length(memory)
        if own is None:
            return memory, Decision(of_batch, None)
        each_its_own = (memory.arm == len(self.levels)) & (requests >= 2)
        largest = jnp.max(jnp.where(decoding, own, 0))
        return memory, Decision(
            draft_length=jnp.where(each_its_own, largest, of_batch), per_request=jnp.where(each_its_own, own, of_batch)
        )

    def _of_levels(
        self, prospect: Prospect, requests: Float[Array, ""]
    ) -> tuple[Levels, Levels, Levels, Levels, StepFeatures]:
        """At each level: expected tokens, their upside and variance, those if all has changed, and the steps."""
        decoding = prospect.decoding[:, None]
        alive = prospect.drafts.survival

        def of_all(each: Float[Array, "n K"]) -> Float[Array, " K"]:
            return jnp.sum(jnp.where(decoding, each, 0.0), axis=0)

        def at_levels(drafts: Float[Array, " K"]) -> Levels:
            return jnp.append(0.0, drafts)[np.asarray(self.levels)]

        # The accepted number A has E[A] = sum of survivals and E[A**2] = sum of (2 i - 1) * survival_i.
        survivors = of_all(alive)
        odd = 2.0 * np.arange(1, alive.shape[1] + 1) - 1.0
        variance = at_levels(jnp.cumsum(odd * survivors) - of_all(jnp.cumsum(alive, axis=1) ** 2))

        lengths = np.asarray(self.levels, np.float64)
        shared = jnp.zeros_like(lengths)
        steps = StepFeatures(
            tokens=requests * (lengths + 1.0),
            requests=shared + requests,
            drafting=shared + lengths,
            context=shared + prospect.context,
            prefill=shared,
            uneven=shared,
        )
        expected = requests + at_levels(jnp.cumsum(survivors))
        upside = at_levels(jnp.cumsum(of_all(prospect.drafts.upside)))
        afresh = requests * (1.0 + at_levels(jnp.cumsum(prospect.drafts.afresh)))
        return expected, upside, variance, afresh, steps

    def _own_lengths(self, prospect: Prospect) -> Int[Array, " n"]:
        def step_of(tokens: Float[Array, " b"], requests: Float[Array, " b"]) -> StepFeatures:
            shared = jnp.zeros_like(tokens)
            return StepFeatures(
                tokens=tokens,
                requests=requests,
                drafting=(tokens - requests) / jnp.maximum(requests, 1.0),
                context=shared + prospect.context,
                prefill=shared,
                uneven=shared + 1.0,
            )

        return per_request_draft_lengths(
            prospect.drafts.survival,
            prospect.decoding,
            prospect.cost.belief.model,
            least=min(self.levels[0], 1),
            step_of=step_of,
        )


def _doubt_of_cost(covariance: Float[Array, "arms arms"], current: Int[Array, ""]) -> Float[Array, " arms"]:
    """Variance of each arm's log cost against the current one's, which is being measured: the conditional one."""
    here = covariance[current]
    return jnp.maximum(jnp.diag(covariance) - here**2 / jnp.maximum(covariance[current, current], TINY), 0.0)


def _expected_gain(goodput: Float[Array, " arms"], doubt: Float[Array, " arms"]) -> Float[Array, " arms"]:
    """E[max(goodput - best, 0)] of each arm, if its log goodput is normal with this standard deviation."""
    behind = goodput - jnp.max(goodput)
    z = jnp.maximum(behind / jnp.maximum(doubt, 1e-9), -30.0)
    density = jnp.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
    return doubt * density + jnp.where(jnp.isfinite(behind), behind, 0.0) * jax.scipy.stats.norm.cdf(z)
