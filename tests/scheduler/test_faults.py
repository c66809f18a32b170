"""A fault of ours, wherever it is: vLLM serves on, it is said once, and adaptation begins anew or ends."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from adaptive_engine import DRAFT_LIMIT, SCHEDULE, Build, pilot_of, scheduler_of
from akjax.compiled_controller import CompiledController
from akjax.scheduler import AdaptiveKScheduler
from akjax.scheduler.faults import MOST_RESTARTS, WINDOW_SECONDS, Faults
from akjax.scheduler.modes import ModeTracker, Vocabulary
from akjax.scheduler.pilot import Pilot, ScheduledStep
from akjax.step_log import StepRecord
from harness import FakeEngine, Turn, hashed_token, make_config
from injections import FAULTS, Injected, Switch, raising

TINY_TARGET = str(Path(__file__).parents[2] / "scripts/tiny_pair/target")
REQUESTS = 4
STATIC_K = 3  # of SCHEDULE for four requests
LONG, SHORT = 1000, 12


# How many faults are let pass.


def faults(clock: Callable[[], float], caplog: pytest.LogCaptureFixture) -> Faults:
    logger = logging.getLogger("akjax.test_faults")
    caplog.set_level(logging.INFO, logger.name)
    return Faults(logger, clock)


def raised(where: int, what: str = "injected") -> Exception:
    """An error raised at one of two lines."""
    try:
        if where:
            raise ValueError(what)
        raise ValueError(what)
    except ValueError as fault:
        return fault


@given(gaps=st.lists(st.floats(0.0, 2.0 * WINDOW_SECONDS), max_size=30))
def test_it_begins_anew_at_most_so_often_in_any_hour(gaps: list[float]) -> None:
    now = 0.0
    logger = logging.getLogger("akjax.test_faults")
    logger.setLevel(logging.CRITICAL)
    counted = Faults(logger, lambda: now)
    restarts: list[float] = []
    for number, gap in enumerate(gaps, start=1):
        now += gap
        recent = [restart for restart in restarts if now - restart < WINDOW_SECONDS]
        assert counted.may_begin_anew(raised(0)) == (len(recent) < MOST_RESTARTS)
        if len(recent) < MOST_RESTARTS:
            restarts.append(now)
        assert counted.count == number


def test_faults_of_a_kind_are_logged_in_full_once_then_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    counted = faults(lambda: 0.0, caplog)
    for fault in (raised(0, "one"), raised(0, "two"), raised(1, "three"), raised(0, "four"), ValueError("bare")):
        counted.may_begin_anew(fault)
    assert [record.exc_info is not None for record in caplog.records] == [True, False, True, False, True]
    messages = [record.getMessage() for record in caplog.records]
    assert not any("\n" in message for message in messages)
    assert "fault 2 of its own, ValueError: two: what it learned is lost and it begins anew, time 2 of 3" in messages[1]
    assert "fault 4 of its own, ValueError: four: it has stopped for good" in messages[3]


def test_a_fault_that_cannot_say_what_it_is_is_counted_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert faults(lambda: 0.0, caplog).may_begin_anew(MuteError())
    assert "MuteError" in caplog.text
    assert faults(lambda: 0.0, caplog).may_begin_anew(ValueError("of\nlines"))
    assert "ValueError: of lines: what" in caplog.records[-1].getMessage()


# Every part of ours in vLLM's own loop.


def pilot_of_any(engine: FakeEngine) -> Pilot:
    pilot = scheduler_of(engine).pilot
    assert pilot is not None, "stopped for good"
    return pilot


class Served:
    """An engine with four requests at any time, one of them a short one."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.turns: list[Turn] = []

    def run(self, steps: int) -> list[Turn]:
        for _ in range(steps):
            if len(self.engine.scheduler.requests) < REQUESTS:
                number = len(self.engine.requests)
                self.engine.add(10, LONG if number < REQUESTS - 1 else SHORT)
            self.turns.append(self.engine.step())
        return self.turns[len(self.turns) - steps :]

    def until(self, count: int, use: Callable[[FakeEngine], None]) -> None:
        """Serves until there were so many faults."""
        for _ in range(60):
            if scheduler_of(self.engine).faults.count >= count:
                break
            use(self.engine)
            self.run(1)
        assert scheduler_of(self.engine).faults.count == count


