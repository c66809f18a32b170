"""vLLM's scheduler, with draft lengths chosen by the models."""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from operator import attrgetter
from time import monotonic
from typing import Any, TypeVar

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from .assembly import assemble
from .faults import Faults
from .pilot import DraftPlan, Pilot, ScheduledStep, VerifiedDrafts
from .reports import describe_cost
from .sampling import is_apart

# A server's log shows the loggers below `vllm` only.
logger = init_logger("vllm.akjax")

R = TypeVar("R")


class AdaptiveKScheduler(AsyncScheduler):
    """Chooses each step how many drafts to verify in the next, with vLLM's async scheduling or without.

    Use it by `--scheduler-cls akjax.scheduler.AdaptiveKScheduler`. It reads vLLM's hooks and writes two things:
    `SchedulerOutput.num_spec_tokens_to_schedule`, and where requests have lengths of their own, how many of their
    drafts are kept. Where requests come and where vLLM is paused it only listens, to tell a pause from a long step.
    A fault of ours never stops serving: it is logged, and what was learned is thrown away and learned anew, unless that
    happened too often. While there is no plan the engine runs on its static schedule.

    Attributes:
        pilot: what observes and decides; None where k must stay as configured, and after too many faults.
        plan: of the step last scheduled; None before the first, and from a fault up to the next step.
        faults: of ours so far, by `faults.count`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what vLLM's scheduler takes.

        Raises:
            ValueError: no speculative decoding, or a schedule or setting that cannot be used.
        """
        super().__init__(*args, **kwargs)
        self.pilot: Pilot | None = assemble(self.vllm_config, self.dynamic_sd_lookup, _log)
        self.plan: DraftPlan | None = None
        self.faults = Faults(logger, monotonic)
        self._verified = VerifiedDrafts([], [], [], {})
        self._hook_fault: Exception | None = None
        self._in_flight: list[tuple[SchedulerOutput, ScheduledStep]] = []

    def add_request(self, request: Request) -> None:
        """Takes a request; if there was none that could run, the engine has waited for this one."""
        if not self.has_unfinished_requests():
            self._with_pilot(Pilot.idle)
        self._with_pilot(_noticed, request)
        super().add_request(request)

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pauses vLLM or lets it go on: either way the time up to the next output is not a step's."""
        self._with_pilot(Pilot.idle)
        super().set_pause_state(pause_state)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        self.plan = self._with_pilot(self._planned, scheduler_output)
        if self.plan is not None:
            scheduler_output.num_spec_tokens_to_schedule = self.plan.draft_length
        self._of_vllm()._update_after_schedule(scheduler_output)
        if self.plan is not None and self.plan.each:
            self._with_pilot(self._trim, scheduler_output.num_scheduled_tokens)

    def _update_request_with_output(self, *args: Any, **kwargs: Any) -> Any:
        # Handed on as they come, for vLLM may add to them.
        return self._of_vllm()._update_request_with_output(*args, **kwargs)

    def _of_vllm(self) -> Any:
        """The methods of the class that vLLM would use.

        Without async scheduling that is not `AsyncScheduler`: it would plan on output that is yet to come, which no
        worker expects then, and keep planning on it where vLLM throws an output away.
        """
        return super() if self.scheduler_config.async_scheduling else super(AsyncScheduler, self)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """What vLLM makes of a step's output; the time it arrived and its accepted drafts teach the models."""
        now = monotonic()
        self._verified, self._hook_fault = VerifiedDrafts([], [], [], {}), None
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._with_pilot(self._observed, scheduler_output, outputs, now)
        return outputs

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        """Notes how many of a request's drafts were accepted. Drafts cut by a grammar were never verified."""
        # This runs for each request of each step, so it does no more than it must.
        try:
            drafted = num_draft_tokens
            request_ids, of_drafted, of_accepted, cut = self._verified
            if num_invalid_spec_tokens and request_id in num_invalid_spec_tokens:
                cut[request_id] = num_invalid_spec_tokens[request_id]
                drafted -= cut[request_id]
            if drafted > 0:
                request_ids.append(request_id)
                of_drafted.append(drafted)
                of_accepted.append(num_accepted_tokens)
        except Exception as fault:
            # Some requests have this step's tokens by now and some have not, so it is no moment to begin anew.
            self._hook_fault = fault
        return super().make_spec_decoding_stats(
            spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
        )

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Takes the drafts of an engine without async scheduling, and keeps as many as were planned."""
        super().update_draft_token_ids(draft_token_ids)
        self._with_pilot(self._trim, draft_token_ids.req_ids)

    def shutdown(self) -> None:
        """Logs what was learned, ends the step log, then shuts down."""
        self._with_pilot(lambda pilot: _log(describe_cost(pilot.controller)))
        self._with_pilot(Pilot.close)
        super().shutdown()

    def _planned(self, pilot: Pilot, scheduler_output: SchedulerOutput) -> DraftPlan:
        tokens, requests = scheduler_output.num_scheduled_tokens, self.requests
        # With async scheduling drafts that may yet be rejected are among them: a few tokens for each request.
        context = sum([requests[request_id].num_computed_tokens for request_id in tokens])
        plan = pilot.scheduled(
            list(tokens), finished=scheduler_output.finished_req_ids, now=monotonic(), context=context
        )
        if not 0 <= plan.draft_length <= self.num_spec_tokens:
            raise ValueError(f"k must be 0 to {self.num_spec_tokens}, planned {plan.draft_length}")
        step = ScheduledStep(
            tokens,
            scheduler_output.scheduled_spec_decode_tokens,
            context=context,
            drafting=plan.draft_length,
            forced=pilot.forced,
        )
        self._in_flight.append((scheduler_output, step))
        return plan

    def _observed(
        self, pilot: Pilot, scheduler_output: SchedulerOutput, outputs: Mapping[int, EngineCoreOutputs], now: float
    ) -> None:
        if self._hook_fault is not None:
            raise self._hook_fault
        step = self._arrived(scheduler_output)
        # No drafter has seen a request in its first step, or its first after a preemption: what vLLM verifies there,
        # where it has no dynamic schedule, is padding up to a uniform batch.
        undrafted = {request.req_id for request in scheduler_output.scheduled_new_reqs}
        undrafted |= scheduler_output.scheduled_cached_reqs.resumed_req_ids
        verified = self._verified.without(undrafted) if undrafted else self._verified
        if step is None:
            tokens, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
            pilot.unknown_output(ScheduledStep(tokens, drafts), verified, now)
        else:
            pilot.output(step, verified, now, busy=any(later.tokens for _, later in self._in_flight))
        of_all = chain.from_iterable([of_client.outputs for of_client in outputs.values()])
        pilot.read(map(attrgetter("request_id", "new_token_ids"), of_all))

    def _arrived(self, scheduler_output: SchedulerOutput) -> ScheduledStep | None:
        """The step of an output as it was planned; None if it was not.

        Outputs arrive in the order of their steps, so one before it whose output never came is dropped.
        """
        for passed, (scheduled, step) in enumerate(self._in_flight, start=1):
            if scheduled is scheduler_output:
                del self._in_flight[:passed]
                return step
        return None

    def _trim(self, _: Pilot, request_ids: Iterable[str]) -> None:
        """Keeps as many drafts of these requests as were planned, of those that are still there."""
        plan = self.plan
        if plan is None:
            return
        for request_id in request_ids:
            request = self.requests.get(request_id)
            keep = plan.each.get(request_id, plan.draft_length)
            if request is not None and len(request.spec_token_ids) > keep:
                request.spec_token_ids = request.spec_token_ids[:keep]

    def _with_pilot(self, action: Callable[..., R], *args: Any) -> R | None:
        """What `action` returns for the pilot and `args`; None if there is no pilot any more."""
        if self.pilot is None:
            return None
        try:
            return action(self.pilot, *args)
        except Exception as fault:
            self._begin_anew(self.pilot, fault)
            return None

    def _begin_anew(self, pilot: Pilot, fault: Exception) -> None:
        """Throws away what was learned, or the pilot itself; steps that are in flight will teach neither."""
        self.plan = None
        self._in_flight.clear()
        if not self.faults.may_begin_anew(fault):
            self.pilot = None
            return
        try:
            pilot.restart((request_id, request.output_token_ids) for request_id, request in self.requests.items())
            for request in self.requests.values():
                _noticed(pilot, request)
        except Exception as another:
            self._begin_anew(pilot, another)


def _noticed(pilot: Pilot, request: Request) -> None:
    if is_apart(request.sampling_params):
        pilot.set_apart(request.request_id)


def _log(line: str) -> None:
    logger.info("adaptive k: %s", line)
