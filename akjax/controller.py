"""What happens in a step, as one pure function: teach the cost model, observe the requests, choose draft lengths."""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, PyTree

from akjax.acceptance import AbstractAcceptanceModel, Verified
from akjax.arrays import Array
from akjax.cost.model import AbstractCostModel
from akjax.features import StepFeatures
from akjax.learner import AbstractCostLearner, CostState, Covariance
from akjax.policy import AbstractPolicy, Decision, Prospect

CodeMode = Literal["gated", "1", "0"]

# A request's text is in one of these modes. USUAL is also the table of rates that every observation teaches;
# CODE and TOOL have one each, taught and used only in their mode.
USUAL, CODE, TOOL = range(3)


class ControllerState(eqx.Module):
    """All that is learned and shared by the requests.

    Attributes:
        cost: what is known of the cost of a step.
        pools: the acceptance model's pool, one for each mode along the leading axis.
        choice: what the policy remembers.
    """

    cost: CostState
    pools: PyTree[Float[Array, "modes ..."]]
    choice: PyTree[Array]


class RequestRows(eqx.Module):
    """The acceptance state of one request, or of some, a row each.

    Attributes:
        states: the acceptance model's state of each row and mode.
        made: whether that state has been made yet; if not, the numbers in `states` mean nothing.
        apart: whether what the request's drafts tell is not of others too.
    """

    states: PyTree[Float[Array, "..."]]
    made: Bool[Array, "*rows modes"]
    apart: Bool[Array, "*rows"]


class Observations(eqx.Module):
    """The drafts of one request of an output, or of all of them in the output's order.

    Attributes:
        row: of the request in `RequestRows`; the number of rows marks padding.
        drafted: drafts verified, from 1 to K.
        accepted: of them, from 0 to `drafted`.
        mode: of the request when they were verified.
    """

    row: Int[Array, "*n"]
    drafted: Int[Array, "*n"]
    accepted: Int[Array, "*n"]
    mode: Int[Array, "*n"]


class Outcome(eqx.Module):
    """One step's output: how long it took, and what became of its drafts.

    Attributes:
        step: the features of the step.
        ms: that it took.
        teaches: whether `ms` is the step's own time. The learner may still refuse it.
        observations: of the requests that had drafts.
    """

    step: StepFeatures
    ms: Float[Array, ""]
    teaches: Bool[Array, ""]
    observations: Observations


class Batch(eqx.Module):
    """The requests that the next step will verify drafts of, in the step's order.

    Attributes:
        row: of the request in `RequestRows`; the number of rows marks padding.
        mode: of the request now.
        context: KV tokens that the step being scheduled reads, for all its requests.
    """

    row: Int[Array, " n"]
    mode: Int[Array, " n"]
    context: Float[Array, ""]


class Soundness(eqx.Module):
    """Whether each part of a state is one that its rules can have made: no NaN, no negative variance, no unknown k.

    Attributes:
        cost: what is known of the cost of a step.
        acceptance: the pools, and the states of the requests.
        choice: what the policy remembers.
    """

    cost: Bool[Array, ""]
    acceptance: Bool[Array, ""]
    choice: Bool[Array, ""]

    @property
    def unsound(self) -> tuple[str, ...]:
        """The names of the parts that are not, of values that are known."""
        parts = {"cost": self.cost, "acceptance": self.acceptance, "choice": self.choice}
        return tuple(name for name, sound in parts.items() if not sound)


