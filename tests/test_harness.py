"""The harness itself, and the habits of vLLM's own schedulers on which the code under test relies."""

import random
from itertools import pairwise
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from harness import (
    Accept,
    Clock,
    FakeEngine,
    Turn,
    bernoulli,
    hashed_token,
    make_config,
)

SCHEDULE = [(1, 2, 4), (3, 4, 2), (5, 16, 0)]

both_modes = pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
both_runners = pytest.mark.parametrize("v2", [True, False], ids=["runner2", "runner1"])


def every(request_id: str, drafts: int, rng: random.Random) -> int:
    return drafts


def none(request_id: str, drafts: int, rng: random.Random) -> int:
    return 0


def make_engine(is_async: bool, config: VllmConfig | None = None, **options: Any) -> FakeEngine:
    if config is None:
        config = make_config(async_scheduling=is_async)
    return FakeEngine(AsyncScheduler if is_async else Scheduler, config, **options)


def steps(turns: list[Turn]) -> list[SchedulerOutput]:
    return [turn.scheduled for turn in turns if turn.scheduled is not None]


def assert_all_ended(engine: FakeEngine) -> None:
    """Every request is complete and true, and nothing of any is left behind."""
    engine.check()
    assert set(engine.finish_reasons) == set(engine.requests)
    assert not engine.scheduler.requests
    assert engine.scheduler.kv_cache_manager.usage == 0


@both_modes
@pytest.mark.parametrize("accept", [none, every, bernoulli([0.9, 0.5, 0.2])], ids=["none", "every", "bernoulli"])
def test_every_request_ends_with_its_true_continuation(is_async: bool, accept: Accept) -> None:
    engine = make_engine(is_async, accept=accept)
    for place, prompt in enumerate([1, 2, 15, 16, 17, 40, 100, 300]):
        engine.add(prompt, max_tokens=1 + 7 * place)
    engine.drain()
    assert_all_ended(engine)
    assert set(engine.finish_reasons.values()) == {FinishReason.LENGTH}
    assert engine.outputs["request-3"] == [hashed_token("request-3", position) for position in range(22)]


@both_modes
def test_outputs_do_not_depend_on_the_number_of_drafts(is_async: bool) -> None:
    outputs: list[dict[str, list[int]]] = []
    for k in (None, 1, 4, 7):
        engine = make_engine(is_async, make_config(num_speculative_tokens=k, async_scheduling=is_async))
        for place in range(6):
            engine.add(10 * place + 5, max_tokens=40)
        engine.drain()
        outputs.append(engine.outputs)
    assert all(other == outputs[0] for other in outputs)


@both_modes
def test_accepted_drafts_and_one_more_come_out(is_async: bool) -> None:
    engine = make_engine(is_async, accept=lambda request_id, drafts, rng: min(drafts, 3))
    request = engine.add(20, max_tokens=33)
    turns = engine.drain()
    assert [len(turn.tokens[request]) for turn in turns if request in turn.tokens] == [1] + [4] * 8
    verified = [turn for turn in turns if turn.drafted]
    assert all(turn.drafted == {request: 4} and turn.accepted == {request: 3} for turn in verified)


@both_modes
def test_the_same_seed_gives_the_same_run(is_async: bool) -> None:
    def run(seed: int) -> list[dict[str, int]]:
        engine = make_engine(is_async, seed=seed)
        for place in range(4):
            engine.add(10 + place, max_tokens=50)
        return [turn.accepted for turn in engine.drain()]

    assert run(1) == run(1)
    assert run(1) != run(2)


@both_modes
def test_k_of_the_schedule_is_the_number_of_drafts_in_the_next_step(is_async: bool) -> None:
    config = make_config(schedule=SCHEDULE, async_scheduling=is_async)
    engine = make_engine(is_async, config)
    for place in range(6):
        engine.add(10, max_tokens=20 + 25 * place)
    scheduled = steps(engine.drain())
    assert_all_ended(engine)
    seen: set[int] = set()
    for step, following in pairwise(scheduled):
        if not step.num_scheduled_tokens:
            continue
        k = next(k for low, high, k in SCHEDULE if low <= len(step.num_scheduled_tokens) <= high)
        assert step.num_spec_tokens_to_schedule == k
        for request_id in following.num_scheduled_tokens:
            drafts = following.scheduled_spec_decode_tokens.get(request_id, [])
            assert drafts == [-1 if is_async else 0] * k
            assert following.num_scheduled_tokens[request_id] == 1 + k
        seen.add(k)
    assert seen == {0, 2, 4}


