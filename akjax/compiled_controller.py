"""The controller as a serving process calls it: host memory in and out, compiled once for every size."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from akjax.controller import Batch, Controller, ControllerState, Observations, Outcome, RequestRows
from akjax.cost.model import AbstractCostModel
from akjax.features import StepFeatures
from akjax.learner import Covariance
from akjax.one_kernel import compiled_for_cpu
from akjax.packing import Layout


class DraftOutcome(NamedTuple):
    """What became of one request's drafts in a step: `accepted` of `drafted` >= 1, while its text was in `mode`."""

    request_id: str
    drafted: int
    accepted: int
    mode: int


class DraftLengths(NamedTuple):
    """How many drafts to verify next.

    Attributes:
        batch: for every request that `each` says nothing of.
        each: of each decoding request, in the order they were given; None where the batch's holds for all.
    """

    batch: int
    each: Int[np.ndarray, " n"] | None


class StepMeasures(NamedTuple):
    """A step's features in plain numbers, as `StepFeatures` has them."""

    tokens: int
    requests: int
    drafting: int = 0
    context: int = 0
    prefill: int = 0
    uneven: bool = False


class _Pending(NamedTuple):
    """A step's output that the controller has been told of and the compiled step has not yet."""

    step: StepMeasures
    ms: float
    teaches: bool
    slots: list[int]
    drafted: list[int]
    accepted: list[int]
    mode: list[int]


_NOTHING = _Pending(StepMeasures(0, 0), 0.0, False, [], [], [], [])


