"""What the scheduler does each step, told in plain data: no vLLM here, so that a recorded run can be replayed."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from akjax.compiled_controller import CompiledController, DraftOutcomes, StepMeasures
from akjax.controller import USUAL

from .control_file import ControlFile, PolicyName
from .modes import ModeTracker
from .reports import Reports
from .state_keeper import StateKeeper
from .step_clock import StepClock
from .step_log import StepLog


class DraftPlan(NamedTuple):
    """How many drafts the requests of a step get to verify in their next one.

    Attributes:
        draft_length: of every request that `each` does not name, and the most of any.
        each: of the requests that have a length of their own.
    """

    draft_length: int
    each: Mapping[str, int]


class VerifiedDrafts(NamedTuple):
    """What became of a step's drafts, a column of each, in output order.

    Attributes:
        request_ids: of the requests that had drafts verified, each once.
        drafted: how many were verified of each, at least 1.
        accepted: of those.
        cut: drafts that a grammar had cut before, of the requests where it did.
    """

    request_ids: list[str]
    drafted: list[int]
    accepted: list[int]
    cut: dict[str, int]

    def without(self, request_ids: Set[str]) -> "VerifiedDrafts":
        """All but what is said of these requests."""
        rows = zip(self.request_ids, self.drafted, self.accepted, strict=True)
        columns = [*zip(*[row for row in rows if row[0] not in request_ids], strict=True)] or [(), (), ()]
        return VerifiedDrafts(*map(list, columns), cut=self.cut)


class ScheduledStep(NamedTuple):
    """A step as it was scheduled.

    Attributes:
        tokens: of each request, prompt tokens and drafts included.
        drafts: the drafts among them, of the requests that have any.
        context: KV tokens that it reads, for all its requests.
        drafting: drafts that each request gets in it, for its next step.
        forced: whether the control file said so.
    """

    tokens: Mapping[str, int]
    drafts: Mapping[str, Sequence[int]]
    context: int = 0
    drafting: int = 0
    forced: bool = False

    @property
    def measures(self) -> StepMeasures:
        """Its features.

        Tokens of prompts are what its requests have beyond one each and their drafts. A request without drafts
        verifies 0, so beside one with drafts it makes the step uneven.
        """
        requests, lengths = len(self.tokens), [*map(len, self.drafts.values())]
        verified, most = requests + sum(lengths), max(lengths, default=0)
        return StepMeasures(
            tokens=verified,
            requests=requests,
            drafting=self.drafting,
            context=self.context,
            prefill=max(sum(self.tokens.values()) - verified, 0),
            uneven=most > 0 and lengths.count(most) < requests,
        )


class Pilot:
    """Turns a step's schedule and output into observations, and the controller's decision into a plan.

    Attributes:
        modes: of the requests' texts; None if code mode is off.
        forced: whether the control file said what the last plan is.
    """

    def __init__(
        self,
        controllers: Mapping[PolicyName, CompiledController],
        control: ControlFile,
        modes: ModeTracker | None,
        reports: Reports,
        step_log: StepLog | None = None,
        state: StateKeeper | None = None,
    ) -> None:
        """The first of `controllers` is in charge until the control file names another; `modes` is None if code mode
        is off, `step_log` if steps are not logged, `state` if what is learned is not kept.
        """
        self.modes = modes
        self.forced = False
        self._controllers = controllers
        self._first: PolicyName = next(iter(controllers))
        self._active: PolicyName = self._first
        self._control = control
        self._reports = reports
        self._step_log = step_log
        self._state = state
        self._clock = StepClock()

    @property
    def controller(self) -> CompiledController:
        """The one in charge: it alone observes, so that a policy is judged by what it learned itself."""
        return self._controllers[self._active]

    @property
    def request_ids(self) -> set[str]:
        """The requests of which anything is kept, by whichever part."""
        kept: set[str] = set()
        for controller in self._controllers.values():
            kept |= controller.request_ids | controller.apart_ids
        if self.modes is not None:
            kept |= self.modes.request_ids
        if self._step_log is not None:
            kept |= self._step_log.request_ids
        return kept

    def set_apart(self, request_id: str) -> None:
        """What the request's drafts tell is of itself alone, until it has finished."""
        for controller in self._controllers.values():
            controller.set_apart(request_id)

    def scheduled(
        self,
        requests: Sequence[str],
        finished: Iterable[str],
        now: float,
        *,
        context: int = 0,
    ) -> DraftPlan:
        """The plan for the requests of the step just scheduled.

        Args:
            requests: scheduled, in the step's order.
            finished: requests that ended since the last step, by whatever cause.
            now: monotonic, in seconds.
            context: KV tokens that the step reads, for all its requests.
        """
        for request_id in finished:
            for controller in self._controllers.values():
                controller.forget(request_id)
            if self.modes is not None:
                self.modes.forget(request_id)
            if self._step_log is not None:
                self._step_log.forget(request_id)
        forced, policy = self._control.read()
        if forced is None:
            # While k is forced, whoever was in charge goes on learning.
            self._take_charge(policy or self._first)
        controller = self.controller
        decoding: Sequence[str] = ()
        if forced is None:
            decoding = requests if controller.counts_unobserved else [r for r in requests if controller.knows(r)]
        # The call is made in any case: it takes in the last output.
        lengths = controller.decide(decoding, self._modes_of(decoding), context)
        if self._step_log is not None:
            self._step_log.settle()
        if self._state is not None:
            self._state.step(now)
        self.forced = forced is not None
        if forced is not None:
            plan = DraftPlan(forced, {})
        elif lengths.each is None:
            plan = DraftPlan(lengths.batch, {})
        else:
            plan = DraftPlan(lengths.batch, dict(zip(decoding, lengths.each.tolist(), strict=True)))
        if requests:
            self._reports.step(plan.draft_length, now, controller, self.modes)
        return plan

    def output(self, step: ScheduledStep, verified: VerifiedDrafts, now: float, *, busy: bool = False) -> None:
        """Takes in a step's output.

        Args:
            step: as it was scheduled.
            verified: what became of its drafts.
            now: when the output arrived; monotonic, in seconds.
            busy: whether the engine has a later step with tokens to work on by now.
        """
        controller = self.controller
        exact = controller.expects_exact_times
        gap_ms = None
        # In a pipeline that is not full, every other step is without tokens: it keeps the engine from nothing, and the
        # time since the last output is all of the next step's. The reference takes any output for a step's end.
        if step.tokens or not exact or not busy:
            gap_ms = self._clock.gap_ms(now, ran=bool(step.tokens) or not exact)
        measures, outcomes = step.measures, self._outcomes(verified)
        only_decodes = measures.requests > 0 and not measures.prefill
        teaches = gap_ms is not None and (exact or only_decodes)
        if teaches and gap_ms is not None:
            self._reports.step_time(gap_ms)
        controller.observe(step=measures, ms=gap_ms or 0.0, teaches=teaches, outcomes=outcomes)
        if self._step_log is not None:
            self._step_log.output(
                controller,
                measures,
                outcomes,
                verified.cut,
                now,
                gap_ms=gap_ms,
                teaches=teaches,
                k=step.drafting,
                forced=step.forced,
            )

    def unknown_output(self, step: ScheduledStep, verified: VerifiedDrafts, now: float) -> None:
        """Passes over the output of a step that was not seen scheduled, and of which only the output tells."""
        if self._step_log is not None:
            self.controller.settle()
            self._step_log.output(None, step.measures, self._outcomes(verified), verified.cut, now)
        self.idle()

    def read(self, new_tokens: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Takes in the tokens that an output brought each request, after its drafts: they say what its text is now."""
        if self.modes is not None:
            self.modes.read(new_tokens)

    def idle(self) -> None:
        """The engine has had nothing to do: the time up to the next output is not a step's."""
        if self.controller.expects_exact_times:
            self._clock.idle()
        if self._step_log is not None:
            self._step_log.idle()

    def restart(self, texts: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Begins anew after a fault: nothing has been learned, no step was seen scheduled, and no request is apart.

        Args:
            texts: all output tokens so far of each request that there is, since how far they were read may be part of
                the fault.
        """
        living = dict(texts)
        for controller in self._controllers.values():
            controller.restart()
        self.forced = False
        self._clock = StepClock()
        self._reports.restart()
        if self._step_log is not None:
            self._step_log.restart(living.keys())
        if self.modes is not None:
            self.modes.restart()
            self.modes.read(living.items())

    def close(self) -> None:
        """Takes in the last output, saves what was learned, and ends the step log."""
        try:
            if self._state is not None or self._step_log is not None:
                self.controller.settle()
            if self._state is not None:
                self._state.close()
        finally:
            if self._step_log is not None:
                self._step_log.close()

    def _take_charge(self, policy: PolicyName) -> None:
        if policy != self._active and policy in self._controllers:
            self.controller.settle()
            self._active = policy
            # A policy that goes by steps however long they took has let pauses pass as such.
            self._clock.idle()

    def _outcomes(self, verified: VerifiedDrafts) -> DraftOutcomes:
        request_ids, drafted, accepted, _ = verified
        return DraftOutcomes(request_ids, drafted, accepted, self._modes_of(request_ids))

    def _modes_of(self, request_ids: Sequence[str]) -> list[int]:
        return [USUAL] * len(request_ids) if self.modes is None else self.modes.of(request_ids)