@both_modes
def test_acceptance_is_known_two_turns_after_k_was_chosen_or_one_if_sync(is_async: bool) -> None:
    config = make_config(schedule=[(1, 1, 4), (2, 16, 2)], async_scheduling=is_async)
    engine = make_engine(is_async, config, accept=every)
    first = engine.add(10, max_tokens=100)
    engine.run(6)
    second = engine.add(10, max_tokens=100)
    turns = engine.run(6)
    chosen = next(
        place
        for place, turn in enumerate(turns)
        if turn.scheduled is not None and turn.scheduled.num_spec_tokens_to_schedule == 2
    )
    delivered = next(place for place, turn in enumerate(turns) if turn.drafted.get(first) == 2)
    assert delivered - chosen == (2 if is_async else 1)
    assert turns[delivered].accepted == {first: 2, second: 2}


@both_modes
def test_a_drafter_may_give_fewer_drafts_than_asked(is_async: bool) -> None:
    engine = make_engine(is_async, accept=every, drafts_given=lambda request_id, asked: asked - 3)
    request = engine.add(20, max_tokens=30)
    turns = engine.drain()
    assert_all_ended(engine)
    verified = [turn for turn in turns if turn.drafted]
    assert all(turn.accepted == {request: 1} for turn in verified)
    # Only a sync scheduler hears of it; an async one has placeholders for all that it asked for.
    assert all(turn.drafted == {request: 4 if is_async else 1} for turn in verified)
    assert all(turn.blank == ({request: 3} if is_async else {}) for turn in verified)


@both_modes
def test_vllm_pads_a_new_decode_with_drafts_that_nobody_proposed(is_async: bool) -> None:
    engine = make_engine(is_async, accept=every)
    engine.add(20, max_tokens=60)
    engine.run(3)
    late = engine.add(1, max_tokens=20)
    first = next(turn for turn in engine.drain() if late in turn.tokens)
    assert_all_ended(engine)
    assert first.drafted[late] == first.blank[late] == 4
    assert first.accepted[late] == 0


@both_modes
@both_runners
def test_preemption_leaves_outputs_right(is_async: bool, v2: bool) -> None:
    engine = make_engine(is_async, num_blocks=16, v2_model_runner=v2)
    for _ in range(6):
        engine.add(30, max_tokens=100)
    turns = engine.drain()
    assert_all_ended(engine)
    assert sum(request.num_preemptions for request in engine.requests.values()) > 3
    preempted = [step.preempted_req_ids for step in steps(turns) if step.preempted_req_ids]
    assert preempted
    new = [data.req_id for step in steps(turns) for data in step.scheduled_new_reqs]
    resumed = [request_id for step in steps(turns) for request_id in step.scheduled_cached_reqs.resumed_req_ids]
    assert bool(resumed) != v2
    assert (len(new) > len(set(new))) == v2


@both_modes
def test_output_in_flight_at_preemption_is_still_delivered(is_async: bool) -> None:
    engine = make_engine(is_async, num_blocks=16)
    for _ in range(6):
        engine.add(30, max_tokens=100)
    delivered = False
    for turn in engine.drain():
        if turn.scheduled is not None and turn.scheduled.preempted_req_ids:
            delivered |= bool(turn.scheduled.preempted_req_ids & turn.tokens.keys())
    assert delivered == is_async


@both_modes
@pytest.mark.parametrize("late", [True, False], ids=["late", "between turns"])
def test_abort_with_output_in_flight(is_async: bool, late: bool) -> None:
    engine = make_engine(is_async)
    kept, gone = engine.add(20, max_tokens=50), engine.add(20, max_tokens=50)
    engine.run(4)
    before = list(engine.outputs[gone])
    engine.abort(gone, late=late)
    turns = engine.drain()
    assert_all_ended(engine)
    assert engine.outputs[gone] == before
    assert engine.finish_reasons == {kept: FinishReason.LENGTH, gone: FinishReason.ABORT}
    assert engine.requests[gone].status == RequestStatus.FINISHED_ABORTED
    # The model ran for it once more wherever a step was in flight.
    assert any(gone in turn.drafted for turn in turns) == (is_async or late)
    assert sum(gone in step.finished_req_ids for step in steps(turns)) == 1