def with_everything(tmp_path: Path, **settings: Any) -> dict[str, Any]:
    """Settings that have every part of ours at work."""
    return {"code_mode": 1, "step_log": str(tmp_path / "steps.jsonl"), **settings}


def entries(log: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in log.records if record.levelno >= logging.ERROR]


def outputs_of_base(engine: FakeEngine, asynchronous: bool) -> dict[str, list[int]]:
    """What vLLM's own scheduler makes of the same requests."""
    config = make_config(
        num_speculative_tokens=DRAFT_LIMIT, schedule=SCHEDULE, max_num_seqs=8, async_scheduling=asynchronous
    )
    base = FakeEngine(AsyncScheduler if asynchronous else Scheduler, config)
    for request_id, request in engine.requests.items():
        base.add(list(request.prompt_token_ids or ()), request.max_tokens, request_id)
    base.drain()
    assert base.finish_reasons == engine.finish_reasons
    return base.outputs


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_after_any_fault_vllm_serves_on_and_adaptation_comes_back_until_it_is_too_often(
    build: Build,
    asynchronous: bool,
    fault: Injected,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
) -> None:
    engine = build(asynchronous, with_everything(tmp_path, **fault.settings), {"tokenizer": TINY_TARGET})
    served = Served(engine)
    scheduler, switch = scheduler_of(engine), Switch()
    served.run(40)
    learned = pilot_of(engine).controller.taught
    assert learned > 10
    fault.install(engine, monkeypatch, switch)
    served.run(2)
    assert not entries(log)

    # A fault that passes.
    switch.times = 1
    served.until(1, fault.use)
    assert len(entries(log)) == 1
    assert entries(log)[0].exc_info is not None
    assert pilot_of_any(engine).controller.taught == 0, "begun anew"
    taught_before = len(served.turns)
    served.run(40)
    assert scheduler.faults.count == 1
    assert scheduler.plan is not None
    assert 10 < pilot_of_any(engine).controller.taught < len(served.turns) - taught_before
    assert len(entries(log)) == 1

    # And one that stays.
    switch.times = 10**6
    served.until(1 + MOST_RESTARTS, fault.use)
    assert scheduler.pilot is None
    assert scheduler.plan is None
    said = entries(log)
    assert len(said) == 1 + MOST_RESTARTS
    assert [record.exc_info is not None for record in said] == [True, False, False, False]
    assert "time 3 of 3 in an hour" in said[2].getMessage()
    assert "stopped for good; the engine goes on with its static schedule" in said[3].getMessage()
    served.run(3)
    full = [turn for turn in served.run(20) if turn.scheduled and len(turn.scheduled.num_scheduled_tokens) == REQUESTS]
    drafts = {len(of_one) for turn in full for of_one in turn.scheduled.scheduled_spec_decode_tokens.values()}  # pyright: ignore[reportOptionalMemberAccess]
    assert drafts == {STATIC_K}
    served.turns += engine.drain()
    engine.check()
    asked = {turn.scheduled.num_spec_tokens_to_schedule for turn in served.turns if turn.scheduled is not None}
    assert asked <= {*range(DRAFT_LIMIT + 1)}
    assert not scheduler._in_flight
    assert engine.outputs == outputs_of_base(engine, asynchronous)
    scheduler.shutdown()
    assert len(entries(log)) == 1 + MOST_RESTARTS


# What a fault leaves behind.

STAGES = {name: FAULTS[name] for name in ("control file", "decide", "observe", "step clock", "hook", "step log")}