class CompiledController:
    """Keeps a controller's state and runs its step; one compiled call teaches, observes and decides.

    An output is kept until the next decision, since both go into one call. Requests are known by their ids, from
    their first observation until they are forgotten; where unobserved ones count too, from their first decision. All
    sizes are compiled at construction, nothing afterwards. Not thread-safe.

    Attributes:
        learns_cost: whether steps teach the cost model.
        expects_exact_times: whether only a step's own time may teach, then prompts included.
        counts_unobserved: whether requests that were never observed are decided for too.
        admits: whether the own time of a step of some `StepMeasures` may teach at all, however long it is.
    """

    def __init__(
        self,
        controller: Controller,
        cost: AbstractCostModel,
        max_requests: int,
        covariance: Covariance | None = None,
    ) -> None:
        """Compiles the step for 1, 4, 16, ... up to at least `max_requests` requests, on the CPU, in float64.

        `covariance` is that of a fitted `cost`; None for the prior of its form.

        Raises:
            ValueError: `cost` does not name its parameters, or `max_requests` is not positive.
        """
        if max_requests < 1:
            raise ValueError(f"max_requests must be at least 1, given {max_requests}")
        self.learns_cost = controller.learner.learns
        self.expects_exact_times = controller.learner.expects_exact_times
        self.counts_unobserved = controller.policy.counts_unobserved
        self.admits = controller.learner.admits
        self._draft_limit = controller.draft_limit
        cpu = jax.local_devices(backend="cpu")[0]
        on_cpu = jax.sharding.SingleDeviceSharding(cpu)
        with jax.enable_x64(True), jax.default_device(cpu):
            state = controller.init(cost, covariance)
            row = jax.tree.map(lambda leaf: leaf[0], controller.init_rows(state, 1))
            self._state_layout, row_layout = Layout(state), Layout(row)
            self._state = np.array(self._state_layout.pack(state))
        cost_state = self._state_layout.views(self._state).cost
        self._taught, self._predicted_ms = cost_state.taught, cost_state.predicted_ms
        sizes = [4**exponent for exponent in range(_size_index(max_requests) + 1)]
        with ThreadPoolExecutor() as pool:  # XLA compiles without the GIL
            self._steps = list(
                pool.map(lambda size: _CompiledStep(controller, self._state_layout, row_layout, size, on_cpu), sizes)
            )
        self._rows = np.zeros((2 * sizes[-1], row_layout.size))
        self._slots: dict[str, int] = {}
        self._free = list(range(len(self._rows)))
        self._leaving: list[int] = []
        self._pending = _NOTHING

    @property
    def taught(self) -> int:
        """How many of the steps that were taken in taught the cost model; read without taking in any."""
        return int(self._taught)

    @property
    def predicted_ms(self) -> float:
        """Of the last step that was taken in, as it was predicted before it taught; 0 before the first."""
        return float(self._predicted_ms)

    def knows(self, request_id: str) -> bool:
        """Whether the request has been observed or, where unobserved ones count too, decided for."""
        return request_id in self._slots

    def observe(self, *, step: StepMeasures, ms: float, teaches: bool, outcomes: Iterable[DraftOutcome]) -> None:
        """Takes a step's output: what it was, its time, and its drafts in output order.

        Args:
            step: its features.
            ms: that it took.
            teaches: whether `ms` is the step's own time.
            outcomes: of the requests that had drafts, each at most once.

        Raises:
            ValueError: more outcomes than requests can run at once, or one that no step can have.
        """
        self._settle_pending()
        outcomes = list(outcomes)
        if len(outcomes) > self._steps[-1].size:
            raise ValueError(f"{len(outcomes)} outcomes, but at most {self._steps[-1].size} requests run at once")
        for outcome in outcomes:
            if not 0 <= outcome.accepted <= outcome.drafted or not 1 <= outcome.drafted <= self._draft_limit:
                raise ValueError(f"drafted must be 1 to {self._draft_limit}, accepted 0 to drafted, given {outcome}")
        self._pending = _Pending(
            step,
            ms,
            teaches,
            slots=[self._slot_of(outcome.request_id) for outcome in outcomes],
            drafted=[outcome.drafted for outcome in outcomes],
            accepted=[outcome.accepted for outcome in outcomes],
            mode=[outcome.mode for outcome in outcomes],
        )

    def decide(self, request_ids: Sequence[str], modes: Sequence[int], context: int = 0) -> DraftLengths:
        """The draft lengths of the requests, given in the step's order with the mode of each one's text.

        Args:
            request_ids: of the step; only those that were observed, unless the controller counts the others too.
            modes: of their texts.
            context: KV tokens that the step reads.

        Raises:
            KeyError: a request that has never been observed, where only observed ones are counted.
        """
        slots_of = self._slot_of if self.counts_unobserved else self._slots.__getitem__
        slots = [slots_of(request_id) for request_id in request_ids]
        if len({*slots, *self._pending.slots}) > self._steps[-1].size:
            self._settle_pending()
        return self._run(self._pending, slots, modes, context)

    def forget(self, request_id: str) -> None:
        """Drops the request's state, after the observation that is still to be taken in."""
        slot = self._slots.pop(request_id, None)
        if slot is None:
            return
        self._leaving.append(slot)
        if self._pending is _NOTHING:
            self._release_leaving()

    def settle(self) -> ControllerState:
        """The state with every output taken in, its leaves float64 views: read them, and do not keep them."""
        self._settle_pending()
        return self._state_layout.views(self._state)

    def request_state(self, request_id: str) -> Any:
        """The acceptance model's state of a request, with a leading axis for the modes, after every output so far.

        The numbers of a mode that was neither observed nor used yet mean nothing.

        Raises:
            KeyError: the request has never been observed.
        """
        self._settle_pending()
        return self._steps[0].states(self._rows[self._slots[request_id]])

    def _settle_pending(self) -> None:
        if self._pending is not _NOTHING:
            self._run(self._pending, [], [])

    def _slot_of(self, request_id: str) -> int:
        slot = self._slots.get(request_id)
        if slot is None:
            if not self._free:
                # Preempted requests keep their state while they wait, so there may be more than can run at once.
                grown = np.zeros_like(self._rows)
                self._free = list(range(len(self._rows), 2 * len(self._rows)))
                self._rows = np.concatenate([self._rows, grown])
            slot = self._slots[request_id] = self._free.pop()
        return slot

    def _release_leaving(self) -> None:
        if not self._leaving:
            return
        self._rows[self._leaving] = 0.0
        self._free.extend(self._leaving)
        self._leaving.clear()

    def _run(self, outcome: _Pending, batch_slots: list[int], modes: Sequence[int], context: int = 0) -> DraftLengths:
        row_of = {slot: row for row, slot in enumerate(dict.fromkeys((*batch_slots, *outcome.slots)))}
        slots = list(row_of)
        step = self._steps[_size_index(max(len(slots), 1))]
        decision = step(
            self._state,
            self._rows,
            slots,
            outcome,
            observed=[row_of[slot] for slot in outcome.slots],
            decoding=[row_of[slot] for slot in batch_slots],
            modes=modes,
            scalars=(*outcome.step, outcome.ms, outcome.teaches, context),
        )
        self._pending = _NOTHING
        self._release_leaving()
        return decision


