"""The engine on which the tests of our scheduler serve: vLLM's own loop, a fake model, and a clock that both share."""

from collections.abc import Callable
from typing import Any

import pytest

from akjax.scheduler import AdaptiveKScheduler
from akjax.scheduler.pilot import Pilot
from harness import Clock, FakeEngine, make_config

DRAFT_LIMIT = 5
SCHEDULE = [(1, 2, 5), (3, 4, 3), (5, 7, 1), (8, 8, 0)]

Build = Callable[..., FakeEngine]
"""(async scheduling, our settings, vLLM's own for `make_config`, and those of `FakeEngine`) -> an engine."""


def step_ms(step: Any) -> float:
    """What a step takes unless a test says otherwise."""
    return 20.0 + 0.8 * step.total_num_scheduled_tokens


def builder(monkeypatch: pytest.MonkeyPatch) -> Build:
    """Makes engines whose scheduler reads the clock of their steps."""

    def build(
        asynchronous: bool, settings: dict[str, Any], config: dict[str, Any] | None = None, **engine: Any
    ) -> FakeEngine:
        clock = Clock(100.0)
        monkeypatch.setattr("akjax.scheduler.adaptive_k.monotonic", clock)
        vllm_config = make_config(
            num_speculative_tokens=DRAFT_LIMIT,
            async_scheduling=asynchronous,
            additional_config={"adaptive_k": settings},
            **{"schedule": SCHEDULE, "max_num_seqs": 8, **(config or {})},
        )
        engine = {"step_ms": step_ms, **engine}
        return FakeEngine(AdaptiveKScheduler, vllm_config, clock=clock, **engine)

    return build


def scheduler_of(engine: FakeEngine) -> AdaptiveKScheduler:
    """Ours."""
    assert isinstance(engine.scheduler, AdaptiveKScheduler)
    return engine.scheduler


def pilot_of(engine: FakeEngine) -> Pilot:
    """Its pilot, which has to be in charge."""
    scheduler = scheduler_of(engine)
    assert scheduler.faults.count == 0, "a fault of ours"
    assert scheduler.pilot is not None
    return scheduler.pilot
