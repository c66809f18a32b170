"""What the scheduler does each step, told in plain data: no vLLM here, so that a recorded run can be replayed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from akjax.compiled_controller import CompiledController, DraftOutcome
from akjax.controller import USUAL

from .control_file import ControlFile
from .modes import ModeTracker
from .reports import Reports
from .step_clock import StepClock, only_decodes


class DraftPlan(NamedTuple):
    """How many drafts the requests of a step get to verify in their next one.

    Attributes:
        draft_length: of every request that `each` does not name, and the most of any.
        each: of the requests that have a length of their own.
    """

    draft_length: int
    each: Mapping[str, int]


class VerifiedDrafts(NamedTuple):
    """Of a request's `drafted` >= 1 verified drafts in a step, `accepted` were."""

    request_id: str
    drafted: int
    accepted: int


class Pilot:
    """Turns a step's schedule and output into observations, and the controller's decision into a plan."""

    def __init__(
        self,
        controller: CompiledController,
        control: ControlFile,
        modes: ModeTracker | None,
        reports: Reports,
    ) -> None:
        """`modes` is None if code mode is off."""
        self.controller = controller
        self.modes = modes
        self._control = control
        self._reports = reports
        self._clock = StepClock()

    def scheduled(self, outputs: Mapping[str, Sequence[int]], finished: Iterable[str], now: float) -> DraftPlan:
        """The plan for the requests of the step just scheduled.

        Args:
            outputs: the output tokens so far of each scheduled request, in the step's order.
            finished: requests that ended since the last step, by whatever cause.
            now: monotonic, in seconds.
        """
        for request_id in finished:
            self.controller.forget(request_id)
            if self.modes is not None:
                self.modes.forget(request_id)
        if self.modes is not None:
            for request_id, tokens in outputs.items():
                self.modes.follow(request_id, tokens)

        forced = self._control.forced()
        # The call is made in any case: it takes in the last output.
        decoding = [] if forced is not None else [r for r in outputs if self.controller.knows(r)]
        lengths = self.controller.decide(decoding, [self._mode(request_id) for request_id in decoding])
        if forced is not None:
            plan = DraftPlan(forced, {})
        elif lengths.each is None:
            plan = DraftPlan(lengths.batch, {})
        else:
            plan = DraftPlan(lengths.batch, dict(zip(decoding, lengths.each.tolist(), strict=True)))
        if outputs:
            self._reports.step(plan.draft_length, now, self.controller, self.modes)
        return plan

    def output(
        self,
        scheduled: Mapping[str, int],
        drafts: Mapping[str, Sequence[int]],
        verified: Iterable[VerifiedDrafts],
        now: float,
    ) -> None:
        """Takes in a step's output.

        Args:
            scheduled: tokens of each request of the step.
            drafts: the drafts among them.
            verified: what became of them, in output order.
            now: when the output arrived; monotonic, in seconds.
        """
        gap_ms = self._clock.gap_ms(now)
        teaches = gap_ms is not None and only_decodes(scheduled, drafts)
        if teaches and gap_ms is not None:
            self._reports.step_time(gap_ms)
        self.controller.observe(
            tokens=len(scheduled) + sum(map(len, drafts.values())),
            requests=len(scheduled),
            ms=gap_ms or 0.0,
            teaches=teaches,
            outcomes=[DraftOutcome(*outcome, self._mode(outcome.request_id)) for outcome in verified],
        )

    def _mode(self, request_id: str) -> int:
        return USUAL if self.modes is None else self.modes.mode(request_id)
