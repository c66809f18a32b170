"""Requests of all sorts at random, for many steps, on vLLM's own scheduler; parts of akjax fail in some of the runs."""

import math
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.interface import PauseState

from adaptive_engine import scheduler_of
from akjax.fits.reading import read_log
from akjax.scheduler.faults import MOST_RESTARTS, WINDOW_SECONDS
from akjax.scheduler.jax_process import run_on_the_callers_thread
from busy_engine import PREFIXES, BusyEngine, Serving, serving_in
from compilations import Compilations
from control_lines import LINES
from injections import DEFAULT, FAULTS, PER_REQUEST, Switch
from measuring import SECONDS_BETWEEN_LINES, apart, resident_megabytes, say, settle_garbage, working

# Here a policy is named, and the control file names none, as how a state can be spoiled depends on it.
BROKEN = {
    "faults": Serving(requests=32, blocks=3.0, prefixes=True, settings={"policy": "default"}),
    "faults, reference": Serving(requests=16, blocks=3.0, settings=PER_REQUEST),
    "faults, not async": Serving(requests=16, asynchronous=False, settings={**DEFAULT, "per_request": True}),
}
RUNS = {
    "one at a time": Serving(requests=1),
    "tiny cache": Serving(requests=16, blocks=3.0),
    "each its own": Serving(requests=64, blocks=2.0, prefixes=True, settings={"per_request": True}),
    "sessions": Serving(requests=32, sessions=True, prefixes=True),
    "reference": Serving(requests=16, blocks=3.0, v2=False, settings={"policy": "reference", "code_mode": "gated"}),
    "reference, each its own": Serving(requests=64, settings={"policy": "reference", "per_request": True}),
    "without a schedule": Serving(requests=16, blocks=3.0, schedule=False, prefixes=True),
    "not async": Serving(requests=32, blocks=3.0, asynchronous=False, settings={"per_request": True}),
    "uneven drafts": Serving(requests=32, blocks=3.0, drafter_gives=0.3),
    "many": Serving(requests=512, blocks=3.0, prefixes=True, settings={"per_request": True}),
}
TENTHS = 10
# Of the steps with faults: from here on they come so often that akjax stops.
TOO_OFTEN_FROM = 0.75
# A part that is broken fails when it is next used, and what it did is found out in the next step.
STEPS_UP_TO_A_FAULT = 2000
TAUGHT_BETWEEN_FAULTS = 10


