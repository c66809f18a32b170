"""What teaches: drafts that were verified, of requests whose output counts, and what the model made of them."""

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from adaptive_engine import pilot_of
from akjax.compiled_controller import CompiledController, DraftOutcomes, StepMeasures
from akjax.scheduler import AdaptiveKScheduler
from harness import Clock, FakeEngine, Turn, hashed_token, make_config

K = 4


class Observed(NamedTuple):
    """What the controller is told of an output: the step, and drafts verified and accepted of each request."""

    step: StepMeasures
    drafts: dict[str, tuple[int, int]]


Serve = Callable[..., tuple[FakeEngine, list[Observed]]]

both = pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])


def every(request_id: str, drafts: int, rng: Random) -> int:
    return drafts


def some(request_id: str, drafts: int, rng: Random) -> int:
    return rng.randint(0, drafts)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """An engine where k is always 4 and every draft holds, and a list that fills with what is observed."""

    def serve(
        asynchronous: bool, config: dict[str, Any] | None = None, **engine: Any
    ) -> tuple[FakeEngine, list[Observed]]:
        clock, told = Clock(100.0), []
        monkeypatch.setattr("akjax.scheduler.adaptive_k.monotonic", clock)
        observe = CompiledController.observe

        def noted(self: CompiledController, *, step: StepMeasures, outcomes: DraftOutcomes, **rest: Any) -> None:
            pairs = zip(outcomes.drafted, outcomes.accepted, strict=True)
            told.append(Observed(step, dict(zip(outcomes.request_ids, pairs, strict=True))))
            observe(self, step=step, outcomes=outcomes, **rest)

        monkeypatch.setattr(CompiledController, "observe", noted)
        options: dict[str, Any] = {"schedule": [(1, 8, K)], "max_num_seqs": 8, **(config or {})}
        vllm_config = make_config(
            num_speculative_tokens=K,
            async_scheduling=asynchronous,
            additional_config={"adaptive_k": {"code_mode": 0}},
            **options,
        )
        return FakeEngine(AdaptiveKScheduler, vllm_config, clock=clock, **{"accept": every, **engine}), told

    return serve


def ended(engine: FakeEngine) -> None:
    """Everything was served as it should."""
    engine.drain()
    engine.check()
    assert pilot_of(engine).request_ids == set()


def until(engine: FakeEngine, wanted: Callable[[Turn], bool]) -> Turn:
    """The first turn that is as wanted."""
    while engine.has_work:
        turn = engine.step()
        if wanted(turn):
            return turn
    raise AssertionError("no turn was as wanted")


@both
def test_drafts_that_a_grammar_cut_were_never_verified(serve: Serve, asynchronous: bool) -> None:
    engine, told = serve(asynchronous, allows=lambda request_id, proposed: {"some": 1, "none": 0}[request_id])
    for request_id in ("some", "none"):
        engine.add(20, 60, request_id, structured=True)
    engine.add(20, 60, "free")
    ended(engine)
    assert [seen.drafts["free"] for seen in told if "free" in seen.drafts] == [(4, 4)] * 12
    assert {seen.drafts["some"] for seen in told if "some" in seen.drafts} == {(1, 1)}
    assert not any("none" in seen.drafts for seen in told)


def test_padding_was_never_drafted(serve: Serve) -> None:
    """Without a dynamic schedule vLLM fills a new decode up to the size of the others, with no drafts at all."""
    engine, told = serve(True, {"schedule": None})
    engine.add(20, 60)
    engine.run(4)
    late = engine.add(1, 30, "late")
    padded = until(engine, lambda turn: late in turn.drafted)
    assert padded.blank[late] == K
    assert late not in told[-1].drafts
    assert len(told[-1].drafts) == 1
    until(engine, lambda turn: late in turn.drafted)
    assert told[-1].drafts[late] == (4, 4)
    ended(engine)


def test_a_drafter_that_gives_fewer_has_them_verified_alone(serve: Serve) -> None:
    engine, told = serve(False, drafts_given=lambda request_id, asked: {"all": asked, "two": 2, "none": 0}[request_id])
    for request_id in ("all", "two", "none"):
        engine.add(20, 40, request_id)
    ended(engine)
    assert {seen.drafts["all"] for seen in told if "all" in seen.drafts} == {(4, 4)}
    assert {seen.drafts["two"] for seen in told if "two" in seen.drafts} == {(2, 2)}
    assert not any("none" in seen.drafts for seen in told)