@pytest.mark.parametrize("fault", STAGES.values(), ids=STAGES.keys())
@pytest.mark.parametrize("policy", ["default", "reference"])
def test_steps_that_were_in_flight_teach_nothing_and_the_next_ones_what_is_so(
    build: Build, asynchronous: bool, policy: str, fault: Injected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught: list[ScheduledStep] = []
    output = Pilot.output

    def noted(self: Pilot, step: ScheduledStep, *args: Any, **more: Any) -> None:
        taught.append(step)
        output(self, step, *args, **more)

    times: list[tuple[float, float]] = []
    observe = CompiledController.observe

    def timed(self: CompiledController, *, step: Any, ms: float, teaches: bool, outcomes: Any) -> None:
        if teaches:
            times.append((ms, 20.0 + 0.8 * (step.tokens + step.prefill)))
        observe(self, step=step, ms=ms, teaches=teaches, outcomes=outcomes)

    in_flight: list[ScheduledStep] = []
    begin_anew = AdaptiveKScheduler._begin_anew

    def marked(self: AdaptiveKScheduler, *args: Any) -> None:
        in_flight.extend(step for _, step in self._in_flight)
        taught.clear()
        begin_anew(self, *args)

    monkeypatch.setattr(Pilot, "output", noted)
    monkeypatch.setattr(CompiledController, "observe", timed)
    monkeypatch.setattr(AdaptiveKScheduler, "_begin_anew", marked)
    engine = build(asynchronous, with_everything(tmp_path, policy=policy), {"tokenizer": TINY_TARGET})
    served, scheduler, switch = Served(engine), scheduler_of(engine), Switch()
    fault.install(engine, monkeypatch, switch)
    served.run(30)
    for count in range(1, 4):
        switch.times = 1
        served.until(count, fault.use)
        served.run(20)
        assert scheduler.faults.count == count
        assert len(taught) > 15
        assert not any(step is other for step in taught for other in in_flight)
    assert in_flight or not asynchronous
    engine.drain()
    engine.check()
    assert len(times) > 60
    for ms, expected in times:
        assert ms == pytest.approx(expected)


def test_the_step_after_a_fault_is_as_vllm_schedules_it(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(False, {"code_mode": 0}, accept=lambda request, drafts, rng: drafts)
    served, scheduler, switch = Served(engine), scheduler_of(engine), Switch()
    FAULTS["decide"].install(engine, monkeypatch, switch)
    served.run(60)
    assert scheduler.plan is not None
    assert scheduler.plan.draft_length != STATIC_K, "a k that shows nothing"
    switch.times = 1
    (failed,) = served.run(1)
    assert scheduler.faults.count == 1
    assert scheduler.plan is None
    assert failed.scheduled is not None
    assert failed.scheduled.num_spec_tokens_to_schedule == STATIC_K
    (following,) = served.run(1)
    assert following.scheduled is not None
    assert scheduler.plan is not None
    drafts = following.scheduled.scheduled_spec_decode_tokens.values()
    assert [len(of_one) for of_one in drafts] == [STATIC_K] * REQUESTS


def test_there_is_no_plan_from_a_fault_up_to_the_next_step(
    build: Build, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(asynchronous, {"code_mode": 0})
    served, scheduler, switch = Served(engine), scheduler_of(engine), Switch()
    FAULTS["observe"].install(engine, monkeypatch, switch)
    served.run(20)
    switch.times = 1
    served.run(1)
    assert scheduler.faults.count == 1
    assert scheduler.plan is None
    served.run(1)
    assert scheduler.plan is not None


@pytest.mark.parametrize("part", ["mode reading", "decide", "observe", "hook"])
def test_the_kind_of_each_text_is_known_after_a_fault_as_if_there_had_been_none(
    build: Build, asynchronous: bool, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def token(request_id: str, position: int) -> int:
        # A fence opens or closes every nine tokens, for each request at another time.
        is_backtick = (position + sum(map(ord, request_id))) % 9 < 3
        return ord("`") if is_backtick else ord("a") + hashed_token(request_id, position) % 3

    engine = build(asynchronous, with_everything(tmp_path), {"tokenizer": TINY_TARGET}, token=token)
    pilot = pilot_of(engine)
    assert pilot.modes is not None
    vocabulary = Vocabulary({ord("`"): "`"})
    served, scheduler, switch = Served(engine), scheduler_of(engine), Switch()
    FAULTS[part].install(engine, monkeypatch, switch)
    seen = set()
    for turn in range(90):
        if turn in (20, 45, 60):
            switch.times = 1
        served.run(1)
        alive = [*engine.scheduler.requests]
        for request_id, mode in zip(alive, pilot.modes.of(alive), strict=True):
            afresh = ModeTracker(vocabulary)
            assert mode == afresh.scan(request_id, list(engine.scheduler.requests[request_id].output_token_ids))
            seen.add(mode)
    assert scheduler.faults.count == 3
    assert scheduler.pilot is pilot
    assert len(seen) == 2
    engine.drain()
    engine.check()


def test_nothing_is_kept_of_a_request_that_ended_when_the_fault_came(
    build: Build, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(asynchronous, with_everything(tmp_path), {"tokenizer": TINY_TARGET})
    served, scheduler, switch = Served(engine), scheduler_of(engine), Switch()
    # Of a request that ended the modes are told before the log is.
    FAULTS["modes forgotten"].install(engine, monkeypatch, switch)
    served.run(30)
    switch.times = 1
    served.until(1, lambda _: None)
    assert pilot_of_any(engine).request_ids <= engine.scheduler.requests.keys() | scheduler.finished_req_ids


def test_the_step_log_goes_on_and_does_not_say_what_it_does_not_know(
    build: Build, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(asynchronous, with_everything(tmp_path, code_mode=0))
    served, switch = Served(engine), Switch()
    FAULTS["decide"].install(engine, monkeypatch, switch)
    served.run(30)
    switch.times = 1
    served.run(30)
    served.turns += engine.drain()
    engine.scheduler.shutdown()
    lines = (tmp_path / "steps.jsonl").read_bytes().splitlines()[1:]
    records = [msgspec.json.decode(line, type=StepRecord) for line in lines]
    delivered = [turn for turn in served.turns if turn.delivered and turn.delivered.num_scheduled_tokens]
    assert len(records) == len(delivered)
    unknown = [number for number, record in enumerate(records) if record.untaught == "unknown"]
    # The step that waited to be taken in, and those in flight: with async scheduling the one before the failed one too.
    assert len(unknown) == (3 if asynchronous else 2)
    assert unknown == list(range(unknown[0], unknown[0] + len(unknown)))
    assert all(records[number].predicted_ms is None for number in unknown)
    assert records[unknown[-1] + 1].untaught == "idle", "from when on it ran is not known"
    assert records[unknown[-1] + 2].untaught == ""


def test_faults_hours_apart_never_stop_it(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(True, {"code_mode": 0})
    served, scheduler, switch = Served(engine), scheduler_of(engine), Switch()
    FAULTS["decide"].install(engine, monkeypatch, switch)
    for count in range(1, 9):
        switch.times = 1
        served.until(count, lambda _: None)
        engine.clock.now += WINDOW_SECONDS / MOST_RESTARTS
    served.run(2)
    assert scheduler.pilot is not None
    assert scheduler.plan is not None


def test_a_fault_at_shutdown_leaves_the_step_log_whole(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(True, with_everything(tmp_path, code_mode=0))
    served = Served(engine)
    served.run(30)
    switch = Switch()
    raising(CompiledController, "settle")(engine, monkeypatch, switch)
    switch.times = 10
    engine.scheduler.shutdown()
    lines = (tmp_path / "steps.jsonl").read_bytes().splitlines()
    outputs = [turn for turn in served.turns if turn.delivered and turn.delivered.num_scheduled_tokens]
    assert len(lines) == 1 + len(outputs)