class Breaking:
    """Breaks parts of akjax at random moments, one at a time and each once it has come back from the fault before.

    Attributes:
        stopped_after: steps after which akjax stopped for good; None while it has not.
    """

    def __init__(self, busy: BusyEngine, rng: Random) -> None:
        """Of `busy`, whose settings say which parts there are."""
        self.stopped_after: int | None = None
        self._busy, self._rng = busy, rng
        settings = busy.serving.settings.items()
        self._parts = {
            name: part for name, part in FAULTS.items() if part.settings.items() <= settings and not part.heals
        }
        self._switches = {name: Switch() for name in self._parts}
        self._broken: str | None = None
        self._steps = 0
        busy.invariants.injected = lambda: sum(self.failed.values())

    @property
    def failed(self) -> dict[str, int]:
        """How often each part has failed, by name."""
        return {name: switch.failed for name, switch in self._switches.items()}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, its parts can fail."""
        with pytest.MonkeyPatch.context() as patch:
            for name, part in self._parts.items():
                part.install(self._busy.engine, patch, self._switches[name])
            yield

    def step(self, *, too_often: bool) -> None:
        """Breaks a part, or does not.

        Args:
            too_often: whether the same part is to fail again and again, in no time.

        Raises:
            RuntimeError: a part was broken and there was no fault, or nothing was learned again after one.
        """
        scheduler, counts = scheduler_of(self._busy.engine), self._busy.counts
        if scheduler.pilot is None:
            self.stopped_after = self.stopped_after or counts["steps"]
            return
        if counts["steps"] - self._steps > STEPS_UP_TO_A_FAULT:
            raise RuntimeError(f"{self._broken}: no fault, or nothing learned, for {STEPS_UP_TO_A_FAULT} steps")
        if too_often and self._broken is not None and self._broken != "decide":
            # It may be a part that is not used for long.
            self._switches[self._broken].times = 0
        if self._broken is not None and (
            self._switches[self._broken].times or scheduler.faults.count < sum(self.failed.values())
        ):
            return
        if not too_often and scheduler.pilot.controller.taught < TAUGHT_BETWEEN_FAULTS:
            return
        self._steps = counts["steps"]
        if too_often:
            self._broken = "decide"
        elif self._rng.random() < 0.3:
            self._broken = self._rng.choice(list(self._parts))
            # So that it is never too often.
            self._busy.wait(WINDOW_SECONDS / MOST_RESTARTS)
        else:
            self._broken = None
            return
        self._switches[self._broken].times = 1

    def report(self) -> dict[str, Any]:
        """What failed and what came of it.

        Raises:
            RuntimeError: akjax has not stopped.
        """
        faults, failed = self._busy.invariants.faults_logged, self.failed
        if self.stopped_after is None:
            raise RuntimeError(f"faults came too often, and akjax has not stopped after {faults}")
        return {
            "injected": sum(failed.values()),
            "faults_logged": faults,
            "begun_anew": faults - 1,
            "steps_without": self._busy.counts["steps"] - self.stopped_after,
            "parts": failed,
        }


class Load:
    """What comes to an engine, step by step."""

    def __init__(self, busy: BusyEngine, seed: int, lines: Sequence[bytes | None] = LINES) -> None:
        """Nothing yet; `lines` are what the control file is to hold."""
        self._busy = busy
        self._lines = lines
        self._rng = Random(seed)
        self._wanted = 0
        self._steps_left = 0
        self._paused = 0

    def step(self) -> None:
        """What happens before a turn, and the turn."""
        busy, rng = self._busy, self._rng
        living = busy.living
        if self._steps_left == 0:
            # As often few as many; now and then none, and then a wait.
            most = 1.5 * busy.serving.requests
            self._wanted = 0 if rng.random() < 0.1 else round(math.exp(rng.uniform(0.0, math.log(most))))
            self._steps_left = rng.randint(20, 400)
            busy.say(rng.choice(self._lines))
        self._steps_left -= 1
        if not living and not self._wanted:
            busy.wait(rng.expovariate(0.1))
            self._steps_left = 0
        for _ in range(min(max(self._wanted - len(living), 0), rng.randint(0, 1 + busy.serving.requests // 16))):
            self._join()
        for session in busy.engine.waiting_sessions():
            if rng.random() < 0.2:
                busy.resume(session, rng.randint(1, 40), 1 + round(rng.expovariate(0.05)))
        if living and rng.random() < 0.03:
            busy.leave(rng.choice(living), late=rng.random() < 0.5)
        # Not all of them need be there any more.
        if busy.living and rng.random() < 0.005:
            busy.fail_load(rng.choice(busy.living))
        if rng.random() < 0.002:
            busy.reset_cache()
        if self._paused:
            self._paused -= 1
            if not self._paused:
                busy.pause(PauseState.UNPAUSED)
        elif rng.random() < 0.005:
            busy.pause(rng.choice([PauseState.PAUSED_ALL, PauseState.PAUSED_NEW]))
            self._paused = rng.randint(1, 6)
        busy.step()

    def _join(self) -> None:
        rng = self._rng
        self._busy.join(
            min(1 + round(rng.expovariate(0.04)), 199),
            min(1 + round(rng.expovariate(0.03)), 200),
            prefix=rng.randrange(len(PREFIXES)) if rng.random() < 0.4 else None,
            structured=rng.random() < 0.15,
            stops=20 if rng.random() < 0.2 else 0,
            session=rng.random() < 0.3,
            again=rng.random() < 0.3,
        )


def serve(name: str, steps: int, seed: int) -> dict[str, Any]:
    """One of `RUNS`: what happened, and what went wrong, if anything did."""
    compilations = Compilations()
    run_on_the_callers_thread()
    serving = RUNS[name]
    report: dict[str, Any] = {"requests_at_once": serving.requests, "fault": None}
    megabytes: list[float] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as open_:
        with working(f"load, {name}: starting"):
            busy = open_.enter_context(serving_in(Path(folder), serving, seed))
        breaking = None
        if name in BROKEN:
            breaking = Breaking(busy, Random(seed))
            open_.enter_context(breaking.installed())
        lines = [line for line in LINES if breaking is None or not (line or b"").startswith(b"policy")]
        load, said = Load(busy, seed, lines), time.perf_counter()
        settle_garbage()
        try:
            with compilations.told(report):
                while busy.counts["steps"] < steps:
                    if breaking is not None:
                        breaking.step(too_often=busy.counts["steps"] > TOO_OFTEN_FROM * steps)
                    load.step()
                    if busy.counts["steps"] * TENTHS // steps > len(megabytes):
                        megabytes.append(resident_megabytes())
                    if time.perf_counter() > said + SECONDS_BETWEEN_LINES:
                        said = time.perf_counter()
                        say(f"load, {name}: {busy.counts['steps']:,} of {steps:,} steps, {resident_megabytes():.0f} MB")
                busy.end()
            report |= logged(busy)
            if breaking is not None:
                report |= breaking.report()
        except Exception as error:
            report["fault"] = f"{type(error).__name__}: {error} after {busy.counts['steps']} steps"
            say("".join(traceback.format_exception(error)))
        report |= {**busy.counts, "observations": busy.invariants.observations, "megabytes": megabytes}
    # The first tenth fills what then stays: tables, caches, the allocator's arenas.
    tenths = np.arange(len(megabytes))[1:]
    report["megabytes_each_1000_steps"] = (
        float(np.polyfit(tenths * steps / TENTHS, megabytes[1:], 1)[0]) * 1000 if len(tenths) > 1 else 0.0
    )
    return report


def logged(busy: BusyEngine) -> dict[str, Any]:
    """What of the run its step log holds.

    Raises:
        RuntimeError: it holds something else than what was observed.
    """
    log = read_log(f"{busy.step_log}*")
    drafted = int(log.steps["drafted"].list.len().sum())
    if log.refused or (drafted != busy.invariants.observations and len(log.steps) == busy.counts["steps"]):
        raise RuntimeError(f"the step log holds {drafted} outcomes, and refused {log.refused}")
    return {"logged": len(log.steps)}


def load(steps: int, seed: int) -> dict[str, Any]:
    """All of `RUNS`, each in a process of its own, with an equal part of the steps."""
    return {name: apart(serve, name, steps // len(RUNS), seed + number) for number, name in enumerate(RUNS)}