def test_output_that_comes_after_a_preemption_counts_if_vllm_delivers_it(serve: Serve) -> None:
    engine, told = serve(True, num_blocks=16)
    for _ in range(6):
        engine.add(30, 100)
    delivered = 0
    while engine.has_work:
        turn = engine.step()
        preempted = turn.scheduled.preempted_req_ids if turn.scheduled is not None else None
        for request_id in preempted or ():
            if request_id in turn.drafted:
                assert turn.tokens[request_id]
                assert told[-1].drafts[request_id] == (turn.drafted[request_id], turn.accepted[request_id])
                delivered += 1
    assert delivered > 0
    ended(engine)


@pytest.mark.parametrize("v2", [True, False], ids=["runner2", "runner1"])
@both
def test_padding_of_a_request_that_resumes_was_never_drafted(serve: Serve, asynchronous: bool, v2: bool) -> None:
    """One that finds all it had computed in the cache is filled up as a new decode is."""
    config = {"schedule": None, "enable_prefix_caching": True, "block_size": 4}
    engine, told = serve(asynchronous, config, num_blocks=30, v2_model_runner=v2, accept=some)
    for number in range(100):
        engine.add(10 + number % 7, 60)
    padded = 0
    while engine.has_work:
        turn = engine.step()
        if turn.delivered is None:
            continue
        came_back = _began_again(engine, turn)
        assert not came_back & told[-1].drafts.keys()
        padded += len(came_back & turn.blank.keys())
    assert padded > 0
    ended(engine)


def _began_again(engine: FakeEngine, turn: Turn) -> set[str]:
    """Requests of the delivered step that had been preempted."""
    assert turn.delivered is not None
    new = {request.req_id for request in turn.delivered.scheduled_new_reqs}
    resumed = {request_id for request_id in new if engine.requests[request_id].num_preemptions}
    return resumed | turn.delivered.scheduled_cached_reqs.resumed_req_ids


def test_output_that_vllm_drops_when_it_resets_its_cache_teaches_nothing(serve: Serve) -> None:
    engine, told = serve(True)
    requests = [engine.add(30, 60) for _ in range(3)]
    engine.run(5)
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    (turn,) = engine.run(1)
    assert turn.accepted == dict.fromkeys(requests, 4)
    assert not turn.tokens
    assert not told[-1].drafts
    ended(engine)


@both
def test_output_of_an_aborted_request_teaches_nothing(serve: Serve, asynchronous: bool) -> None:
    engine, told = serve(asynchronous)
    kept, gone = engine.add(20, 60), engine.add(20, 60)
    engine.run(5)
    engine.abort(gone, late=True)
    (turn,) = engine.run(1)
    assert turn.accepted == {kept: 4, gone: 4}
    assert told[-1].drafts == {kept: (4, 4)}
    assert gone in pilot_of(engine).controller.request_ids
    engine.run(1)
    assert gone not in pilot_of(engine).controller.request_ids, "kept until the next step tells that it is gone"
    ended(engine)


def test_output_in_flight_of_a_request_that_ended_teaches_nothing(serve: Serve) -> None:
    engine, told = serve(True)
    ending, other = "ending", engine.add(20, 80)
    engine.add(20, 80, ending, stop_token_ids=[hashed_token(ending, 22)])
    turn = until(engine, lambda turn: ending in engine.finish_reasons)
    assert told[-1].drafts[ending] == (4, 4)
    (turn,) = engine.run(1)
    assert turn.accepted == {other: 4, ending: 4}
    assert told[-1].drafts == {other: (4, 4)}
    ended(engine)


@both
def test_all_that_was_accepted_counts_where_a_request_stops_amid_it(serve: Serve, asynchronous: bool) -> None:
    engine, told = serve(asynchronous)
    engine.add(20, 80, "stops", stop_token_ids=[hashed_token("stops", 12)])
    last = until(engine, lambda turn: "stops" in engine.finish_reasons)
    assert len(last.tokens["stops"]) == 2, "the first token, two steps of five, and two of the third"
    assert told[-1].drafts == {"stops": (4, 4)}
    ended(engine)


