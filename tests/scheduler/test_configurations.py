"""Configurations at the ends of what there is: each serves and learns, with the invariants after every step."""

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import NamedTuple

import pytest
from vllm.config import CUDAGraphMode

from adaptive_engine import pilot_of, scheduler_of, step_ms
from akjax.scheduler import AdaptiveKScheduler
from harness import Clock, FakeEngine, Turn, make_config
from invariants import Invariants

Schedule = list[tuple[int, int, int]]


class Serving(NamedTuple):
    """Most requests at once, K, the schedule, the stages of the pipeline and the sizes that have CUDA graphs."""

    requests: int
    draft_limit: int
    schedule: Schedule | None
    pipeline: int = 1
    captured: tuple[int, ...] = ()


SERVINGS = {
    "one request, K=1": Serving(1, 1, None),
    "one request, K=16": Serving(1, 16, [(1, 1, 16)]),
    "1024 requests": Serving(1024, 2, [(1, 512, 2), (513, 1024, 1)]),
    "K=2 or none": Serving(4, 2, [(1, 2, 2), (3, 4, 0)]),
    "every other k up to 16": Serving(8, 16, [(n + 1, n + 1, 16 - 2 * n) for n in range(8)]),
    "one level, below K": Serving(2, 16, [(1, 2, 3)]),
    "no schedule": Serving(2, 16, None),
    "more tokens than any graph": Serving(8, 16, [(1, 1, 16), (2, 8, 1)], captured=(1, 2, 4, 8)),
    "pipeline parallel": Serving(8, 6, [(1, 2, 6), (3, 4, 2), (5, 8, 1)], pipeline=2),
}


@contextmanager
def engine_of(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeEngine, Invariants]]:
    config = make_config(
        num_speculative_tokens=serving.draft_limit,
        schedule=serving.schedule,
        max_num_seqs=serving.requests,
        max_num_batched_tokens=max(1024, 2 * serving.requests),
        additional_config={"adaptive_k": {"code_mode": 0}},
        max_model_len=256,
        pipeline_parallel_size=serving.pipeline,
    )
    if serving.captured:
        # vLLM makes no graphs on a CPU.
        config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
        config.compilation_config.cudagraph_capture_sizes = list(serving.captured)
    clock = Clock(100.0)
    monkeypatch.setattr("akjax.scheduler.adaptive_k.monotonic", clock)
    engine = FakeEngine(AdaptiveKScheduler, config, clock=clock, step_ms=step_ms, accept=some)
    invariants = Invariants(scheduler_of(engine), engine.world.token)
    with invariants.watching():
        yield engine, invariants


def some(request_id: str, drafts: int, rng: Random) -> int:
    return rng.randint(0, drafts)


def serve(engine: FakeEngine, invariants: Invariants, requests: int, tokens: int) -> list[Turn]:
    """All turns of that many requests, from all at once to none."""
    turns = []
    for number in range(requests):
        invariants.begin(engine.add(10 + number % 7, tokens))
    while engine.has_work:
        turns.append(engine.step())
        invariants.after(turns[-1])
    invariants.at_the_end()
    engine.check()
    return turns


@pytest.mark.parametrize("serving", SERVINGS.values(), ids=SERVINGS.keys())
def test_it_serves_and_learns_whatever_the_configuration(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(serving, monkeypatch) as (engine, invariants):
        turns = serve(engine, invariants, serving.requests + 8, 60)
        ran = sum(turn.delivered is not None and turn.delivered.total_num_scheduled_tokens > 0 for turn in turns)
        cost = pilot_of(engine).controller.settle().cost
    assert invariants.observations > 0
    # All teach but the first, and those between no drafts and some.
    assert int(cost.taught) > 0.7 * ran
    assert float(cost.error) < 0.05


def test_a_pipeline_has_steps_of_several_batches_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's drafts are those planned in its own last step, with another batch's steps in between."""
    with engine_of(SERVINGS["pipeline parallel"], monkeypatch) as (engine, invariants):
        invariants.begin(engine.add(10, 60, "first"))
        invariants.after(engine.step())
        invariants.begin(engine.add(10, 60, "second"))
        steps = [turn.scheduled for turn in serve(engine, invariants, 0, 0) if turn.scheduled is not None]
        alternating = [[*step.num_scheduled_tokens] for step in steps[:20]]
        assert alternating == [["second"], ["first"]] * 10
        assert int(pilot_of(engine).controller.settle().cost.taught) > 10