def _size_index(requests: int) -> int:
    """Which of the sizes 1, 4, 16, ... is the first that holds so many requests.

    Twice as many sizes would save at most a few microseconds a step, and double the time to start.
    """
    return ((requests - 1).bit_length() + 1) // 2


class _CompiledStep:
    """`Controller.step` for at most `size` requests: one vector in, one vector out."""

    def __init__(
        self,
        controller: Controller,
        state_layout: Layout[ControllerState],
        row_layout: Layout[RequestRows],
        size: int,
        sharding: jax.sharding.Sharding,
    ) -> None:
        def step(inputs: Any) -> Any:
            state, rows, outcome, batch = inputs
            state, rows, decision = controller.step(
                state_layout.unpack(state), jax.vmap(row_layout.unpack)(rows), outcome, batch
            )
            state, rows = state_layout.pack(state), jax.vmap(row_layout.pack)(rows)
            # Without the barrier XLA computes a step's shared results again for each element that is packed.
            return jax.lax.optimization_barrier((state, rows, decision.draft_length, decision.per_request))

        example = (np.zeros(state_layout.size), np.zeros((size, row_layout.size)), *_example_inputs(size))
        layout_in = Layout(example)
        self.size = size
        self._row_layout = row_layout
        # The buffer is written anew each step. The call may read it without a copy, which is why its output is
        # waited for before anyone can write again.
        self._flat = np.zeros(layout_in.size)
        # Views into it, each bound once: looking up a field of an equinox module takes half a microsecond.
        self._state, self._rows, outcome, batch = layout_in.views(self._flat)
        seen = outcome.observations
        features = [getattr(outcome.step, name) for name in StepMeasures._fields]
        self._scalars = (*features, outcome.ms, outcome.teaches, batch.context)
        self._observed = (seen.row, seen.drafted, seen.accepted, seen.mode)
        self._batch = (batch.row, batch.mode)
        signature = jax.ShapeDtypeStruct(self._flat.shape, self._flat.dtype, sharding=sharding)
        with jax.enable_x64(True):
            layout_out = self._layout_out = Layout(jax.eval_shape(step, example))
            self._call = compiled_for_cpu(lambda flat: layout_out.pack(step(layout_in.unpack(flat))), signature)

    def __call__(
        self,
        state: Float[np.ndarray, " s"],
        table: Float[np.ndarray, "capacity r"],
        slots: list[int],
        outcome: _Pending,
        *,
        observed: list[int],
        decoding: list[int],
        modes: Sequence[int],
        scalars: tuple[float | int | bool, ...],
    ) -> DraftLengths:
        """Steps `state` and the rows of `table` at `slots` in place; `observed` and `decoding` index `slots`."""
        self._state[:] = state
        self._rows[: len(slots)] = table[slots]
        for view, value in zip(self._scalars, scalars, strict=True):
            view[...] = value
        self._fill(self._observed, (observed, outcome.drafted, outcome.accepted, outcome.mode))
        self._fill(self._batch, (decoding, modes))
        with jax.enable_x64(True):
            packed = np.asarray(self._call(self._flat))
        new_state, rows, draft_length, each = self._layout_out.views(packed)
        state[:] = new_state
        table[slots] = rows[: len(slots)]
        return DraftLengths(int(draft_length), None if each is None else each[: len(decoding)].astype(int))

    def states(self, row: Float[np.ndarray, " r"]) -> Any:
        """The acceptance model's state of one row, as views."""
        return self._row_layout.views(row).states

    def _fill(self, views: tuple[Any, ...], columns: tuple[Sequence[int], ...]) -> None:
        """Writes the columns, the first of which holds rows; the rest is padding, which its row alone marks."""
        for view, values in zip(views, columns, strict=True):
            view[: len(values)] = values
        views[0][len(columns[0]) :] = self.size


def _example_inputs(size: int) -> tuple[Outcome, Batch]:
    """The shapes and dtypes of what a step of `size` requests takes, besides the state and the rows."""
    number: Any = np.zeros(())
    each: Any = np.zeros(size, np.int32)
    truth: Any = np.zeros((), np.bool_)
    outcome = Outcome(
        step=StepFeatures(*[number] * len(StepMeasures._fields)),
        ms=number,
        teaches=truth,
        observations=Observations(row=each, drafted=each, accepted=each, mode=each),
    )
    return outcome, Batch(row=each, mode=each, context=number)