def test_abort_of_a_waiting_request() -> None:
    engine = make_engine(True, make_config(max_num_seqs=1))
    engine.add(20, max_tokens=10)
    gone = engine.add(20, max_tokens=10)
    engine.run(2)
    engine.abort(gone)
    engine.drain()
    assert_all_ended(engine)
    assert engine.outputs[gone] == []


@both_modes
def test_chunked_prefill_samples_only_at_the_end_of_the_prompt(is_async: bool) -> None:
    config = make_config(method="ngram", max_num_batched_tokens=32, async_scheduling=is_async)
    engine = make_engine(is_async, config)
    request = engine.add(100, max_tokens=10)
    turns = engine.drain()
    assert_all_ended(engine)
    assert [step.num_scheduled_tokens[request] for step in steps(turns)[:4]] == [32, 32, 32, 4]
    outputs = [turn.tokens for turn in turns if turn.delivered is not None]
    assert outputs[:4] == [{}, {}, {}, {request: [hashed_token(request, 0)]}]


@both_modes
def test_a_draft_model_takes_one_more_input_slot_of_each_request(is_async: bool) -> None:
    config = make_config(method="draft_model", max_num_batched_tokens=32, async_scheduling=is_async)
    engine = make_engine(is_async, config)
    request = engine.add(100, max_tokens=10)
    assert [step.num_scheduled_tokens[request] for step in steps(engine.run(4))] == [31, 31, 31, 7]


@both_modes
def test_a_grammar_cuts_drafts_before_they_are_verified(is_async: bool) -> None:
    engine = make_engine(is_async, accept=every, allows=lambda request_id, proposed: min(proposed, 1))
    cut, free = engine.add(20, max_tokens=30, structured=True), engine.add(20, max_tokens=30)
    turns = engine.drain()
    assert_all_ended(engine)
    verified = [turn for turn in turns if turn.drafted.get(cut) and turn.drafted.get(free)]
    # Async, they are cut when they have a place in the step, which says so; the first was none yet.
    assert [turn.drafted[cut] for turn in verified] == [4 if is_async else 1] * len(verified)
    assert [turn.accepted[cut] for turn in verified[1:]] == [1] * (len(verified) - 1)
    assert all(turn.accepted[free] == 4 for turn in verified)
    told = [turn.delivered.num_invalid_spec_tokens for turn in verified[1:] if turn.delivered is not None]
    assert told == [{cut: 3} if is_async else None] * (len(verified) - 1)


@both_modes
@both_runners
def test_a_session_goes_on_with_more_of_its_prompt(is_async: bool, v2: bool) -> None:
    engine = make_engine(is_async, accept=every, v2_model_runner=v2)
    other, session = engine.add(20, max_tokens=90), engine.add(20, max_tokens=11, session=True)
    # Turns that end with a step: of drafts accepted past the end vLLM loses count without async scheduling.
    for prompt, max_tokens in ((7, 16), (1, 6)):
        while not engine.waiting_sessions():
            engine.step()
        before = engine.requests[session].num_tokens
        engine.resume(session, prompt, max_tokens)
        # The last token of each turn is given up, as it was never computed.
        assert engine.requests[session].num_prompt_tokens == before + prompt - 1
    assert engine.outputs[session] == []
    while not engine.waiting_sessions():
        engine.step()
    assert len(engine.outputs[session]) == 6
    engine.drain()
    engine.abort(session)
    engine.drain()
    assert_all_ended(engine)
    assert engine.finish_reasons == {other: FinishReason.LENGTH, session: FinishReason.ABORT}


def test_what_failed_to_load_is_computed_again() -> None:
    engine = make_engine(False, accept=every)
    failed, other = engine.add(40, max_tokens=50), engine.add(40, max_tokens=50)
    engine.run(4)
    engine.fail_load(failed)
    (turn,) = engine.run(1)
    assert failed in turn.drafted
    assert turn.tokens.keys() == {other}
    (turn,) = engine.run(1)
    assert turn.scheduled is not None
    assert turn.scheduled.num_scheduled_tokens[failed] > 40
    engine.drain()
    assert_all_ended(engine)


@both_modes
def test_what_failed_to_load_ends_if_it_is_to(is_async: bool) -> None:
    engine = make_engine(is_async, accept=every)
    engine.scheduler.recompute_kv_load_failures = False
    failed, other = engine.add(40, max_tokens=50), engine.add(40, max_tokens=50)
    engine.run(4)
    before = list(engine.outputs[failed])
    engine.fail_load(failed)
    engine.drain()
    assert_all_ended(engine)
    assert engine.finish_reasons == {failed: FinishReason.ERROR, other: FinishReason.LENGTH}
    assert engine.outputs[failed] == before


