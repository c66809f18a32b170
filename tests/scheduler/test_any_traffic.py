"""Whatever requests do, in whatever order: the invariants of long runs, on traffic that is searched for and shrunk."""

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from vllm.v1.core.sched.interface import PauseState

from busy_engine import PREFIXES, Serving, serving_in
from control_lines import LINES

SERVINGS = {
    "tiny cache": Serving(blocks=3.0),
    "each its own, shared prefixes": Serving(prefixes=True, blocks=4.0, settings={"per_request": True}),
    "sessions": Serving(sessions=True, prefixes=True),
    "reference, runner 1, padded": Serving(schedule=False, v2=False, prefixes=True, settings={"policy": "reference"}),
    "not async": Serving(asynchronous=False, blocks=3.0, settings={"per_request": True}),
    "one at a time": Serving(requests=1, drafter_gives=0.3),
}
MOST_LIVING = 20


class Traffic(RuleBasedStateMachine):
    """Each rule is something that happens to an engine."""

    def __init__(self, serving: Serving) -> None:
        super().__init__()
        self.open = ExitStack()
        folder = self.open.enter_context(TemporaryDirectory())
        self.busy = self.open.enter_context(serving_in(Path(folder), serving, seed=0))

    @precondition(lambda self: len(self.busy.living) < MOST_LIVING)
    @rule(
        prompts=st.lists(st.integers(1, 120), min_size=1, max_size=4),
        max_tokens=st.integers(1, 60),
        prefix=st.none() | st.integers(0, len(PREFIXES) - 1),
        structured=st.booleans(),
        stops=st.sampled_from([0, 40]),
        session=st.booleans(),
        again=st.booleans(),
    )
    def join(
        self,
        prompts: list[int],
        max_tokens: int,
        prefix: int | None,
        structured: bool,
        stops: int,
        session: bool,
        again: bool,
    ) -> None:
        for prompt in prompts:
            self.busy.join(
                prompt,
                max_tokens,
                prefix=prefix,
                structured=structured,
                stops=stops,
                session=session,
                again=again,
            )

    @rule(turns=st.integers(1, 12))
    def serve(self, turns: int) -> None:
        for _ in range(turns):
            self.busy.step()

    @precondition(lambda self: self.busy.living)
    @rule(which=st.integers(0, MOST_LIVING), late=st.booleans())
    def leave(self, which: int, late: bool) -> None:
        living = self.busy.living
        self.busy.leave(living[which % len(living)], late=late)

    @precondition(lambda self: self.busy.engine.waiting_sessions())
    @rule(prompt=st.integers(1, 40), max_tokens=st.integers(1, 40))
    def resume(self, prompt: int, max_tokens: int) -> None:
        self.busy.resume(self.busy.engine.waiting_sessions()[0], prompt, max_tokens)

    @precondition(lambda self: self.busy.living)
    @rule(which=st.integers(0, MOST_LIVING))
    def fail_load(self, which: int) -> None:
        living = self.busy.living
        self.busy.fail_load(living[which % len(living)])

    @rule()
    def reset_cache(self) -> None:
        self.busy.reset_cache()

    @rule(state=st.sampled_from(list(PauseState)), turns=st.integers(1, 4))
    def pause(self, state: PauseState, turns: int) -> None:
        self.busy.pause(state)
        self.serve(turns)
        self.busy.pause(PauseState.UNPAUSED)

    @rule(seconds=st.floats(0.0, 100.0))
    def wait(self, seconds: float) -> None:
        self.busy.wait(seconds)

    @rule(line=st.sampled_from(LINES))
    def say(self, line: bytes | None) -> None:
        self.busy.say(line)

    def teardown(self) -> None:
        try:
            if self.busy.sound:
                self.busy.end()
        finally:
            self.open.close()


@pytest.mark.parametrize("serving", SERVINGS.values(), ids=SERVINGS.keys())
def test_the_invariants_hold_in_every_step(serving: Serving) -> None:
    settings = hypothesis.settings(
        max_examples=3,
        stateful_step_count=60,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    run_state_machine_as_test(lambda: Traffic(serving), settings=settings)
