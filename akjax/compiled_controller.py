"""The controller as a serving process calls it: host memory in and out, compiled once for every size."""

from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from operator import le
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from akjax.controller import Batch, Controller, ControllerState, Observations, Outcome, RequestRows, Soundness
from akjax.cost.model import AbstractCostModel
from akjax.covariance import is_covariance
from akjax.features import StepFeatures
from akjax.learner import Covariance
from akjax.one_kernel import compiled_for_cpu
from akjax.packing import Layout


class UnsoundStateError(RuntimeError):
    """Learning has come to a state that its rules cannot make, such as one with NaN in it.

    Attributes:
        parts: of the state that are not sound, by their names in `Soundness`.
    """

    def __init__(self, parts: tuple[str, ...]) -> None:
        """`parts` are those that are not sound."""
        super().__init__(
            f"the controller's state is not sound in {', '.join(parts)}: a number that is not finite, or none that"
            " learning can make, such as a negative variance or a k that is no level"
        )
        self.parts = parts


class DraftOutcomes(NamedTuple):
    """What became of a step's drafts, a list of each, in output order.

    Attributes:
        request_ids: of the requests that had any, each once.
        drafted: of each, at least 1.
        accepted: of those.
        modes: of the requests' texts at the time.
    """

    request_ids: Sequence[str] = ()
    drafted: Sequence[int] = ()
    accepted: Sequence[int] = ()
    modes: Sequence[int] = ()


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


_MOST_DRAFTS = 255


class _Pending(NamedTuple):
    """A step's output that the controller has been told of and the compiled step has not yet."""

    step: StepMeasures
    ms: float
    teaches: bool
    slots: list[int]
    drafted: bytes
    accepted: bytes
    modes: bytes


class _Requests(NamedTuple):
    """Some requests and their slots."""

    ids: list[str]
    slots: list[int]


_NOBODY = _Requests([], [])
_NOTHING = _Pending(StepMeasures(0, 0), 0.0, False, [], b"", b"", b"")


