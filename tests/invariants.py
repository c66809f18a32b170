"""What holds of the scheduler in every step, whatever the requests do: one list, for short tests and long runs."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from vllm.v1.core.sched.output import SchedulerOutput

from akjax.compiled_controller import CompiledController, DraftOutcomes
from akjax.scheduler import AdaptiveKScheduler
from akjax.scheduler.levels import levels_of_schedule
from akjax.scheduler.pilot import DraftPlan
from harness import Token, Turn


class Invariants:
    """Watches an `AdaptiveKScheduler`, from before its first step.

    Where faults are injected, what is checked is that vLLM serves as if there was none, on its static schedule while
    there is no plan; that of steps that were in flight nothing untrue is told; and that from there on all holds again.

    Attributes:
        observations: outcomes of requests' drafts that the controllers were told.
        injected: how many faults there were to be so far.
    """

    def __init__(self, scheduler: AdaptiveKScheduler, token: Token | None = None) -> None:
        """Watches `scheduler`, inside `watching`; `token` is what belongs at each place, where that is known."""
        assert scheduler.pilot is not None
        self.observations = 0
        self.injected: Callable[[], int] = lambda: 0
        self._scheduler, self._token = scheduler, token
        self._pilot = scheduler.pilot
        speculation = scheduler.vllm_config.speculative_config
        assert speculation is not None
        self._draft_limit = speculation.num_speculative_tokens
        lookup, schedule = self._scheduler.dynamic_sd_lookup, speculation.num_speculative_tokens_per_batch_size
        self._levels = levels_of_schedule(lookup, schedule, self._draft_limit)
        self._planned: dict[str, int] = {}
        self._given: dict[str, int] = {}
        self._told: list[tuple[CompiledController, DraftOutcomes]] = []
        self._first_capacity = self._pilot.controller.capacity
        self._most_living = 0
        self._faults: list[logging.LogRecord] = []
        self._faults_seen = 0
        # Steps that were scheduled, and whether it is known that their outcomes are told.
        self._in_flight: list[tuple[SchedulerOutput, bool]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hears what controllers are told, and what the scheduler says of faults."""
        observe, told = CompiledController.observe, self._told
        logger, handler = logging.getLogger("vllm.akjax"), logging.Handler(logging.ERROR)
        handler.emit = self._faults.append

        def heard(self: CompiledController, *, outcomes: DraftOutcomes, **rest: Any) -> None:
            told.append((self, outcomes))
            observe(self, outcomes=outcomes, **rest)

        with patch.object(CompiledController, "observe", heard):
            level = logger.level
            # However little vLLM is to log.
            logger.setLevel(logging.ERROR)
            logger.addHandler(handler)
            try:
                yield
            finally:
                logger.removeHandler(handler)
                logger.setLevel(level)

    def begin(self, request_id: str) -> None:
        """A request, or a session's next part, of which no token has come out."""
        self._given[request_id] = 0

    def after(self, turn: Turn) -> None:
        """Asserts all of it, after a turn of the engine's loop."""
        assert self.faults_logged <= self.injected(), self._faults[-1].getMessage()
        assert self.faults_logged == self._scheduler.faults.count
        undisturbed = self.faults_logged == self._faults_seen
        self._faults_seen = self.faults_logged
        stopped = self._scheduler.pilot is None
        if stopped:
            assert "stopped for good" in self._faults[-1].getMessage()
        else:
            assert self._scheduler.pilot is self._pilot
        if turn.scheduled is not None:
            if self._scheduler.plan is not None:
                assert not stopped
                self._plan_is_allowed(self._scheduler.plan)
            else:
                assert stopped or not undisturbed, "no plan, and no fault"
                if undisturbed:
                    self._schedule_is_vllms(turn.scheduled)
            self._drafts_are_those_planned(turn)
            self._in_flight.append((turn.scheduled, not stopped))
        if not undisturbed:
            self._in_flight = [(step, False) for step, _ in self._in_flight]
        if turn.delivered is not None:
            self._observations_are_true(turn, undisturbed, stopped)
            if self._token is not None:
                self._tokens_are_true(turn, self._token)
        if not stopped:
            self._kept_is_of_the_living(turn, undisturbed)

    def at_the_end(self) -> None:
        """Asserts that nothing is left, once all requests have ended and the engine has no work."""
        assert self.faults_logged == self.injected()
        assert not self._scheduler.requests
        assert self._scheduler.pilot is None or self._pilot.request_ids == set()
        assert self._scheduler.kv_cache_manager.usage == 0

    @property
    def faults_logged(self) -> int:
        """Faults that the scheduler told of so far."""
        return len(self._faults)

    def _plan_is_allowed(self, plan: DraftPlan) -> None:
        if self._pilot.forced:
            assert min(self._levels[0], 1) <= plan.draft_length <= self._draft_limit
            assert not plan.each
        elif not plan.each:
            assert plan.draft_length in self._levels
        else:
            assert plan.draft_length == max(plan.each.values())
            assert min(self._levels[0], 1) <= min(plan.each.values())
            assert plan.draft_length <= self._draft_limit

    def _schedule_is_vllms(self, step: SchedulerOutput) -> None:
        lookup, requests = self._scheduler.dynamic_sd_lookup, len(step.num_scheduled_tokens)
        static = self._draft_limit if lookup is None or not requests else lookup[requests]
        assert step.num_spec_tokens_to_schedule == static

    def _drafts_are_those_planned(self, turn: Turn) -> None:
        step, plan = turn.scheduled, self._scheduler.plan
        assert step is not None
        if plan is None:
            plan = DraftPlan(step.num_spec_tokens_to_schedule, {})
        assert step.num_spec_tokens_to_schedule == plan.draft_length
        for request_id in step.finished_req_ids:
            self._planned.pop(request_id, None)
        began = _began(turn, scheduled=True)
        for request_id, drafts in step.scheduled_spec_decode_tokens.items():
            if request_id in began:
                # vLLM fills a new decode up to the size of the others, if all have one.
                assert self._scheduler.dynamic_sd_lookup is None
                assert len(drafts) == self._draft_limit
            else:
                assert len(drafts) <= self._planned[request_id]
        for request_id in step.num_scheduled_tokens:
            self._planned[request_id] = plan.each.get(request_id, plan.draft_length)

    def _observations_are_true(self, turn: Turn, undisturbed: bool, stopped: bool) -> None:
        """Of each request whose output counted: the drafts that were verified, and how many of them the model took."""
        step, began = turn.delivered, _began(turn, scheduled=False)
        assert step is not None
        (known,) = [known for scheduled, known in self._in_flight if scheduled is step]
        del self._in_flight[: [scheduled is step for scheduled, _ in self._in_flight].index(True) + 1]
        told = self._told.copy()
        self._told.clear()
        if undisturbed and stopped:
            assert not told
        if not known and not told:
            return
        cut = step.num_invalid_spec_tokens or {}
        expected = {
            request_id: (drafted - cut.get(request_id, 0), turn.accepted[request_id])
            for request_id, drafted in turn.drafted.items()
            if turn.tokens.get(request_id) and request_id not in began and drafted > cut.get(request_id, 0)
        }
        assert len(told) == 1, f"told {len(told)} times"
        ((controller, outcomes),) = told
        assert controller is self._pilot.controller
        pairs = zip(outcomes.drafted, outcomes.accepted, strict=True)
        assert dict(zip(outcomes.request_ids, pairs, strict=True)) == expected
        assert len(outcomes.request_ids) == len(expected)
        assert not undisturbed or all(controller.knows(request_id) for request_id in expected)
        self.observations += len(expected)

    def _tokens_are_true(self, turn: Turn, token: Token) -> None:
        for request_id, tokens in turn.tokens.items():
            first = self._given[request_id]
            assert tokens == [token(request_id, first + position) for position in range(len(tokens))]
            self._given[request_id] += len(tokens)

    def _kept_is_of_the_living(self, turn: Turn, undisturbed: bool) -> None:
        living = self._scheduler.requests.keys() | self._scheduler.finished_req_ids
        kept = self._pilot.request_ids
        assert kept <= living, f"kept of requests that are gone: {sorted(kept - living)}"
        controller = self._pilot.controller
        if undisturbed and turn.scheduled is not None and controller.counts_unobserved and not self._pilot.forced:
            unknown = turn.scheduled.num_scheduled_tokens.keys() - controller.request_ids
            assert not unknown, f"decided for without being kept: {sorted(unknown)}"
        # Rows that no request has and that are not free would make it grow on and on.
        self._most_living = max(self._most_living, len(living))
        assert controller.capacity <= max(self._first_capacity, 4 * self._most_living)


def _began(turn: Turn, *, scheduled: bool) -> Sequence[str]:
    """The requests that no drafter had seen when the step was scheduled."""
    step = turn.scheduled if scheduled else turn.delivered
    assert step is not None
    new = [request.req_id for request in step.scheduled_new_reqs]
    return [*new, *step.scheduled_cached_reqs.resumed_req_ids]
