"""The scheduler in vLLM's own loop: what it plans is what runs, and serving is untouched."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import FinishReason

from adaptive_engine import DRAFT_LIMIT, SCHEDULE, Build, pilot_of, scheduler_of
from akjax.compiled_controller import CompiledController, DraftLengths
from akjax.scheduler import AdaptiveKScheduler
from akjax.scheduler.pilot import Pilot, ScheduledStep
from akjax.scheduler.settings import PREFIX
from harness import FakeEngine, Turn, bernoulli, make_config

REFERENCE: dict[str, Any] = {"code_mode": 0, "policy": "reference"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "default": {"code_mode": 0},
    "default per request": {"code_mode": 0, "per_request": True},
}
MODES: dict[str, dict[str, Any]] = {
    **DEFAULTS,
    "reference": REFERENCE,
    "reference per request": {**REFERENCE, "per_request": True},
}


def drafts_of(turn: Turn) -> dict[str, int]:
    if turn.scheduled is None:
        return {}
    return {request: len(drafts) for request, drafts in turn.scheduled.scheduled_spec_decode_tokens.items()}


def turns_with_plans(engine: FakeEngine) -> Iterator[tuple[Turn, Any]]:
    """Every turn, with the plan that stood before it."""
    while engine.has_work:
        plan = scheduler_of(engine).plan
        yield engine.step(), plan


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES.keys())
def test_the_drafts_of_a_step_are_those_planned_in_the_one_before(
    build: Build, asynchronous: bool, settings: dict[str, Any]
) -> None:
    engine = build(asynchronous, settings, accept=bernoulli((0.9, 0.6, 0.5, 0.3, 0.2)))
    for number in range(6):
        engine.add(10 + number, 80)
    seen = set()
    for turn, plan in turns_with_plans(engine):
        for request, drafts in drafts_of(turn).items():
            assert drafts == plan.each.get(request, plan.draft_length)
            seen.add(drafts)
    engine.check()
    assert len(seen) > 1, "k never changed, so that nothing was shown"


def test_requests_get_lengths_of_their_own(build: Build, asynchronous: bool) -> None:
    def accept(request: str, drafts: int, rng: Random) -> int:
        return drafts if request == "good" else 0

    engine = build(asynchronous, {**REFERENCE, "per_request": True}, accept=accept)
    engine.add(10, 200, request_id="good")
    engine.add(10, 100, request_id="bad")
    last = [drafts for turn in engine.run(30) if len(drafts := drafts_of(turn)) == 2][-1]
    assert last == {"good": DRAFT_LIMIT, "bad": 1}


def test_a_drafter_that_gives_fewer_is_taught_by_those_it_gave(build: Build) -> None:
    engine = build(
        False,
        REFERENCE,
        accept=lambda request, drafts, rng: drafts,
        drafts_given=lambda request, asked: min(asked, 2),
    )
    engine.add(10, 60)
    engine.drain()
    engine.check()
    pool = pilot_of(engine).controller.settle().pools[0]
    assert all(pool[:2] > 0.9)
    assert pool[2] > 0.8, "untested positions drift towards the last tested one"
    assert pool[2] < pool[1]


def test_padding_that_no_drafter_proposed_teaches_nothing(build: Build, asynchronous: bool) -> None:
    """Without a dynamic schedule vLLM pads requests that join by a full prefix-cache hit to a uniform batch."""
    config = {"schedule": None, "enable_prefix_caching": True}
    engine = build(asynchronous, REFERENCE, config, accept=lambda request, drafts, rng: drafts)
    blank = 0
    for _ in range(30):
        engine.add(list(range(100, 133)), 30)
        blank += sum(sum(turn.blank.values()) for turn in engine.run(4))
    engine.drain()
    engine.check()
    assert blank > 0, "nothing was padded"
    pool = pilot_of(engine).controller.settle().pools[0]
    assert all(pool > 0.99)


@pytest.mark.parametrize("settings", [DEFAULTS["default"], REFERENCE], ids=["default", "reference"])
def test_the_cost_model_learns_what_steps_cost(build: Build, asynchronous: bool, settings: dict[str, Any]) -> None:
    engine = build(asynchronous, settings)
    for number in range(40):
        engine.add(10, 40 + number)
    engine.drain()
    state = pilot_of(engine).controller.settle()
    assert int(state.cost.taught) > 50
    assert float(state.cost.error) < 0.03


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES.keys())
def test_a_forced_k_is_what_every_step_verifies(
    build: Build, asynchronous: bool, settings: dict[str, Any], tmp_path: Path
) -> None:
    control = tmp_path / "control"
    engine = build(asynchronous, {**settings, "control": str(control)})
    for _ in range(4):
        engine.add(10, 1000)
    for content, expected in (("force 2", 2), ("force 4", 4), ("force 99", 5), ("force 1", 1), ("force 0", 0)):
        control.write_text(content)
        engine.run(2)
        turns = engine.run(6)
        assert all(turn.scheduled and len(turn.scheduled.num_scheduled_tokens) == 4 for turn in turns)
        verified = [drafts for turn in turns for drafts in drafts_of(turn).values()]
        assert verified == [expected] * (24 if expected else 0)
    for content in (b"force x", b"force -3", b"\x00\xff\xfe", b""):
        control.write_bytes(content)
        engine.run(6)
    control.unlink()
    engine.run(6)
    assert scheduler_of(engine).faults.count == 0


@pytest.mark.parametrize("settings", [*MODES.values(), {"code_mode": 1}], ids=[*MODES.keys(), "code mode 1"])
@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_lost_whatever_happens_to_requests(
    build: Build, asynchronous: bool, settings: dict[str, Any], seed: int
) -> None:
    """Joining, finishing, aborts, preemption by a small cache and chunked prefill, at random."""
    rng = Random(seed)
    tiny = Path(__file__).parents[2] / "scripts/tiny_pair/target"
    config: dict[str, Any] = {"max_num_batched_tokens": 64, "max_model_len": 512}
    if settings["code_mode"] == 1:
        config["tokenizer"] = str(tiny)
    engine = build(asynchronous, settings, config, num_blocks=40, seed=seed)
    waiting = 60
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.3:
            engine.add(rng.randint(1, 120), rng.randint(1, 100))
            waiting -= 1
        if engine.has_work:
            engine.step()
        if engine.requests and rng.random() < 0.02:
            engine.abort(rng.choice(list(engine.scheduler.requests) or list(engine.requests)), late=rng.random() < 0.5)
    engine.check()
    controller = pilot_of(engine).controller
    controller.settle()
    assert not controller._slots, "state of requests that are gone"
    assert not scheduler_of(engine)._in_flight, "steps whose output has come"
    assert any(request.num_preemptions for request in engine.requests.values()), "no request was preempted"


def test_requests_that_were_never_observed_leave_no_rows(build: Build, asynchronous: bool) -> None:
    """One token each, so none ever verifies a draft; or gone before that."""
    engine = build(asynchronous, DEFAULTS["default"])
    controller = pilot_of(engine).controller
    rows = len(controller._rows)
    for number in range(2000):
        request_id = engine.add(1 + number % 40, 1 if number % 3 else 50)
        if number % 3 == 0:
            engine.step()
            engine.abort(request_id, late=number % 2 == 0)
        if number % 8 == 0:
            engine.step()
    engine.drain()
    engine.check()
    controller.settle()
    assert not controller._slots
    assert len(controller._rows) == rows
    assert len(controller._free) == rows


def planned(engine: FakeEngine, steps: int) -> list[int]:
    """The draft length that each of the next steps planned."""
    lengths = []
    for _ in range(steps):
        engine.step()
        plan = scheduler_of(engine).plan
        assert plan is not None
        lengths.append(max(plan.each.values(), default=plan.draft_length))
    return lengths


@pytest.mark.parametrize("settings", DEFAULTS.values(), ids=DEFAULTS.keys())
@pytest.mark.parametrize("requests", [1, 4])
def test_drafts_end_while_none_is_accepted_and_come_back(
    build: Build, asynchronous: bool, settings: dict[str, Any], requests: int
) -> None:
    fails = True
    engine = build(
        asynchronous,
        settings,
        {"max_model_len": 8192},
        accept=lambda request, drafts, rng: 0 if fails else drafts,
        step_ms=lambda step: 20.0 + 2.0 * step.total_num_scheduled_tokens,
    )
    for _ in range(requests):
        engine.add(10, 8000)
    lengths = planned(engine, 300)[-150:]
    assert lengths[-1] == 0 or 0 in lengths[-5:], "at most a look"
    assert lengths.count(0) > 0.7 * len(lengths)
    fails = False
    lengths = planned(engine, 700)
    assert lengths[-50:] == [DRAFT_LIMIT] * 50
    verified = {drafts for turn in engine.run(10) for drafts in drafts_of(turn).values()}
    assert verified == {DRAFT_LIMIT}
    for request_id in list(engine.requests):
        engine.abort(request_id)
    engine.drain()
    engine.check()


def test_the_reference_leaves_no_drafts_out(build: Build, asynchronous: bool) -> None:
    engine = build(
        asynchronous,
        REFERENCE,
        accept=lambda request, drafts, rng: 0,
        step_ms=lambda step: 20.0 + 2.0 * step.total_num_scheduled_tokens,
    )
    engine.add(10, 500)
    assert set(planned(engine, 300)[-100:]) == {1}


def times_taught(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Fills up with the milliseconds of every step that may teach."""
    taught: list[float] = []
    observe = CompiledController.observe

    def noted(self: CompiledController, *, ms: float, teaches: bool, **rest: Any) -> None:
        if teaches:
            taught.append(ms)
        observe(self, ms=ms, teaches=teaches, **rest)

    monkeypatch.setattr(CompiledController, "observe", noted)
    return taught