class CompiledController:
    """Keeps a controller's state and runs its step; one compiled call teaches, observes and decides.

    An output is kept until the next decision, since both go into one call. Requests are known by their ids, from
    their first observation until they are forgotten; where unobserved ones count too, from their first decision. All
    sizes are compiled at construction, nothing afterwards. Not thread-safe.

    Every call also tells whether the state that it leaves is sound. Where it is not, whatever made the call (`observe`,
    `decide`, `settle`, `request_state`) raises `UnsoundStateError`, and only `restart` makes a controller of it again.

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
        """Compiles the step for 1, 8, 32, 64, ... up to at least `max_requests` requests, on the CPU, in float64.

        `covariance` is that of a fitted `cost`; None for the prior of its form.

        Raises:
            ValueError: `cost` does not name its parameters, `max_requests` is not positive, or K is above 255; or
                learning cannot start there: a number that is not finite, or a parameter that is certain.
        """
        if max_requests < 1:
            raise ValueError(f"max_requests must be at least 1, given {max_requests}")
        if controller.draft_limit > _MOST_DRAFTS:
            raise ValueError(f"K must be at most {_MOST_DRAFTS}, given {controller.draft_limit}")
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
        self._first_state = self._state.copy()
        cost_state = self._state_layout.views(self._state).cost
        self._taught, self._predicted_ms = cost_state.taught, cost_state.predicted_ms
        sizes = [_size(index) for index in range(_size_index(max_requests) + 1)]
        with ThreadPoolExecutor() as pool:  # XLA compiles without the GIL
            self._steps = list(
                pool.map(lambda size: _CompiledStep(controller, self._state_layout, row_layout, size, on_cpu), sizes)
            )
        self._rows = np.zeros((2 * max_requests, row_layout.size))
        self._apart_flag = row_layout.slices().apart.start
        self.restart()
        try:
            self._run(_NOTHING, [], b"")
        except UnsoundStateError as fault:
            raise ValueError(f"learning cannot start from this cost model and covariance: {fault}") from None

    @property
    def taught(self) -> int:
        """How many of the steps that were taken in taught the cost model; read without taking in any."""
        return int(self._taught)

    @property
    def predicted_ms(self) -> float:
        """Of the last step that was taken in, as it was predicted before it taught; 0 before the first."""
        return float(self._predicted_ms)

    @property
    def request_ids(self) -> Set[str]:
        """The requests that it knows, as they are from now on."""
        return self._slots.keys()

    @property
    def apart_ids(self) -> Set[str]:
        """The requests that were set apart, whether it knows them or not."""
        return self._apart

    @property
    def capacity(self) -> int:
        """How many requests it has room for; it doubles when there are more."""
        return len(self._rows)

    def knows(self, request_id: str) -> bool:
        """Whether the request has been observed or, where unobserved ones count too, decided for."""
        return request_id in self._slots

    def observe(self, *, step: StepMeasures, ms: float, teaches: bool, outcomes: DraftOutcomes) -> None:
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
        request_ids = outcomes.request_ids
        if len(request_ids) > self._steps[-1].size:
            raise ValueError(f"{len(request_ids)} outcomes, but at most {self._steps[-1].size} requests run at once")
        drafted, accepted, modes = self._checked(outcomes)
        if request_ids != self._observed.ids:
            self._observed = _Requests(list(request_ids), [self._slot_of(request_id) for request_id in request_ids])
        self._pending = _Pending(step, ms, teaches, self._observed.slots, drafted, accepted, modes)

    def decide(self, request_ids: Sequence[str], modes: Sequence[int], context: int = 0) -> DraftLengths:
        """The draft lengths of the requests, given in the step's order with the mode of each one's text.

        Args:
            request_ids: of the step; only those that were observed, unless the controller counts the others too.
            modes: of their texts, a list as long.
            context: KV tokens that the step reads.

        Raises:
            ValueError: more or fewer modes than requests.
            KeyError: a request that has never been observed, where only observed ones are counted.
        """
        packed_modes = bytes(modes)
        if len(packed_modes) != len(request_ids):
            raise ValueError(f"{len(request_ids)} requests have as many modes, given {modes!r}")
        if request_ids != self._decoding.ids:
            slots_of = self._slot_of if self.counts_unobserved else self._slots.__getitem__
            self._decoding = _Requests(list(request_ids), [slots_of(request_id) for request_id in request_ids])
        slots = self._decoding.slots
        most = self._steps[-1].size
        if len(slots) + len(self._pending.slots) > most and len({*slots, *self._pending.slots}) > most:
            self._settle_pending()
        return self._run(self._pending, slots, packed_modes, context)

    def set_apart(self, request_id: str) -> None:
        """What the request's drafts tell is of itself alone, from now until it is forgotten."""
        self._apart.add(request_id)
        slot = self._slots.get(request_id)
        if slot is not None:
            self._unload()
            self._rows[slot, self._apart_flag] = 1.0

    def forget(self, request_id: str) -> None:
        """Drops the request's state, after the observation that is still to be taken in."""
        self._apart.discard(request_id)
        slot = self._slots.pop(request_id, None)
        if slot is None:
            return
        self._decoding, self._observed = _NOBODY, _NOBODY
        self._leaving.append(slot)
        if self._pending is _NOTHING:
            self._release_leaving()

    def settle(self) -> ControllerState:
        """The state with every output taken in, its leaves float64 views: read them, and do not keep them."""
        self._settle_pending()
        return self._state_layout.views(self._state)

    def learned(self) -> dict[str, Float[np.ndarray, "..."]]:
        """All that is learned and shared by the requests, by the name of each array, as of the last step taken in.

        Float64 views: copy what is to be kept.
        """
        named = self._state_layout.named(self._state)
        return {name: array for name, array in named.items() if name.partition(".")[0] in ("cost", "pools")}

    def resume(self, learned: Mapping[str, Sequence[float]]) -> None:
        """Begins anew with what a controller of the same rules and form had learned.

        Args:
            learned: the numbers of each of its arrays, flat, by the names that `learned` gives.

        Raises:
            ValueError: an array that is missing, unknown, of another size, or that learning cannot come to; the state
                is that at construction then.
        """
        self.restart()
        try:
            self._resume(learned)
        except (ValueError, UnsoundStateError) as fault:
            self.restart()
            raise ValueError(str(fault)) from None

    def _resume(self, learned: Mapping[str, Sequence[float]]) -> None:
        own = self.learned()
        if strange := sorted(own.keys() ^ learned.keys()):
            raise ValueError(f"only one of the kept state and this controller has {', '.join(strange)}")
        for name, array in own.items():
            numbers = learned[name]
            if len(numbers) != array.size:
                raise ValueError(f"{name} has {len(numbers)} numbers, not {array.size}")
            array[...] = np.reshape(np.asarray(numbers, np.float64), array.shape)
            if name.rpartition(".")[2] == "covariance":
                # The state's own soundness, told each step, looks at its diagonal alone.
                matrices = array.reshape(-1, *array.shape[-2:])
                if not all(map(is_covariance, matrices)):
                    raise ValueError(f"{name} is none: a variance of some combination of parameters is negative")
        self._run(_NOTHING, [], b"")

    def restart(self) -> None:
        """Goes back to the state at construction, and forgets every request and what was observed of it."""
        self._state[:] = self._first_state
        self._rows[:] = 0.0
        for step in self._steps:
            step.clear()
        self._slots: dict[str, int] = {}
        self._apart: set[str] = set()
        self._free = list(range(len(self._rows)))
        self._leaving: list[int] = []
        self._pending = _NOTHING
        # From step to step the requests are mostly the same: what was made of them for the last step is kept.
        self._decoding, self._observed = _NOBODY, _NOBODY
        self._loaded: _CompiledStep | None = None

    def request_state(self, request_id: str) -> Any:
        """The acceptance model's state of a request, with a leading axis for the modes, after every output so far.

        The numbers of a mode that was neither observed nor used yet mean nothing.

        Raises:
            KeyError: the request has never been observed.
        """
        self._settle_pending()
        self._unload()
        return self._steps[0].states(self._rows[self._slots[request_id]])

    def _settle_pending(self) -> None:
        if self._pending is not _NOTHING:
            self._run(self._pending, [], b"")

    def _slot_of(self, request_id: str) -> int:
        slot = self._slots.get(request_id)
        if slot is None:
            if not self._free:
                # Preempted requests keep their state while they wait, so there may be more than can run at once.
                grown = np.zeros_like(self._rows)
                self._free = list(range(len(self._rows), 2 * len(self._rows)))
                self._rows = np.concatenate([self._rows, grown])
            slot = self._slots[request_id] = self._free.pop()
            self._rows[slot, self._apart_flag] = request_id in self._apart
        return slot

    def _release_leaving(self) -> None:
        if not self._leaving:
            return
        self._unload()
        self._rows[self._leaving] = 0.0
        self._free.extend(self._leaving)
        self._leaving.clear()

    def _run(self, outcome: _Pending, batch_slots: list[int], modes: bytes, context: int = 0) -> DraftLengths:
        step = self._loaded
        if step is None or not step.holds(batch_slots, outcome.slots):
            self._unload()
            step = self._loaded = self._steps[_size_index(max(len({*batch_slots, *outcome.slots}), 1))]
            step.load(self._rows, batch_slots, outcome.slots)
        decision = step(self._state, outcome, modes, context)
        self._pending = _NOTHING
        self._release_leaving()
        return decision

    def _unload(self) -> None:
        if self._loaded is not None:
            self._loaded.unload(self._rows)
            self._loaded = None

    def _checked(self, outcomes: DraftOutcomes) -> tuple[bytes, bytes, bytes]:
        """The columns of drafted, accepted and modes."""
        try:
            drafted, accepted, modes = bytes(outcomes.drafted), bytes(outcomes.accepted), bytes(outcomes.modes)
        except ValueError:  # a number that is no byte
            raise ValueError(_impossible(outcomes, self._draft_limit)) from None
        possible = len(outcomes.request_ids) == len(drafted) == len(accepted) == len(modes)
        if drafted:
            possible = possible and 0 not in drafted and max(drafted) <= self._draft_limit
        if not possible or not all(map(le, accepted, drafted)):
            raise ValueError(_impossible(outcomes, self._draft_limit))
        return drafted, accepted, modes


