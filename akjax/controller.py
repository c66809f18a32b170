"""What happens in a step, as one pure function: teach the cost model, observe the requests, choose draft lengths."""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, PyTree

from akjax.acceptance import AbstractAcceptanceModel, RunningRates, survival
from akjax.arrays import Array
from akjax.cost.model import AbstractCostModel
from akjax.ekf import Belief, prior_belief, update
from akjax.features import StepFeatures
from akjax.policy import batch_draft_length, per_request_draft_lengths

CodeMode = Literal["gated", "1", "0"]

# A request's text is in one of these modes. USUAL is also the table of rates that every observation teaches;
# CODE and TOOL have one each, taught and used only in their mode.
USUAL, CODE, TOOL = range(3)

# Rate of the running mean of the relative prediction error.
ERROR_RATE = 0.05


class ControllerState(eqx.Module):
    """All that is learned and shared by the requests.

    Attributes:
        belief: the cost model and its covariance.
        error: running mean of |measured - predicted| / predicted over the steps taught, from 0.
        taught: steps that taught the cost model.
        pools: the acceptance model's pool, one for each mode along the leading axis.
        draft_length: the current k of the batch.
    """

    belief: Belief
    error: Float[Array, ""]
    taught: Int[Array, ""]
    pools: PyTree[Float[Array, "modes ..."]]
    draft_length: Int[Array, ""]


