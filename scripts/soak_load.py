"""Requests of all sorts at random, for many steps, on vLLM's own scheduler."""

import math
import tempfile
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from vllm.v1.core.sched.interface import PauseState

from akjax.fits.reading import read_log
from akjax.scheduler.jax_process import run_on_the_callers_thread
from busy_engine import PREFIXES, BusyEngine, Serving, serving_in
from compilations import Compilations
from measuring import SECONDS_BETWEEN_LINES, apart, resident_megabytes, say, settle_garbage, working

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
LINES = (
    None,
    b"",
    b"policy reference",
    b"policy default",
    b"force x",
    b"\xff\x00",
    b"force 0",
    b"force 3",
    b"force 99",
)
TENTHS = 10


class Load:
    """What comes to an engine, step by step."""

    def __init__(self, busy: BusyEngine, seed: int) -> None:
        """Nothing yet."""
        self._busy = busy
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
            busy.say(rng.choice(LINES))
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
        load, said = Load(busy, seed), time.perf_counter()
        settle_garbage()
        try:
            with compilations.told(report):
                while busy.counts["steps"] < steps:
                    load.step()
                    if busy.counts["steps"] * TENTHS // steps > len(megabytes):
                        megabytes.append(resident_megabytes())
                    if time.perf_counter() > said + SECONDS_BETWEEN_LINES:
                        said = time.perf_counter()
                        say(f"load, {name}: {busy.counts['steps']:,} of {steps:,} steps, {resident_megabytes():.0f} MB")
                busy.end()
            report |= logged(busy)
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