class Controller(eqx.Module):
    """The rules by which a step teaches and draft lengths are chosen; all that changes is in its arguments.

    Attributes:
        acceptance: which drafts get accepted.
        learner: how steps teach their cost.
        policy: how draft lengths are chosen.
        draft_limit: K, the most drafts of a request.
        code_mode: "gated" uses a mode's rates if all decoding requests are in it; "1" for each request in it; "0"
            knows no modes.
        uses_modes: whether the modes' rates are used at all, or only learned.
        usual_is_prose: whether the usual rates learn from prose alone; else from every text, whatever its mode.
    """

    acceptance: AbstractAcceptanceModel
    learner: AbstractCostLearner
    policy: AbstractPolicy
    draft_limit: int = eqx.field(static=True, kw_only=True)
    code_mode: CodeMode = eqx.field(static=True, kw_only=True, default="gated")
    uses_modes: bool = eqx.field(static=True, kw_only=True, default=True)
    usual_is_prose: bool = eqx.field(static=True, kw_only=True, default=False)

    def __check_init__(self) -> None:
        """Refuses levels that no step could have."""
        if self.policy.levels[-1] > self.draft_limit:
            raise ValueError(f"levels must be at most K={self.draft_limit}, given {self.policy.levels}")

    @property
    def modes(self) -> int:
        """How many modes have rates of their own, the usual ones included."""
        return 1 if self.code_mode == "0" else 3

    def init(self, cost: AbstractCostModel, covariance: Covariance | None = None) -> ControllerState:
        """The state before the first step: `cost` with its prior or a fit's covariance, and k at its maximum."""
        pool = self.acceptance.init_pool(self.draft_limit)
        return ControllerState(
            cost=self.learner.init(cost, covariance),
            pools=jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.modes, *leaf.shape)), pool),
            choice=self.policy.init(self.draft_limit),
        )

    def init_rows(self, state: ControllerState, rows: int) -> RequestRows:
        """Rows of requests that were never observed."""
        request = jax.vmap(self.acceptance.init_request)(state.pools)
        return RequestRows(
            states=jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (rows, *leaf.shape)), request),
            made=jnp.zeros((rows, self.modes), bool),
            apart=jnp.zeros(rows, bool),
        )

    def step(
        self, state: ControllerState, rows: RequestRows, outcome: Outcome, batch: Batch
    ) -> tuple[ControllerState, RequestRows, Decision]:
        """Learns from a step's output, the cost first, then the drafts, then decides for the scheduled batch."""
        cost = self.learner.learn(state.cost, outcome.step, outcome.ms, outcome.teaches)
        state = eqx.tree_at(lambda s: s.cost, state, cost)
        state, rows = self._observe(state, rows, outcome)
        return self._choose(state, rows, batch)

    def soundness(self, state: ControllerState, rows: RequestRows) -> Soundness:
        """Which parts of a state are sound. What a step makes of one that is not means nothing."""
        pools = jax.vmap(self.acceptance.pool_is_sound)(state.pools)
        requests = jax.vmap(jax.vmap(self.acceptance.request_is_sound))(rows.states)
        return Soundness(
            cost=self.learner.is_sound(state.cost),
            acceptance=jnp.all(pools) & jnp.all(requests | ~rows.made),
            choice=self.policy.is_sound(state.choice, self.draft_limit),
        )

    def draft_length(self, state: ControllerState) -> Int[Array, ""]:
        """The draft length that the batch has now."""
        return self.policy.draft_length(state.choice)

    def _observe(
        self, state: ControllerState, rows: RequestRows, outcome: Outcome
    ) -> tuple[ControllerState, RequestRows]:
        """Every mode's rates learn from the requests that are in it, the usual ones from all."""
        seen, step = outcome.observations, outcome.step
        real = seen.row < rows.made.shape[0]
        modes = np.arange(self.modes, dtype=np.int32)
        requests = _take(rows, seen.row)
        counts = modes[None, :] == seen.mode[:, None]
        if not self.usual_is_prose:
            counts = counts | (modes == USUAL)[None, :]
        counts = real[:, None] & counts
        verified = Verified(
            drafted=jnp.broadcast_to(seen.drafted[:, None], counts.shape),
            accepted=jnp.broadcast_to(seen.accepted[:, None], counts.shape),
            counts=counts,
            fresh=~requests.made,
            apart=jnp.broadcast_to(requests.apart[:, None], counts.shape),
        )
        pools, states = jax.vmap(self.acceptance.observe_step, in_axes=(0, 1, 1, None), out_axes=(0, 1))(
            state.pools, requests.states, verified, step
        )
        observed = RequestRows(states=states, made=requests.made | counts, apart=requests.apart)
        state = eqx.tree_at(lambda s: s.pools, state, pools)
        return state, _put(rows, seen.row, observed)

    def _choose(
        self, state: ControllerState, rows: RequestRows, batch: Batch
    ) -> tuple[ControllerState, RequestRows, Decision]:
        decoding = batch.row < rows.made.shape[0]
        used = self._modes_used(batch.mode, decoding)
        requests = self._made_for_use(state, _take(rows, batch.row), used)
        rows = _put(rows, batch.row, requests)
        own = jax.tree.map(lambda leaf: leaf[np.arange(len(used)), used], requests.states)
        drafts = self.acceptance.forecast(state.pools, own, used, self.draft_length(state))
        prospect = Prospect(drafts, decoding, batch.context, self.learner, state.cost)
        choice, decision = self.policy.choose(state.choice, prospect)
        return eqx.tree_at(lambda s: s.choice, state, choice), rows, decision

    def _made_for_use(self, state: ControllerState, requests: RequestRows, used: Int[Array, " n"]) -> RequestRows:
        """The requests, each with the state of the mode that is about to be read."""
        fresh = jax.vmap(self.acceptance.init_request)(state.pools)
        of_each = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(used), *leaf.shape)), fresh)
        is_used = used[:, None] == jnp.arange(self.modes, dtype=jnp.int32)[None, :]
        return RequestRows(
            states=_where(is_used & ~requests.made, of_each, requests.states),
            made=requests.made | is_used,
            apart=requests.apart,
        )

    def _modes_used(self, mode: Int[Array, " n"], decoding: Bool[Array, " n"]) -> Int[Array, " n"]:
        """The mode whose rates say each request's survival."""
        if self.code_mode == "0" or not self.uses_modes:
            return jnp.full_like(mode, USUAL)
        if self.code_mode == "1":
            return mode
        shared = jnp.max(jnp.where(decoding, mode, USUAL))
        return jnp.where(jnp.all((mode == shared) | ~decoding), shared, jnp.full_like(mode, USUAL))


def _take(rows: RequestRows, row: Int[Array, " n"]) -> RequestRows:
    """The rows at `row`, padding clipped to the last one."""
    return jax.tree.map(lambda leaf: leaf.at[row].get(mode="clip"), rows)


def _put(rows: RequestRows, row: Int[Array, " n"], values: RequestRows) -> RequestRows:
    """`rows` with those at `row` replaced, padding dropped."""
    return jax.tree.map(lambda leaf, value: leaf.at[row].set(value, mode="drop"), rows, values)


def _where(condition: Bool[Array, "*leading"], if_true: PyTree[Array], if_false: PyTree[Array]) -> Any:
    """`jnp.where` over trees whose leaves begin with the condition's axes."""

    def choose(a: Array, b: Array) -> Array:
        return jnp.where(condition.reshape(condition.shape + (1,) * (a.ndim - condition.ndim)), a, b)

    return jax.tree.map(choose, if_true, if_false)