def test_without_async_scheduling_nothing_is_planned_on_output_that_vllm_threw_away(build: Build) -> None:
    engine = build(False, DEFAULTS["default"])
    requests = [engine.add(40, 60) for _ in range(3)]
    for number in range(12):
        engine.run(4)
        engine.fail_load(requests[number % 3])
    engine.drain()
    engine.check()
    assert {*engine.finish_reasons.values()} == {FinishReason.LENGTH}


def test_without_async_scheduling_a_step_waits_for_the_output_of_the_one_before(build: Build) -> None:
    """In a pipeline there are two batches on their way, of different requests."""
    pipeline = {"pipeline_parallel_size": 2, "max_num_batched_tokens": 16}
    engine = build(False, DEFAULTS["default"], pipeline, v2_model_runner=False)
    for _ in range(4):
        engine.add(1, 60)
    in_flight: list[set[str]] = []
    both_busy = 0
    while engine.has_work:
        turn = engine.step()
        if turn.scheduled is not None:
            in_flight.append({*turn.scheduled.num_scheduled_tokens})
        if len(in_flight) > 1:
            assert not in_flight[0] & in_flight[1]
            both_busy += bool(in_flight[0] and in_flight[1])
        if turn.delivered is not None:
            del in_flight[0]
    assert both_busy > 20
    engine.check()
    assert scheduler_of(engine).faults.count == 0