def _size(index: int) -> int:
    """The numbers of requests that are compiled: 1, 8, 32, 64, 128, ...

    Each takes a second to compile. Up to 32 requests a step takes as long for all, but for a few microseconds; above,
    it takes the longer the more there are, padding included.
    """
    return (1, 8)[index] if index < 2 else 2 ** (index + 3)


def _size_index(requests: int) -> int:
    """The first size that holds so many requests."""
    if requests <= 8:
        return int(requests > 1)
    return max((requests - 1).bit_length() - 3, 2)


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
            packed = state_layout.pack(state), jax.vmap(row_layout.pack)(rows)
            # Without the barrier XLA computes a step's shared results again for each element that is packed.
            state, rows, lengths = jax.lax.optimization_barrier(
                (*packed, (decision.draft_length, decision.per_request))
            )
            # Judged as it will be read again.
            sound = controller.soundness(state_layout.unpack(state), jax.vmap(row_layout.unpack)(rows))
            return state, rows, *lengths, sound

        example = (np.zeros(state_layout.size), np.zeros((size, row_layout.size)), *_example_inputs(size))
        layout_in = Layout(example)
        self.size = size
        self._row_layout = row_layout
        # Between calls it holds the rows of the requests it was loaded with, as the last call left them. The call may
        # read it without a copy, which is why its output is waited for before anyone can write again.
        self._flat = np.zeros(layout_in.size)
        # Views into it, each bound once: looking up a field of an equinox module takes half a microsecond.
        self._state, self._rows, outcome, batch = layout_in.views(self._flat)
        self._all_rows = self._rows.reshape(-1)
        seen = outcome.observations
        self._observed, self._decoding = seen.row, batch.row
        self._drafted, self._accepted, self._mode, self._mode_now = seen.drafted, seen.accepted, seen.mode, batch.mode
        _, _, outcome, batch = layout_in.slices()
        features = [getattr(outcome.step, name) for name in StepMeasures._fields]
        self._scalars = [place.start for place in (*features, outcome.ms, outcome.teaches, batch.context)]
        self._slots: list[int] = []
        self._batch_slots: list[int] = []
        self._observed_slots: list[int] = []
        self._modes: tuple[bytes, bytes] | None = None
        signature = jax.ShapeDtypeStruct(self._flat.shape, self._flat.dtype, sharding=sharding)
        with jax.enable_x64(True):
            layout_out = Layout(jax.eval_shape(step, example))
            self._call = compiled_for_cpu(lambda flat: layout_out.pack(step(layout_in.unpack(flat))), signature)
        self._new_state, self._new_rows, self._draft_length, self._each, sound = layout_out.slices()
        self._sound = slice(sound.cost.start, sound.choice.stop)

    def holds(self, batch: list[int], observed: list[int]) -> bool:
        """Whether it was loaded with these requests in a step, and these in its output."""
        return batch == self._batch_slots and observed == self._observed_slots

    def load(self, table: Float[np.ndarray, "capacity r"], batch: list[int], observed: list[int]) -> None:
        """Takes the rows of the requests in a step and in its output from `table`, at these slots."""
        row_of = {slot: row for row, slot in enumerate(dict.fromkeys((*batch, *observed)))}
        self._slots, self._batch_slots, self._observed_slots, self._modes = list(row_of), batch, observed, None
        self._rows[: len(row_of)] = table[self._slots]
        for view, slots in ((self._decoding, batch), (self._observed, observed)):
            view[: len(slots)] = [row_of[slot] for slot in slots]
            view[len(slots) :] = self.size  # padding

    def clear(self) -> None:
        """Forgets the requests that it was loaded with."""
        self._flat[:] = 0.0
        self._slots, self._batch_slots, self._observed_slots, self._modes = [], [], [], None

    def unload(self, table: Float[np.ndarray, "capacity r"]) -> None:
        """Puts the rows back."""
        table[self._slots] = self._rows[: len(self._slots)]

    def __call__(self, state: Float[np.ndarray, " s"], outcome: _Pending, modes: bytes, context: int) -> DraftLengths:
        """Steps `state` and the rows in place, for the requests it was loaded with; `modes` are of those decoding.

        Raises:
            UnsoundStateError: the state or a row is no longer sound. Both are left as they were.
        """
        flat, observed, decoding = self._flat, len(outcome.slots), len(self._batch_slots)
        self._state[:] = state
        for at, value in zip(self._scalars, (*outcome.step, outcome.ms, outcome.teaches, context), strict=True):
            flat[at] = value
        self._drafted[:observed] = np.frombuffer(outcome.drafted, np.uint8)
        self._accepted[:observed] = np.frombuffer(outcome.accepted, np.uint8)
        if self._modes != (outcome.modes, modes):
            self._modes = outcome.modes, modes
            self._mode[:observed] = np.frombuffer(outcome.modes, np.uint8)
            self._mode_now[:decoding] = np.frombuffer(modes, np.uint8)
        with jax.enable_x64(True):
            packed = np.asarray(self._call(flat))
        sound = packed[self._sound]
        if 0.0 in sound.tolist():
            raise UnsoundStateError(Soundness(*sound.astype(bool)).unsound)
        state[:] = packed[self._new_state]
        self._all_rows[:] = packed[self._new_rows]
        each = None
        if self._each is not None:
            first = self._each.start
            each = packed[first : first + decoding].astype(int)
        return DraftLengths(int(packed[self._draft_length.start]), each)

    def states(self, row: Float[np.ndarray, " r"]) -> Any:
        """The acceptance model's state of one row, as views."""
        return self._row_layout.views(row).states


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


def _impossible(outcomes: DraftOutcomes, draft_limit: int) -> str:
    """What is wrong with outcomes that no step can have."""
    if len({len(column) for column in outcomes}) > 1:
        return f"outcomes need as many of each, given {[len(column) for column in outcomes]} {outcomes._fields}"
    wrong = [
        of_one
        for of_one in zip(*outcomes, strict=True)
        if not (1 <= of_one[1] <= draft_limit and 0 <= of_one[2] <= of_one[1] and 0 <= of_one[3] < 256)
    ]
    # An array of another type than bytes has as many numbers, and more bytes.
    given = ", ".join(f"{name} {value!r}" for name, value in zip(outcomes._fields, [*wrong, outcomes][0], strict=True))
    return f"drafted must be 1 to {draft_limit}, accepted 0 to drafted, given {given}"
