"""Whole random runs against the oracle, and what a control file does to them."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import jax
import numpy as np
import pytest

import oracle
from akjax import CompiledController, StepMeasures, default_controller, reference_controller, reference_cost
from akjax.cost import serving_cost
from akjax.scheduler.control_file import ControlFile
from akjax.scheduler.modes import ModeTracker, Vocabulary
from akjax.scheduler.pilot import Pilot, ScheduledStep, VerifiedDrafts
from akjax.scheduler.reports import Reports

DRAFT_LIMIT, LEVELS, MAX_REQUESTS = 5, (1, 2, 3, 5), 6
BACKTICKS = {0: "```", 3: "`", 4: "``\n"}
TOOL_OPEN, TOOL_CLOSE = 1, 2
RULES = {"batch": ("0", False), "per request": ("0", True), "gated": ("gated", False), "code": ("1", False)}


def make(code_mode: Any, per_request: bool, control: Path | None = None) -> Pilot:
    controller = reference_controller(
        draft_limit=DRAFT_LIMIT, levels=LEVELS, margin=0.03, per_request=per_request, code_mode=code_mode
    )
    cost = reference_cost(27.0, 0.635, 0.542, experts=64, top_k=6)
    modes = None if code_mode == "0" else ModeTracker(Vocabulary(BACKTICKS, TOOL_OPEN, TOOL_CLOSE))
    compiled = CompiledController(controller, cost, MAX_REQUESTS)
    return Pilot({"reference": compiled}, ControlFile(control, DRAFT_LIMIT), modes, Reports(lambda _: None))


class Run:
    """A random serving run, told to the pilot and to the oracle alike."""

    def __init__(self, pilot: Pilot, expected: oracle.Serve, seed: int) -> None:
        self.pilot, self.expected = pilot, expected
        self.rng = Random(seed)
        self.now = 0.0
        self.outputs: dict[str, list[int]] = {}
        self.told_finished: list[str] = []
        self.births = 0

    def step(self) -> None:
        rng = self.rng
        while len(self.outputs) < MAX_REQUESTS and rng.random() < 0.3:
            # Ids are used again, by requests that start afresh.
            self.births += 1
            self.outputs.setdefault(f"r{self.births % 9}", [])
        present = [request for request in self.outputs if rng.random() < 0.9]
        rng.shuffle(present)
        drafted = {r: rng.randint(1, DRAFT_LIMIT) for r in present if self.outputs[r] and rng.random() < 0.9}
        scheduled = {r: 1 + drafted.get(r, 0) + (rng.random() < 0.1) * rng.randint(1, 50) for r in present}
        step = oracle.Step(scheduled=scheduled, drafted=drafted)

        plan = self.pilot.scheduled(list(scheduled), self.told_finished, self.now)
        k, each = self.expected.scheduled(step)
        self.told_finished = []
        assert plan.draft_length == (k if each is None else max(each.values(), default=k))
        if each is not None:
            assert {r: plan.each.get(r, plan.draft_length) for r in scheduled} == each

        aborted = [r for r in present if rng.random() < 0.02]
        for request in aborted:
            self.end(request)
            self.expected.drop(request)
        ms = rng.uniform(10, 120)
        self.now += ms * 1e-3
        accepted = {r: rng.randint(0, d) for r, d in drafted.items() if r not in aborted}
        new = {r: [rng.randrange(10) for _ in range(1 + accepted.get(r, 0))] for r in present if r not in aborted}
        finished = [r for r in new if rng.random() < 0.05]
        self.pilot.output(
            ScheduledStep(scheduled, {r: [-1] * drafts for r, drafts in drafted.items()}),
            VerifiedDrafts([*accepted], [drafted[r] for r in accepted], [*accepted.values()], {}),
            self.now,
        )
        self.pilot.read(new.items())
        self.expected.output(step, ms, oracle.Output(accepted=accepted, new=new, finished=finished))
        for request, tokens in new.items():
            self.outputs[request] += tokens
        for request in finished:
            self.end(request)

    def end(self, request: str) -> None:
        del self.outputs[request]
        self.told_finished.append(request)

    def check(self) -> None:
        state = self.pilot.controller.settle()
        x = {p.name: float(v) for p, v in zip(*self.parameters(), strict=True)}
        np.testing.assert_allclose(
            [x["base"], x["per_expert"], x["per_token"], x["diversity"]], self.expected.cost.x, rtol=1e-9
        )
        assert int(state.cost.taught) == self.expected.cost.n
        np.testing.assert_allclose(state.pools[0], self.expected.usual.g, rtol=1e-9)
        for request in self.outputs:
            if self.pilot.controller.knows(request):
                np.testing.assert_allclose(
                    self.pilot.controller.request_state(request)[0],
                    self.expected.usual.of(request),
                    rtol=1e-9,
                    atol=1e-15,
                )

    def parameters(self) -> tuple[Any, Any]:
        model = self.pilot.controller.settle().cost.belief.model
        return model.parameters(), jax.tree.leaves(model)


def expected_run(code_mode: str, per_request: bool) -> oracle.Serve:
    return oracle.Serve(
        oracle.Settings(experts=64, topk=6, code_mode=code_mode, per_request=per_request),
        DRAFT_LIMIT,
        LEVELS,
        oracle.Modes(BACKTICKS, TOOL_OPEN, TOOL_CLOSE),
    )


@pytest.fixture(params=RULES, scope="module")
def rules(request: pytest.FixtureRequest) -> Callable[[], tuple[Pilot, oracle.Serve]]:
    code_mode, per_request = RULES[request.param]
    return lambda: (make(code_mode, per_request), expected_run(code_mode, per_request))


@pytest.mark.parametrize("seed", range(3))
def test_any_run_follows_the_oracle(rules: Callable[[], tuple[Pilot, oracle.Serve]], seed: int) -> None:
    run = Run(*rules(), seed)
    for number in range(400):
        run.step()
        if number % 20 == 0:
            run.check()
    run.check()
    assert run.expected.cost.n > 50


def test_a_forced_k_holds_while_the_file_says_so_and_learning_goes_on(tmp_path: Path) -> None:
    control = tmp_path / "control"
    for per_request in (False, True):
        pilot = make("0", per_request, control)
        for content, expected in ((b"force 3", 3), (b"force 99\n", 5), (b"force 0", 1), (b"\xff\x00", None)):
            control.write_bytes(content)
            step = ScheduledStep({"a": 4, "b": 4}, {"a": [-1] * 3, "b": [-1] * 3})
            pilot.output(step, VerifiedDrafts(["a"], [3], [3], {}), now=0.0)
            plan = pilot.scheduled(["a", "b"], [], now=0.0)
            if expected is not None:
                assert plan == (expected, {})
        control.unlink()
        plan = pilot.scheduled(["a", "b"], [], now=0.0)
        assert plan.draft_length in LEVELS
        # Four full acceptances of three drafts: 0.8 moved four times by 0.05 towards 1.
        np.testing.assert_allclose(pilot.controller.settle().pools[0][:3], 1 - 0.2 * 0.95**4, rtol=1e-12)


def test_the_measures_of_a_step_are_what_it_verifies_drafts_and_takes_in() -> None:
    step = ScheduledStep(
        # "a" takes in 5 tokens of its prompt, "b" verifies 2 drafts and "c" verifies 3, each after one token.
        tokens={"a": 5, "b": 3, "c": 4},
        drafts={"b": [-1, -1], "c": [-1, -1, -1]},
        context=100,
        drafting=4,
    )
    assert step.measures == StepMeasures(
        tokens=(1 + 0) + (1 + 2) + (1 + 3),
        requests=3,
        drafting=4,
        context=100,
        prefill=(5 - 1) + 0 + 0,
        uneven=True,
    )
    assert step.measures.tokens + step.measures.prefill == sum(step.tokens.values())


@pytest.mark.parametrize(
    ("tokens", "drafts", "prefill"),
    [
        ({}, {}, 0),
        ({"a": 1, "b": 1}, {}, 0),
        ({"a": 4, "b": 1}, {"a": [7, 8, 9]}, 0),
        ({"a": 2}, {}, 1),
        ({"a": 2}, {"a": []}, 1),
        ({"a": 5}, {"a": [7, 8, 9]}, 1),
        ({"a": 4, "b": 100}, {"a": [7, 8, 9]}, 99),
        ({"b": 100, "a": 4}, {"a": [7, 8, 9]}, 99),
    ],
)
def test_what_requests_have_beyond_one_token_and_their_drafts_is_of_prompts(
    tokens: dict[str, int], drafts: dict[str, list[int]], prefill: int
) -> None:
    assert ScheduledStep(tokens, drafts).measures.prefill == prefill


@pytest.mark.parametrize(
    ("tokens", "drafts", "uneven"),
    [
        ({}, {}, False),
        ({"a": 1, "b": 1}, {}, False),
        ({"a": 3, "b": 3}, {"a": [1, 2], "b": [1, 2]}, False),
        ({"a": 3, "b": 2}, {"a": [1, 2], "b": [1]}, True),
        ({"a": 3, "b": 1}, {"a": [1, 2]}, True),
        ({"a": 1, "b": 1}, {"a": [], "b": []}, False),
    ],
)
def test_a_step_is_uneven_if_requests_verify_different_numbers(
    tokens: dict[str, int], drafts: dict[str, list[int]], uneven: bool
) -> None:
    assert ScheduledStep(tokens, drafts).measures.uneven is uneven


def test_the_time_before_a_policy_took_charge_is_no_step_time(tmp_path: Path) -> None:
    """The reference lets pauses pass for steps, so the clock may have missed one."""
    control = tmp_path / "control"
    reference = reference_controller(draft_limit=2, levels=(1, 2), code_mode="0")
    default = default_controller(draft_limit=2, levels=(0, 2), code_mode="0")
    cost = reference_cost(27.0, 0.635, 0.542, experts=64, top_k=6)
    of_default = serving_cost(27.0, 0.635, 0.542, lengths=(0, 2), experts=64, top_k=6)
    pilot = Pilot(
        {"reference": CompiledController(reference, cost, 1), "default": CompiledController(default, of_default, 1)},
        ControlFile(control, 2),
        None,
        Reports(lambda _: None),
    )
    step = ScheduledStep({"a": 3}, {"a": [-1] * 2}, drafting=2)

    def serve(now: float) -> int:
        pilot.scheduled(["a"], [], now)
        pilot.output(step, VerifiedDrafts(["a"], [2], [2], {}), now)
        return int(pilot.controller.settle().cost.taught)

    assert [serve(0.0), serve(0.03), serve(0.06)] == [0, 1, 2]
    pilot.idle()
    control.write_text("policy default")
    assert [serve(10.0), serve(10.03), serve(10.06)] == [0, 1, 2]
    pilot.idle()
    assert [serve(20.0), serve(20.03)] == [2, 3]
    control.unlink()
    assert [serve(20.06), serve(20.09)] == [2, 3]


@pytest.mark.parametrize(("busy", "taught"), [(True, 2), (False, 0)])
def test_steps_without_tokens_hide_no_step_that_the_engine_works_on_meanwhile(busy: bool, taught: int) -> None:
    """In a pipeline that is not full they come in turn; without more to work on the engine may have slept."""
    default = default_controller(draft_limit=2, levels=(0, 2), code_mode="0")
    cost = serving_cost(27.0, 0.635, 0.542, lengths=(0, 2), experts=64, top_k=6)
    controller = CompiledController(default, cost, 1)
    pilot = Pilot({"default": controller}, ControlFile(None, 2), None, Reports(lambda _: None))
    for now in (0.0, 0.03, 0.06):
        pilot.scheduled(["a"], [], now)
        pilot.output(ScheduledStep({"a": 3}, {"a": [-1] * 2}, drafting=2), VerifiedDrafts(["a"], [2], [2], {}), now)
        pilot.scheduled([], [], now)
        pilot.output(ScheduledStep({}, {}), VerifiedDrafts([], [], [], {}), now, busy=busy)
    assert int(controller.settle().cost.taught) == taught