def test_waiting_for_requests_and_pauses_teach_nothing(
    build: Build, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(asynchronous, DEFAULTS["default"])
    taught = times_taught(engine, monkeypatch)
    for number in range(12):
        engine.add(20, 60)
        engine.add(20, 60)
        engine.run(10)
        if number % 2:
            engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            while engine.has_work:
                engine.step()
            engine.clock.now += 10.0
            engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        engine.drain()
        engine.clock.now += 10.0
    engine.check()
    # Between a step of one token and one of two whole prompts.
    assert min(taught) > 20.0
    assert max(taught) < 60.0
    state = pilot_of(engine).controller.settle()
    assert int(state.cost.taught) > 100
    assert float(state.cost.error) < 0.05


def test_a_request_that_ends_a_wait_says_so(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(True, DEFAULTS["default"])
    waits = 0
    idle = Pilot.idle

    def counted(self: Pilot) -> None:
        nonlocal waits
        waits += 1
        idle(self)

    monkeypatch.setattr(Pilot, "idle", counted)
    engine.add(10, 5)
    assert waits == 1
    engine.add(10, 5)
    engine.run(1)
    engine.add(10, 5)
    assert waits == 1, "the engine was at work"
    engine.drain()
    engine.add(10, 5)
    assert waits == 2


def test_the_references_gaps_hold_waiting_as_they_always_did(
    build: Build, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gate refuses what is too long; what was let in by it must not change."""
    engine = build(asynchronous, REFERENCE)
    taught = times_taught(engine, monkeypatch)
    engine.add(1, 3)
    engine.drain()
    engine.clock.now += 10.0
    engine.add(1, 3)
    engine.drain()
    assert any(ms >= 10_000.0 for ms in taught)


def test_an_output_that_was_never_planned_is_passed_over(
    build: Build, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(asynchronous, DEFAULTS["default"])
    taught = times_taught(engine, monkeypatch)
    engine.add(10, 200)
    engine.run(10)
    scheduler = scheduler_of(engine)
    monkeypatch.setattr(scheduler, "_in_flight", [])
    engine.run(10)
    assert len(taught) > 14
    assert max(taught) < 40.0, "two steps taken for one"


def test_a_step_whose_output_never_comes_is_dropped(build: Build, asynchronous: bool) -> None:
    engine = build(asynchronous, DEFAULTS["default"])
    engine.add(10, 200)
    engine.run(10)
    scheduler = scheduler_of(engine)
    lost = (SchedulerOutput.make_empty(), ScheduledStep({}, {}))
    scheduler._in_flight.insert(0, lost)
    engine.run(1)
    assert lost not in scheduler._in_flight
    engine.drain()
    engine.check()
    assert not scheduler._in_flight
    assert scheduler.faults.count == 0


def test_the_control_file_names_the_policy_that_decides_and_learns(
    build: Build, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = tmp_path / "control"
    engine = build(
        asynchronous,
        {"code_mode": 0, "control": str(control)},
        accept=lambda request, drafts, rng: 0,
        step_ms=lambda step: 20.0 + 2.0 * step.total_num_scheduled_tokens,
    )
    decided: list[bool] = []
    decide = CompiledController.decide

    def noted(self: CompiledController, *args: Any, **rest: Any) -> DraftLengths:
        decided.append(self.counts_unobserved)
        return decide(self, *args, **rest)

    monkeypatch.setattr(CompiledController, "decide", noted)
    for _ in range(2):
        engine.add(10, 900)

    def taught() -> dict[bool, int]:
        return {c.counts_unobserved: int(c.settle().cost.taught) for c in pilot_of(engine)._controllers.values()}

    for content, by_default in (("", True), ("policy reference", False), ("policy default", True), ("force 3", True)):
        control.write_text(content)
        engine.step()
        before = taught()
        decided.clear()
        lengths = planned(engine, 60)
        assert set(decided) == {by_default}
        assert taught()[by_default] > before[by_default] + 30
        assert taught()[not by_default] == before[not by_default]
        if not content.startswith("force"):
            assert (0 in lengths) == by_default
    control.unlink()
    engine.drain()
    engine.check()


def test_the_log_says_what_k_is_chosen_from_and_what_was_learned(build: Build, log: pytest.LogCaptureFixture) -> None:
    engine = build(True, REFERENCE, accept=lambda request, drafts, rng: 0)
    engine.add(10, 100)
    engine.drain()
    engine.scheduler.shutdown()
    assert "chooses k from 1, 3, 5 (K=5); cost model: base 27 ms" in log.text
    assert "k 5 -> 1 (steps at each k: " in log.text
    assert "steps taught, mean error" in log.records[-1].message


def test_the_log_names_lengths_that_the_batch_is_too_small_for(build: Build, log: pytest.LogCaptureFixture) -> None:
    build(True, REFERENCE, {"max_num_seqs": 4})
    assert "chooses k from 3, 5 (K=5)" in log.text
    assert "k 0, 1 cannot be chosen: the schedule has it for more requests than max_num_seqs=4 only" in log.text


def test_the_log_says_once_that_no_step_teaches(build: Build, log: pytest.LogCaptureFixture) -> None:
    engine = build(True, REFERENCE, step_ms=lambda step: 300.0)
    for _ in range(16):
        engine.add(10, 1000)
    engine.drain()
    warnings = [record.message for record in log.records if "none of the last" in record.message]
    assert len(warnings) == 1
    assert "the last was 300 ms" in warnings[0]
    assert "set MODEL" in warnings[0]


def test_the_default_learns_from_any_engine_without_a_word(build: Build, log: pytest.LogCaptureFixture) -> None:
    engine = build(True, DEFAULTS["default"], step_ms=lambda step: 300.0 + 0.1 * step.total_num_scheduled_tokens)
    for _ in range(16):
        engine.add(10, 500)
    engine.drain()
    state = pilot_of(engine).controller.settle()
    assert int(state.cost.taught) > 100
    assert float(state.cost.error) < 0.05
    assert "none of the last" not in log.text


def test_without_speculation_it_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="--speculative-config"):
        FakeEngine(AdaptiveKScheduler, make_config(num_speculative_tokens=None))


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"schedule": [(1, 8, 7)]}, "num_speculative_tokens_per_batch_size: 7 drafts .* num_speculative_tokens is 5"),
        ({"additional_config": {"adaptive_k": {"alpha": 2}}}, r"additional_config\['adaptive_k'\]\['alpha'\]=2"),
    ],
)
def test_a_schedule_or_setting_that_cannot_be_used_stops_the_engine_at_its_start(
    config: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        FakeEngine(AdaptiveKScheduler, make_config(**{"num_speculative_tokens": 5, "schedule": SCHEDULE, **config}))


@pytest.mark.parametrize("name_and_value", [("MODEL", "1,2"), ("CODE_MODE", "yes"), ("COST_MS", "")])
def test_a_variable_that_cannot_be_used_stops_the_engine_at_its_start(
    monkeypatch: pytest.MonkeyPatch, name_and_value: tuple[str, str]
) -> None:
    name, value = name_and_value
    monkeypatch.setenv(PREFIX + name, value)
    with pytest.raises(ValueError, match=f"{PREFIX}{name}='{value}'"):
        FakeEngine(AdaptiveKScheduler, make_config(num_speculative_tokens=5, schedule=SCHEDULE))


def test_data_parallel_ranks_are_left_alone(log: pytest.LogCaptureFixture) -> None:
    config = make_config(num_speculative_tokens=5, additional_config={"adaptive_k": {"per_request": True}})
    config.parallel_config.data_parallel_size = 2
    engine = FakeEngine(AdaptiveKScheduler, config)
    assert "data-parallel" in log.text
    engine.add(10, 50)
    drafts = {drafts for turn in engine.drain() for drafts in drafts_of(turn).values()}
    assert drafts == {5}
    engine.check()
