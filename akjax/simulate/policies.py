"""What chooses draft lengths in the simulated world."""

import abc
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from akjax.arrays import Array
from akjax.controller import Batch, Controller, ControllerState, Outcome, RequestRows
from akjax.cost.model import AbstractCostModel, predicted_ms
from akjax.features import StepFeatures
from akjax.simulate.leaves import as_count
from akjax.simulate.scenario import Scenario
from akjax.simulate.world import View

State = TypeVar("State")


class AbstractSimPolicy(eqx.Module, Generic[State]):
    """Chooses how many drafts the next step verifies, each time a step has been scheduled. Array leaves are data."""

    @abc.abstractmethod
    def init(self, scenario: Scenario) -> State:
        """The policy's state before the first step: arrays. Called uncompiled; goes by the scenario's sizes alone."""

    @abc.abstractmethod
    def decide(
        self, scenario: Scenario, state: State, view: View
    ) -> tuple[State, Int[Array, ""], Int[Array, " n"] | None]:
        """The state after the step, the draft length, and one for each slot if they differ.

        Only an oracle may look at `scenario` and `view.truth`.
        """

    @abc.abstractmethod
    def learned(self, state: State) -> Any:
        """What of the state is worth keeping after the run: arrays."""


class FixedLength(AbstractSimPolicy[tuple[()]]):
    """The same draft length all the time.

    Attributes:
        draft_length: 0 to K.
    """

    draft_length: Int[Array, "*lanes"] = eqx.field(converter=as_count)

    def init(self, scenario: Scenario) -> tuple[()]:
        """Nothing."""
        return ()

    def decide(
        self, scenario: Scenario, state: tuple[()], view: View
    ) -> tuple[tuple[()], Int[Array, ""], Int[Array, " n"] | None]:
        """`draft_length`."""
        return (), jnp.asarray(self.draft_length), None

    def learned(self, state: tuple[()]) -> Any:
        """Nothing."""
        return ()


class LengthByBatch(AbstractSimPolicy[tuple[()]]):
    """A list by batch size, as vLLM's dynamic schedule.

    Attributes:
        table: draft length for a step of n requests, at n.
    """

    table: Int[Array, "*lanes sizes"] = eqx.field(converter=as_count)

    def init(self, scenario: Scenario) -> tuple[()]:
        """Nothing."""
        return ()

    def decide(
        self, scenario: Scenario, state: tuple[()], view: View
    ) -> tuple[tuple[()], Int[Array, ""], Int[Array, " n"] | None]:
        """The list's entry for the requests of this step."""
        return (), jnp.asarray(self.table)[view.requests], None

    def learned(self, state: tuple[()]) -> Any:
        """Nothing."""
        return ()