class RequestRows(eqx.Module):
    """The acceptance state of one request, or of some, a row each.

    Attributes:
        states: the acceptance model's state of each row and mode.
        made: whether that state has been made yet; if not, the numbers in `states` mean nothing.
    """

    states: PyTree[Float[Array, "..."]]
    made: Bool[Array, "*rows modes"]


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
        teaches: whether `ms` is the step's own time. It still has to be near the prediction to teach.
        observations: of the requests that had drafts.
    """

    step: StepFeatures
    ms: Float[Array, ""]
    teaches: Bool[Array, ""]
    observations: Observations


class Batch(eqx.Module):
    """The decoding requests that the next step will verify drafts of, in the step's order.

    Attributes:
        row: of the request in `RequestRows`; the number of rows marks padding.
        mode: of the request now.
    """

    row: Int[Array, " n"]
    mode: Int[Array, " n"]


class Decision(eqx.Module):
    """How many drafts to verify next.

    Attributes:
        draft_length: for the whole batch: the largest of `per_request` if the step has lengths of its own.
        per_request: of each request of the `Batch`, or None if the controller never chooses them.
    """

    draft_length: Int[Array, ""]
    per_request: Int[Array, " n"] | None


class Controller(eqx.Module):
    """The rules by which a step teaches and draft lengths are chosen; all that changes is in its arguments.

    Attributes:
        acceptance: the acceptance model.
        draft_limit: K, the most drafts of a request.
        levels: the draft lengths that the batch may have, ascending.
        margin: relative gain below which the batch's draft length stays.
        per_request: whether each request gets a length of its own, in steps of two or more decoding requests. Goes
            by the usual rates, whatever the code mode.
        code_mode: "gated" uses a mode's rates if all decoding requests are in it; "1" for each request in it; "0"
            knows no modes.
        learns_cost: whether steps teach the cost model.
        relative_noise: of a step's time, for the filter.
    """

    acceptance: AbstractAcceptanceModel = eqx.field(default_factory=RunningRates)
    draft_limit: int = eqx.field(static=True, kw_only=True)
    levels: tuple[int, ...] = eqx.field(static=True, kw_only=True)
    margin: float = eqx.field(static=True, kw_only=True, default=0.03)
    per_request: bool = eqx.field(static=True, kw_only=True, default=False)
    code_mode: CodeMode = eqx.field(static=True, kw_only=True, default="gated")
    learns_cost: bool = eqx.field(static=True, kw_only=True, default=True)
    relative_noise: float = eqx.field(static=True, kw_only=True, default=0.05)

    def __check_init__(self) -> None:
        """Refuses levels that no step could have."""
        if not self.levels or list(self.levels) != sorted({*self.levels}):
            raise ValueError(f"levels must be distinct and ascending, given {self.levels}")
        if not (self.levels[0] >= 1 and self.levels[-1] <= self.draft_limit):
            raise ValueError(f"levels must lie between 1 and K={self.draft_limit}, given {self.levels}")

    @property
    def modes(self) -> int:
        """How many modes have rates of their own, the usual ones included."""
        return 1 if self.code_mode == "0" else 3

    def init(self, cost: AbstractCostModel) -> ControllerState:
        """The state before the first step: `cost` and its prior, the acceptance prior, and k at its maximum."""
        pool = self.acceptance.init_pool(self.draft_limit)
        return ControllerState(
            belief=prior_belief(cost),
            error=jnp.zeros(()),
            taught=jnp.zeros((), jnp.int32),
            pools=jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.modes, *leaf.shape)), pool),
            draft_length=jnp.asarray(self.draft_limit, jnp.int32),
        )

    def init_rows(self, state: ControllerState, rows: int) -> RequestRows:
        """Rows of requests that were never observed."""
        request = jax.vmap(self.acceptance.init_request)(state.pools)
        return RequestRows(
            states=jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (rows, *leaf.shape)), request),
            made=jnp.zeros((rows, self.modes), bool),
        )

    def step(
        self, state: ControllerState, rows: RequestRows, outcome: Outcome, batch: Batch
    ) -> tuple[ControllerState, RequestRows, Decision]:
        """Learns from a step's output, the cost first, then the drafts, then decides for the scheduled batch."""
        state = self._teach(state, outcome)
        state, rows = self._observe(state, rows, outcome.observations)
        return self._choose(state, rows, batch)

    def _teach(self, state: ControllerState, outcome: Outcome) -> ControllerState:
        if not self.learns_cost:
            return state
        belief, innovation = update(state.belief, outcome.step, outcome.ms, self.relative_noise)
        predicted = innovation.predicted
        near = (0.5 * predicted < outcome.ms) & (outcome.ms < 2.0 * predicted + 20.0)
        error = state.error + ERROR_RATE * (jnp.abs(innovation.residual) / predicted - state.error)
        return _where(
            outcome.teaches & near,
            eqx.tree_at(lambda s: (s.belief, s.error, s.taught), state, (belief, error, state.taught + 1)),
            state,
        )

    def _observe(
        self, state: ControllerState, rows: RequestRows, seen: Observations
    ) -> tuple[ControllerState, RequestRows]:
        """One request after the other: each moves the pools that the next ones are compared with."""
        modes = jnp.arange(self.modes, dtype=jnp.int32)

        def one(pools: Any, request: tuple[RequestRows, Observations, Bool[Array, ""]]) -> tuple[Any, RequestRows]:
            row, seen, real = request
            active = real & ((modes == USUAL) | (modes == seen.mode))
            known = _where(row.made, row.states, jax.vmap(self.acceptance.init_request)(pools))
            new_pools, new_states = jax.vmap(self.acceptance.observe, in_axes=(0, 0, None, None))(
                pools, known, seen.drafted, seen.accepted
            )
            row = RequestRows(states=_where(active, new_states, row.states), made=row.made | active)
            return _where(active, new_pools, pools), row

        real = seen.row < rows.made.shape[0]
        pools, observed = jax.lax.scan(one, state.pools, (_take(rows, seen.row), seen, real))
        return eqx.tree_at(lambda s: s.pools, state, pools), _put(rows, seen.row, observed)

    def _choose(
        self, state: ControllerState, rows: RequestRows, batch: Batch
    ) -> tuple[ControllerState, RequestRows, Decision]:
        decoding = batch.row < rows.made.shape[0]
        used = self._modes_used(batch.mode, decoding)
        requests = self._made_for_use(state, _take(rows, batch.row), used)
        rows = _put(rows, batch.row, requests)
        rates = jax.vmap(self.acceptance.conditional_rates)(
            jax.tree.map(lambda leaf: leaf[used], state.pools),
            jax.tree.map(lambda leaf: leaf[jnp.arange(len(used)), used], requests.states),
        )
        alive = survival(rates)
        cost = state.belief.model
        of_batch = batch_draft_length(alive, decoding, cost, self.levels, state.draft_length, self.margin)
        if not self.per_request:
            return eqx.tree_at(lambda s: s.draft_length, state, of_batch), rows, Decision(of_batch, None)

        own = per_request_draft_lengths(alive, decoding, cost)
        each_its_own = jnp.sum(decoding) >= 2
        of_batch = jnp.where(each_its_own, state.draft_length, of_batch)
        largest = jnp.max(jnp.where(decoding, own, 1))
        decision = Decision(
            draft_length=jnp.where(each_its_own, largest, of_batch),
            per_request=jnp.where(each_its_own, own, of_batch),
        )
        return eqx.tree_at(lambda s: s.draft_length, state, of_batch), rows, decision

    def _made_for_use(self, state: ControllerState, requests: RequestRows, used: Int[Array, " n"]) -> RequestRows:
        """The requests, each with the state of the mode that is about to be read."""
        fresh = jax.vmap(self.acceptance.init_request)(state.pools)
        of_each = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(used), *leaf.shape)), fresh)
        is_used = used[:, None] == jnp.arange(self.modes, dtype=jnp.int32)[None, :]
        return RequestRows(
            states=_where(is_used & ~requests.made, of_each, requests.states), made=requests.made | is_used
        )

    def _modes_used(self, mode: Int[Array, " n"], decoding: Bool[Array, " n"]) -> Int[Array, " n"]:
        """The mode whose rates say each request's survival: the usual ones wherever requests get their own lengths."""
        if self.code_mode == "0" or self.per_request:
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
