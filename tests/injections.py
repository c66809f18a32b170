"""Parts of ours that can be made to fail while an engine serves: one list, for short tests and long runs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from vllm.v1.core.sched.interface import PauseState

from akjax.compiled_controller import CompiledController, _CompiledStep
from akjax.scheduler import AdaptiveKScheduler, adaptive_k
from akjax.scheduler.control_file import ControlFile
from akjax.scheduler.modes import ModeTracker
from akjax.scheduler.pilot import DraftPlan, Pilot, VerifiedDrafts
from akjax.scheduler.reports import Reports
from akjax.scheduler.step_clock import StepClock
from akjax.scheduler.step_log import LogWriter, StepLog
from harness import FakeEngine


class Switch:
    """Whether a part is broken.

    Attributes:
        times: that it fails from here on.
        failed: so often it has.
    """

    def __init__(self) -> None:
        """Whole."""
        self.times = self.failed = 0

    def off(self) -> bool:
        """Asked by the part when it is used; False for a part that is to fail."""
        if not self.times:
            return True
        self.times -= 1
        self.failed += 1
        return False


class Injected(NamedTuple):
    """A part that fails while a switch is on.

    Attributes:
        install: makes it so, for an engine that is served.
        settings: of ours, that the part needs.
        use: has the engine use the part, where it would not in any step.
        heals: whether a step with a single request puts it right, so that it may pass without a fault.
    """

    install: Callable[[FakeEngine, pytest.MonkeyPatch, Switch], None]
    settings: dict[str, Any] = {}  # noqa: RUF012
    use: Callable[[FakeEngine], None] = lambda engine: None
    heals: bool = False


def raising(owner: type, name: str) -> Callable[[FakeEngine, pytest.MonkeyPatch, Switch], None]:
    """A method that raises instead of doing anything."""

    def install(_: FakeEngine, monkeypatch: pytest.MonkeyPatch, switch: Switch) -> None:
        method = getattr(owner, name)

        def broken(*args: Any, **kwargs: Any) -> Any:
            if switch.off():
                return method(*args, **kwargs)
            raise ZeroDivisionError("injected")

        monkeypatch.setattr(owner, name, broken)

    return install


def spoiling(spoil: Callable[[Any], None]) -> Callable[[FakeEngine, pytest.MonkeyPatch, Switch], None]:
    """A state that goes wrong between two steps."""

    def install(_: FakeEngine, monkeypatch: pytest.MonkeyPatch, switch: Switch) -> None:
        decide = CompiledController.decide

        def spoiled(self: CompiledController, *args: Any, **kwargs: Any) -> Any:
            if not switch.off():
                spoil(self._state_layout.views(self._state))
            return decide(self, *args, **kwargs)

        monkeypatch.setattr(CompiledController, "decide", spoiled)

    return install


def written(place: Callable[[Any], Any], value: float) -> Callable[[FakeEngine, pytest.MonkeyPatch, Switch], None]:
    """A number of the state that is overwritten."""

    def spoil(state: Any) -> None:
        place(state)[...] = value

    return spoiling(spoil)


def planning(length: int) -> Callable[[FakeEngine, pytest.MonkeyPatch, Switch], None]:
    """Plans of a draft length that there is not."""

    def install(_: FakeEngine, monkeypatch: pytest.MonkeyPatch, switch: Switch) -> None:
        scheduled = Pilot.scheduled

        def wrong(self: Pilot, *args: Any, **kwargs: Any) -> DraftPlan:
            plan = scheduled(self, *args, **kwargs)
            return plan if switch.off() else DraftPlan(length, {})

        monkeypatch.setattr(Pilot, "scheduled", wrong)

    return install


def breaking_the_hook(_: FakeEngine, monkeypatch: pytest.MonkeyPatch, switch: Switch) -> None:
    """vLLM's hook that tells of a request's drafts, after it has noted a part of it."""

    class Full(list[int]):
        def append(self, _: int) -> None:
            if switch.off():
                return
            raise ZeroDivisionError("injected")

    def columns(ids: list[str], drafted: list[int], accepted: list[int], cut: dict[str, int]) -> Any:
        return VerifiedDrafts(ids, Full() if switch.times else drafted, accepted, cut)

    monkeypatch.setattr(adaptive_k, "VerifiedDrafts", columns)


DEFAULT: dict[str, Any] = {"policy": "default"}
REFERENCE: dict[str, Any] = {"policy": "reference"}
PER_REQUEST: dict[str, Any] = {**REFERENCE, "per_request": True}
FAULTS: dict[str, Injected] = {
    "control file": Injected(raising(ControlFile, "read")),
    "mode reading": Injected(raising(ModeTracker, "read")),
    "modes": Injected(raising(ModeTracker, "of")),
    "modes forgotten": Injected(raising(ModeTracker, "forget")),
    "decide": Injected(raising(CompiledController, "decide")),
    "observe": Injected(raising(CompiledController, "observe")),
    "forget": Injected(raising(CompiledController, "forget")),
    "compiled call": Injected(raising(_CompiledStep, "__call__")),
    "step log": Injected(raising(StepLog, "output")),
    "step log settles": Injected(raising(StepLog, "settle")),
    "step log's writer": Injected(raising(LogWriter, "put")),
    "reports": Injected(raising(Reports, "step")),
    "step clock": Injected(raising(StepClock, "gap_ms")),
    "idle": Injected(raising(Pilot, "idle"), use=lambda engine: engine.scheduler.set_pause_state(PauseState.UNPAUSED)),
    "plan": Injected(raising(Pilot, "scheduled")),
    "plan above K": Injected(planning(99)),
    "plan below 0": Injected(planning(-1)),
    "trim": Injected(raising(AdaptiveKScheduler, "_trim"), PER_REQUEST),
    "hook": Injected(breaking_the_hook),
    "NaN in the cost": Injected(written(lambda s: jax.tree.leaves(s.cost.belief.model)[0], np.nan), DEFAULT),
    "NaN in the rates": Injected(written(lambda state: state.pools.mean[:1], np.nan), DEFAULT),
    "NaN in the choice": Injected(written(lambda state: state.choice.work[:1], np.nan), DEFAULT),
    "variance of the cost negative": Injected(
        written(lambda state: state.cost.belief.covariance[1, 1:2], -1e6), DEFAULT
    ),
    "variance of the rates negative": Injected(written(lambda state: state.pools.covariance[0, 4, 4:], -1e6), DEFAULT),
    "k no level": Injected(written(lambda state: state.choice.look, 99.0), DEFAULT),
    "reference: NaN in the rates": Injected(written(lambda state: state.pools[:1], np.nan), PER_REQUEST),
    "reference: variance negative": Injected(
        written(lambda state: state.cost.belief.covariance[1, 1:2], -1e6), REFERENCE
    ),
    "reference: k no level": Injected(written(lambda state: state.choice, 2.5), PER_REQUEST, heals=True),
}