class Controlled(AbstractSimPolicy[tuple[ControllerState, RequestRows]]):
    """The project's controller, fed as the scheduler feeds it.

    Attributes:
        controller: the rules.
        cost: the cost model that it starts from.
        counts_unobserved: whether its batch has every request that decodes in the next step, or only those observed
            before, the reference rule.
        prefill_teaches: whether steps that take in prompts teach.
    """

    controller: Controller
    cost: AbstractCostModel
    counts_unobserved: bool = eqx.field(static=True, kw_only=True, default=False)
    prefill_teaches: bool = eqx.field(static=True, kw_only=True, default=False)

    def init(self, scenario: Scenario) -> tuple[ControllerState, RequestRows]:
        """The controller's state, and rows for two generations of requests."""
        state = self.controller.init(self.cost)
        return state, self.controller.init_rows(state, 2 * scenario.slots)

    def decide(
        self, scenario: Scenario, state: tuple[ControllerState, RequestRows], view: View
    ) -> tuple[tuple[ControllerState, RequestRows], Int[Array, ""], Int[Array, " n"] | None]:
        """One step of the controller."""
        shared, rows = state
        rows = eqx.tree_at(lambda r: r.made, rows, rows.made & ~view.begins[:, None])
        outcome = self.outcome(view)
        batch = self.batch(rows, view)
        shared, rows, decision = self.controller.step(shared, rows, outcome, batch)
        each = decision.per_request
        if each is not None:
            each = jnp.where(batch.row < rows.made.shape[0], each, decision.draft_length)
        return (shared, rows), decision.draft_length, each

    def learned(self, state: tuple[ControllerState, RequestRows]) -> ControllerState:
        """What the requests share."""
        return state[0]

    def outcome(self, view: View) -> Outcome:
        """What the controller hears of the step before the last one."""
        if self.prefill_teaches:
            return view.outcome
        pure = view.outcome.teaches & (view.outcome.step.prefill == 0)
        return eqx.tree_at(lambda o: o.teaches, view.outcome, pure)

    def batch(self, rows: RequestRows, view: View) -> Batch:
        """The requests that the controller chooses for."""
        if self.counts_unobserved:
            counts = view.decodes_next
        else:
            # What the outcome says of a request makes it known before the choice.
            known = rows.made[view.row, 0] | (view.outcome.observations.row == view.row)
            counts = view.decoding & known
        return Batch(
            row=jnp.where(counts, view.row, rows.made.shape[0]),
            mode=view.mode,
            context=view.context,
        )


class Oracle(AbstractSimPolicy[tuple[()]]):
    """Knows the true cost and rates, and takes the length with the most expected tokens per ms.

    It looks one step ahead and takes requests as they are now: kinds that are about to turn and requests about to end
    are not foreseen. Staleness is left out, as a length that is kept has none; counting it, a step without drafts
    would look like a reason for the next one.

    Attributes:
        levels: the draft lengths to choose from.
    """

    levels: tuple[int, ...] = eqx.field(static=True)

    def init(self, scenario: Scenario) -> tuple[()]:
        """Nothing."""
        return ()

    def decide(
        self, scenario: Scenario, state: tuple[()], view: View
    ) -> tuple[tuple[()], Int[Array, ""], Int[Array, " n"] | None]:
        """The level of the most tokens per ms in a step whose drafter makes as many drafts as it verifies."""
        lengths = np.asarray(self.levels, np.int32)
        requests = jnp.sum(view.decodes_next, dtype=jnp.float64)
        reach = scenario.drafter.reach(scenario.draft_limit)
        yields = _counted(jnp.cumprod(view.truth.rates, axis=1) * reach[None, :], view.decodes_next)
        verified = requests * _from_none(reach.astype(jnp.float64))
        expected = requests + _from_none(yields)[lengths]
        of_levels = lengths.shape
        cost = predicted_ms(
            scenario.times.cost,
            StepFeatures(
                tokens=requests + verified[lengths],
                requests=jnp.broadcast_to(requests, of_levels),
                drafting=jnp.asarray(lengths, jnp.float64),
                context=jnp.broadcast_to(view.truth.context, of_levels),
                prefill=jnp.zeros(of_levels),
                uneven=jnp.zeros(of_levels),
            ),
        )
        return (), jnp.asarray(lengths)[jnp.argmax(expected / cost)], None

    def learned(self, state: tuple[()]) -> Any:
        """Nothing."""
        return ()


def _counted(values: Float[Array, "n K"], counts: Bool[Array, " n"]) -> Float[Array, " K"]:
    """The sum over the rows that count."""
    return jnp.sum(jnp.where(counts[:, None], values.astype(jnp.float64), 0.0), axis=0)


def _from_none(values: Float[Array, " K"]) -> Float[Array, " levels"]:
    """The sums of the first 0, 1, ..., K values."""
    return jnp.concatenate([jnp.zeros(1), jnp.cumsum(values)])


def stacked(policies: list[AbstractSimPolicy]) -> AbstractSimPolicy:
    """Policies of one form as one, their leaves along a leading axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *policies)