@both
def test_output_computed_from_what_failed_to_load_teaches_nothing(serve: Serve, asynchronous: bool) -> None:
    engine, told = serve(asynchronous)
    engine.scheduler.recompute_kv_load_failures = not asynchronous
    failed, other = engine.add(40, 60), engine.add(40, 60)
    engine.run(5)
    engine.fail_load(failed)
    (turn,) = engine.run(1)
    assert turn.accepted == {failed: 4, other: 4}
    assert told[-1].drafts == {other: (4, 4)}
    ended(engine)


@both
def test_an_id_that_comes_again_is_another_request(serve: Serve, asynchronous: bool) -> None:
    holds = True
    engine, _ = serve(asynchronous, accept=lambda request_id, drafts, rng: drafts if holds else 0)
    controller = pilot_of(engine).controller
    engine.add(20, 100, "again")
    engine.drain()
    engine.run(2)
    assert "again" not in controller.request_ids
    for request_id in ("again", "new"):
        engine.add(20, 100, request_id)
    until(engine, lambda turn: {*turn.tokens} == {"again", "new"})
    assert_same(controller, "again", "new")
    holds = False
    engine.run(4)
    assert_same(controller, "again", "new")
    ended(engine)


def assert_same(controller: CompiledController, one: str, other: str) -> None:
    """Nothing tells them apart."""
    states = [[np.array(leaf) for leaf in jax.tree.leaves(controller.request_state(each))] for each in (one, other)]
    for of_one, of_other in zip(*states, strict=True):
        np.testing.assert_array_equal(of_one, of_other)


@both
def test_a_prompt_that_is_cached_was_not_computed(serve: Serve, asynchronous: bool) -> None:
    engine, told = serve(asynchronous, {"enable_prefix_caching": True})
    prompt = list(range(100))
    engine.add(prompt, 20)
    engine.drain()
    engine.add(prompt, 20, "again")
    until(engine, lambda turn: "again" in turn.tokens)
    assert told[-1].step == StepMeasures(tokens=1, requests=1, drafting=K, context=96, prefill=3)
    assert not told[-1].drafts
    until(engine, lambda turn: "again" in turn.drafted)
    assert told[-1].drafts == {"again": (4, 4)}
    ended(engine)


@both
def test_pieces_of_a_prompt_verify_nothing(serve: Serve, asynchronous: bool) -> None:
    engine, told = serve(asynchronous, {"max_num_batched_tokens": 33})
    engine.add(80, 20)
    until(engine, lambda turn: bool(turn.tokens))
    seen = [output for output in told if output.step.requests]
    assert [output.step.prefill for output in seen] == [31, 31, 15]
    assert [output.step.context for output in seen] == [0, 32, 64]
    assert all(output.step.tokens == 1 and not output.drafts for output in seen)
    ended(engine)


@both
def test_a_step_with_prompts_tells_of_its_decodes_alone(serve: Serve, asynchronous: bool) -> None:
    engine, told = serve(asynchronous)
    decoding = engine.add(20, 60)
    engine.run(5)
    engine.add(50, 20, "joins")
    until(engine, lambda turn: "joins" in turn.tokens)
    step, drafts = told[-1]
    assert drafts == {decoding: (4, 4)}
    assert (step.tokens, step.requests, step.prefill, step.uneven) == (6, 2, 49, True)
    ended(engine)


def test_the_first_step_of_a_sessions_next_part_verifies_nothing(serve: Serve) -> None:
    engine, told = serve(True, {"schedule": None})
    other, session = engine.add(20, 200), engine.add(20, 11, session=True)
    until(engine, lambda turn: bool(engine.waiting_sessions()))
    known = pilot_of(engine).controller.request_ids
    assert session in known
    engine.resume(session, 1, 30)
    first = until(engine, lambda turn: session in turn.tokens)
    assert session not in told[-1].drafts
    assert told[-1].drafts == {other: (4, 4)}
    assert first.blank.get(session, 0) in (0, K)
    until(engine, lambda turn: session in turn.drafted)
    assert told[-1].drafts[session] == (4, 4)
    assert session in known, "it is the same request"
    while not engine.waiting_sessions():
        engine.step()
    engine.abort(session)
    ended(engine)