@both_modes
def test_an_id_may_come_again_once_its_request_is_gone(is_async: bool) -> None:
    engine = make_engine(is_async)
    engine.add(20, max_tokens=10, request_id="a")
    engine.add(20, max_tokens=50, request_id="b")
    engine.run(3)
    engine.abort("a")
    if is_async:
        with pytest.raises(ValueError, match="still in use"):
            engine.add(20, max_tokens=10, request_id="a")
        engine.run(2)
    engine.add(30, max_tokens=15, request_id="a")
    engine.drain()
    assert_all_ended(engine)
    assert len(engine.outputs["a"]) == 15


def test_requests_that_ended_are_forgotten() -> None:
    engine = make_engine(True)
    ended, gone = engine.add(20, max_tokens=5), engine.add(20, max_tokens=50)
    live, session = engine.add(20, max_tokens=50), engine.add(20, max_tokens=5, session=True)
    engine.run(2)
    engine.abort(gone)
    engine.run(8)
    assert {*engine.forget_ended()} == {ended, gone}
    assert engine.requests.keys() == engine.outputs.keys() == {live, session}
    assert engine.finish_reasons.keys() == {session}
    engine.outputs[live][0] ^= 1
    engine.drain()
    with pytest.raises(AssertionError, match=live):
        engine.forget_ended()


@both_modes
def test_stop_tokens_and_the_longest_request(is_async: bool) -> None:
    config = make_config(max_model_len=64, async_scheduling=is_async)
    engine = make_engine(is_async, config, accept=every)
    stopping = engine.add(10, max_tokens=50, stop_token_ids=[hashed_token("stopping", 12)], request_id="stopping")
    longest = engine.add(63, max_tokens=50)
    long = engine.add(40, max_tokens=50)
    engine.drain()
    assert_all_ended(engine)
    assert engine.finish_reasons[stopping] == FinishReason.STOP
    assert [len(engine.outputs[request]) for request in (stopping, longest, long)] == [13, 1, 24]


@both_modes
def test_prefix_caching_skips_what_is_computed(is_async: bool) -> None:
    engine = make_engine(is_async, make_config(enable_prefix_caching=True, async_scheduling=is_async))
    prompt = list(range(100))
    first = engine.add(prompt, max_tokens=5)
    engine.drain()
    second = engine.add(prompt, max_tokens=5)
    turns = engine.drain()
    assert_all_ended(engine)
    assert engine.outputs[first] != engine.outputs[second]
    assert steps(turns)[0].num_scheduled_tokens == {second: 4}


@both_modes
def test_the_clock_moves_by_the_time_of_each_step_before_its_output(is_async: bool) -> None:
    clock = Clock(now=100.0)
    engine = make_engine(is_async, clock=clock, step_ms=lambda step: float(step.total_num_scheduled_tokens))
    request = engine.add(500, max_tokens=20)
    assert engine.requests[request].arrival_time == 100.0
    expected = 100.0
    while engine.has_work:
        turn = engine.step()
        if turn.delivered is not None:
            expected += turn.delivered.total_num_scheduled_tokens / 1000
        assert engine.clock() == clock.now == pytest.approx(expected)
    assert expected > 100.5


def test_an_async_engine_schedules_once_before_the_first_output() -> None:
    engine = make_engine(True)
    engine.add(10, max_tokens=10)
    first, second = engine.run(2)
    assert first.scheduled is not None
    assert first.delivered is None
    assert second.delivered is first.scheduled


def test_the_schedulers_own_statistics_agree() -> None:
    engine = make_engine(False, log_stats=True)
    for place in range(4):
        engine.add(10 + place, max_tokens=50)
    turns = engine.drain()
    stats = [
        client.scheduler_stats.spec_decoding_stats
        for turn in turns
        for client in turn.outputs.values()
        if client.scheduler_stats is not None and client.scheduler_stats.spec_decoding_stats is not None
    ]
    assert sum(stat.num_draft_tokens for stat in stats) == sum(sum(turn.drafted.values()) for turn in turns)
    assert sum(stat.num_accepted_tokens for stat in stats) == sum(sum(turn.accepted.values()) for turn in turns)


def test_a_scheduler_that_loses_count_is_caught() -> None:
    class Forgetful(AsyncScheduler):
        def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().update_from_output(*args, **kwargs)
            for request in self.running:
                if request.num_output_tokens > 20:
                    request.num_computed_tokens -= 1
            return outputs

    engine = FakeEngine(Forgetful, make_config())
    engine.add(10, max_tokens=50)
    with pytest.raises(AssertionError, match="the scheduler counts"):
        engine.drain()


