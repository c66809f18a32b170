"""The invariants of long runs and of searched traffic are none that hold whatever happens: each is broken once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from akjax.compiled_controller import CompiledController, DraftOutcomes
from akjax.scheduler import AdaptiveKScheduler
from akjax.scheduler.modes import ModeTracker
from akjax.scheduler.pilot import DraftPlan, Pilot
from busy_engine import BusyEngine, Serving, serving_in
from injections import FAULTS, PER_REQUEST, Switch

# Without a control file there is one policy to compile.
SERVING = Serving(requests=4, asynchronous=False, settings={**PER_REQUEST, "control": ""})


class Broken(NamedTuple):
    """Something that must not be.

    Attributes:
        make: it so, from here on.
        told_by: the method of the invariants that finds it.
    """

    make: Callable[[BusyEngine, pytest.MonkeyPatch], None]
    told_by: str


def replaced(owner: type, name: str, value: Any) -> Callable[[BusyEngine, pytest.MonkeyPatch], None]:
    return lambda _, monkeypatch: monkeypatch.setattr(owner, name, value)


def failing(*parts: str) -> Callable[[BusyEngine, pytest.MonkeyPatch], None]:
    """Parts that fail for good."""

    def make(busy: BusyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        for part in parts:
            switch = Switch()
            FAULTS[part].install(busy.engine, monkeypatch, switch)
            switch.times = 10**6

    return make


def stopped_on_another_schedule(busy: BusyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults until it stops, which were to be, and then another k than vLLM's."""
    failing("decide")(busy, monkeypatch)
    scheduler = busy.engine.scheduler
    assert isinstance(scheduler, AdaptiveKScheduler)
    busy.invariants.injected = lambda: scheduler.faults.count
    for _ in range(12):
        serve(busy, 1)
    assert scheduler.pilot is None
    after = AdaptiveKScheduler._update_after_schedule

    def another(self: AdaptiveKScheduler, output: Any) -> None:
        output.num_spec_tokens_to_schedule = (output.num_spec_tokens_to_schedule + 1) % 7
        after(self, output)

    monkeypatch.setattr(AdaptiveKScheduler, "_update_after_schedule", another)


def other_outcomes(change: Callable[[DraftOutcomes], DraftOutcomes]) -> Callable[..., None]:
    outcomes = Pilot._outcomes
    return replaced(Pilot, "_outcomes", lambda self, verified: change(outcomes(self, verified)))


def other_tokens(busy: BusyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    step = busy.engine.step

    def other() -> Any:
        turn = step()
        for tokens in turn.tokens.values():
            tokens[:1] = [-1]
        return turn

    monkeypatch.setattr(busy.engine, "step", other)


def told_twice(busy: BusyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    observe = CompiledController.observe

    def twice(self: CompiledController, **observed: Any) -> None:
        observe(self, **observed)
        observe(self, **observed)

    monkeypatch.setattr(CompiledController, "observe", twice)


BROKEN = {
    "a fault that none injected": Broken(failing("decide"), "after"),
    "a plan of no level": Broken(
        replaced(Pilot, "scheduled", lambda self, *args, **more: DraftPlan(5, {})), "_plan_is_allowed"
    ),
    "no plan": Broken(replaced(AdaptiveKScheduler, "_planned", lambda *args: None), "after"),
    "another schedule than vLLM's": Broken(stopped_on_another_schedule, "_schedule_is_vllms"),
    "more drafts than planned": Broken(
        replaced(AdaptiveKScheduler, "_trim", lambda *args: None), "_drafts_are_those_planned"
    ),
    "an outcome not told": Broken(
        other_outcomes(lambda told: DraftOutcomes(*[column[1:] for column in told])), "_observations_are_true"
    ),
    "an outcome that was another": Broken(
        other_outcomes(lambda told: told._replace(accepted=[0] * len(told.accepted))), "_observations_are_true"
    ),
    "a step not told": Broken(replaced(Pilot, "output", lambda *args, **more: None), "_observations_are_true"),
    "a step told twice": Broken(told_twice, "_observations_are_true"),
    "other tokens": Broken(other_tokens, "_tokens_are_true"),
    "the kind of a text kept": Broken(replaced(ModeTracker, "forget", lambda *args: None), "_kept_is_of_the_living"),
    "rates kept": Broken(replaced(CompiledController, "forget", lambda *args: None), "_kept_is_of_the_living"),
    "rows without end": Broken(
        replaced(CompiledController, "capacity", property(lambda self: 10**6)), "_kept_is_of_the_living"
    ),
}


def serve(busy: BusyEngine, turns: int) -> None:
    for _ in range(turns):
        while len(busy.living) < busy.serving.requests:
            busy.join(5, 20)
        busy.step()


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_what_must_not_be_is_found(broken: Broken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_in(tmp_path, SERVING, seed=0) as busy:
        serve(busy, 30)
        broken.make(busy, monkeypatch)
        with pytest.raises(AssertionError) as found:
            serve(busy, 400)
        assert broken.told_by in [entry.name for entry in found.traceback][-2:]


def test_what_is_left_at_the_end_is_found(tmp_path: Path) -> None:
    with serving_in(tmp_path, SERVING, seed=0) as busy:
        serve(busy, 10)
        with pytest.raises(AssertionError):
            busy.invariants.at_the_end()
        busy.end()
        busy.invariants.injected = lambda: 1
        with pytest.raises(AssertionError):
            busy.invariants.at_the_end()