def test_config_options() -> None:
    config = make_config(num_experts=32, num_experts_per_tok=4, additional_config={"mine": {"a": 1}})
    assert config.model_config.hf_config.num_experts == 32
    assert config.model_config.hf_config.num_experts_per_tok == 4
    assert config.additional_config == {"mine": {"a": 1}}
    assert config.scheduler_config.async_scheduling
    dense = make_config(num_experts=0, num_speculative_tokens=None, model_overrides={"num_hidden_layers": 3}, seed=7)
    assert not hasattr(dense.model_config.hf_config, "num_experts")
    assert dense.model_config.hf_config.num_hidden_layers == 3
    assert dense.model_config.seed == 7
    assert dense.speculative_config is None


def test_what_the_engine_refuses() -> None:
    engine = make_engine(True)
    engine.add(10, max_tokens=10, request_id="a")
    with pytest.raises(ValueError, match="still in use"):
        engine.add(10, max_tokens=10, request_id="a")
    with pytest.raises(ValueError, match="waits for nothing: WAITING"):
        engine.resume("a", 10, max_tokens=10)
    with pytest.raises(ValueError, match="set recompute_kv_load_failures"):
        engine.fail_load("a")
    with pytest.raises(ValueError, match="refuses a prompt of 1024"):
        engine.add(1024, max_tokens=10)
    with pytest.raises(RuntimeError, match="unfinished after 3 turns"):
        engine.drain(limit=3)


@pytest.mark.parametrize("seed", range(40))
def test_anything_at_once(seed: int) -> None:
    """Random configs and traffic: every guard of the world holds, and every output is true."""
    rng = random.Random(seed)
    is_async = rng.random() < 0.7
    max_model_len, block_size = rng.choice([64, 128]), rng.choice([4, 16])
    config = make_config(
        async_scheduling=is_async,
        num_speculative_tokens=rng.choice([4, 6]),
        schedule=rng.choice([None, SCHEDULE]),
        method=rng.choice(["ngram", "draft_model"]),
        max_num_seqs=rng.choice([2, 8, 16]),
        max_num_batched_tokens=rng.choice([32, 64, 1024]),
        max_model_len=max_model_len,
        block_size=block_size,
        enable_prefix_caching=rng.random() < 0.3,
        scheduling_policy=rng.choice(["fcfs", "priority"]),
    )
    num_blocks = rng.choice([None, (max_model_len + 8) // block_size + 3])
    engine = make_engine(
        is_async,
        config,
        accept=rng.choice([none, every, bernoulli([0.8, 0.4])]),
        drafts_given=rng.choice([lambda request_id, asked: asked, lambda request_id, asked: asked // 2]),
        allows=lambda request_id, proposed: rng.randint(0, proposed),
        num_blocks=num_blocks,
        log_stats=rng.random() < 0.5,
        v2_model_runner=rng.random() < 0.5,
    )
    # vLLM cannot reset its cache while one waits, loses one that ends while it is preempted, and counts their tokens
    # right with async scheduling alone.
    sessions = is_async and num_blocks is None and rng.random() < 0.7
    for _ in range(150):
        if rng.random() < 0.2:
            length, max_tokens = rng.choice([1, 2, 17, 50]), rng.choice([1, 2, 30, 60])
            prompt = [7] * length if rng.random() < 0.3 else length
            kind: dict[str, Any] = {"priority": rng.randrange(3), "structured": rng.random() < 0.2}
            kind["session"] = sessions and rng.random() < 0.3
            engine.add(prompt, max_tokens, stop_token_ids=list(range(rng.randrange(9))), **kind)
        for session in engine.waiting_sessions():
            if engine.requests[session].num_tokens > max_model_len - 20:
                engine.abort(session)
            elif rng.random() < 0.3:
                engine.resume(session, rng.randint(1, 9), rng.choice([1, 20]))
        if rng.random() < 0.03 and engine.requests:
            engine.abort(rng.choice(list(engine.requests)), late=rng.random() < 0.5)
        if rng.random() < 0.02 and not sessions:
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.step()
    while engine.has_work or engine.waiting_sessions():
        # They hold what others wait for.
        for session in engine.waiting_sessions():
            engine.abort(session)
        engine.step()
    assert_all_ended(engine)
