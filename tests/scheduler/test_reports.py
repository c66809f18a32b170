"""The log lines: when k changes and what the model has learned, and neither too often."""

import re

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akjax import CompiledController, DraftOutcomes, StepMeasures, reference_controller, reference_cost
from akjax.cost import dense_cost, parse_table
from akjax.scheduler.modes import ModeTracker, Vocabulary
from akjax.scheduler.reports import Reports, describe_cost


@pytest.fixture(scope="module")
def controller() -> CompiledController:
    return CompiledController(
        reference_controller(draft_limit=4, levels=(1, 2, 4)),
        reference_cost(27.0, 0.635, 0.542, experts=288, top_k=8),
        max_requests=2,
    )


@pytest.fixture(scope="module")
def untaught() -> CompiledController:
    controller = reference_controller(draft_limit=1, levels=(1,), code_mode="0")
    return CompiledController(controller, dense_cost(27.0, 0.5), max_requests=1)


def teach(controller: CompiledController) -> None:
    """One step whose time is near enough to its prediction to teach."""
    before = int(controller.settle().cost.taught)
    controller.observe(step=StepMeasures(10, 2), ms=80.0, teaches=True, outcomes=DraftOutcomes())
    assert int(controller.settle().cost.taught) == before + 1


class Log(list[str]):
    """What was logged, and the reports that log to it."""

    def __init__(self, controller: CompiledController) -> None:
        super().__init__()
        self.reports = Reports(self.append)
        self.controller = controller

    def step(self, draft_length: int, now: float, modes: ModeTracker | None = None) -> list[str]:
        """The lines of one step."""
        before = len(self)
        self.reports.step(draft_length, now, self.controller, modes)
        return self[before:]

    def taught_before(self) -> "Log":
        """With all that the controller has learned in other tests already said, 1e6 seconds ago."""
        self.step(4, -1e6)
        self.clear()
        return self


@pytest.fixture
def log(controller: CompiledController) -> Log:
    return Log(controller).taught_before()


def test_steps_at_one_k_say_nothing(log: Log) -> None:
    for second in range(100):
        log.step(4, float(second))
    assert log == []


def test_a_change_says_old_new_and_the_steps_at_each(log: Log) -> None:
    log.step(4, 0.0)
    log.step(4, 0.1)
    (line,) = log.step(2, 0.2)
    assert "k 4 -> 2" in line
    assert "4: 3" in line  # one of them before this test's first
    assert "2: 1" in line
    (line,) = log.step(1, 10.0)
    assert "k 2 -> 1" in line
    assert {"1: 1", "2: 1", "4: 3"} == set(re.findall(r"\d+: \d+", line))


@pytest.mark.parametrize(("seconds", "said"), [(4.999, False), (5.0, True), (60.0, True)])
def test_a_second_change_waits_five_seconds(log: Log, seconds: float, said: bool) -> None:
    assert len(log.step(2, 100.0)) == 1
    assert bool(log.step(1, 100.0 + seconds)) is said


def test_a_change_within_the_five_seconds_is_said_after_them(log: Log) -> None:
    log.step(2, 0.0)
    assert log.step(1, 1.0) == []
    assert log.step(1, 4.0) == []
    (line,) = log.step(1, 5.5)
    assert "k 2 -> 1" in line
    assert "1: 3" in line


def test_a_change_taken_back_within_the_five_seconds_is_not_said(log: Log) -> None:
    log.step(2, 0.0)
    log.step(1, 1.0)
    assert log.step(2, 2.0) == []
    assert log.step(2, 20.0) == []


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 2.5, 4.5, 5.0, 7.0]), st.sampled_from([1, 2, 4]))))
def test_changes_are_rare_whole_and_not_lost(controller: CompiledController, steps: list[tuple[float, int]]) -> None:
    log = Log(controller).taught_before()
    now, said, last = 0.0, 4, float("-inf")
    for number, (gap, k) in enumerate(steps):
        now += gap
        for line in log.step(k, now):
            old, new = map(int, re.findall(r"(\d+) -> (\d+)", line)[0])
            assert (old, new) == (said, k)
            assert old != new
            assert now - last >= 5.0
            assert sum(int(count) for count in re.findall(r"\d+: (\d+)", line)) == number + 2
            said, last = new, now
        assert said == k or now - last < 5.0


def test_the_model_is_said_once_it_has_learned_something(log: Log) -> None:
    assert log.step(4, 0.0) == []
    teach(log.controller)
    (line,) = log.step(4, 30.0)
    assert line == describe_cost(log.controller)


def test_the_model_is_said_at_most_every_thirty_seconds(log: Log) -> None:
    teach(log.controller)
    assert len(log.step(4, 0.0)) == 1
    for second in (0.1, 10.0, 29.9):
        teach(log.controller)
        assert log.step(4, second) == []
    assert len(log.step(4, 30.0)) == 1


def test_a_model_that_learns_no_more_is_not_said_again(log: Log) -> None:
    teach(log.controller)
    assert len(log.step(4, 0.0)) == 1
    for second in range(1, 200):
        assert log.step(4, float(second)) == []


def test_an_untaught_model_is_never_said(untaught: CompiledController) -> None:
    log = Log(untaught)
    for second in range(0, 200, 10):
        assert log.step(4, float(second)) == []


@settings(max_examples=25, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from([0.0, 5.0, 20.0, 30.0, 45.0]), st.booleans())))
def test_model_lines_are_rare_and_each_has_news(
    controller: CompiledController, steps: list[tuple[float, bool]]
) -> None:
    log = Log(controller).taught_before()
    now, said, last = 0.0, int(controller.settle().cost.taught), float("-inf")
    for gap, teaches in steps:
        now += gap
        if teaches:
            teach(controller)
        for line in log.step(4, now):
            taught = int(re.findall(r"(\d+) steps taught", line)[0])
            assert taught == int(controller.settle().cost.taught)
            assert taught > said
            assert now - last >= 30.0
            said, last = taught, now


def test_the_model_line_has_coefficients_diversity_steps_and_error(log: Log) -> None:
    teach(log.controller)
    (line,) = log.step(4, 0.0)
    state = log.controller.settle()
    model = state.cost.belief.model
    for parameter, value in zip(model.parameters(), jax.tree.leaves(model), strict=True):
        assert f"{parameter.name} {float(value):.4g}" in line
    assert all(name in line for name in ("base", "per_expert", "per_token", "diversity"))
    assert f"{int(state.cost.taught)} steps" in line
    assert 0.0 < float(state.cost.error) < 1.0
    assert f"error {float(state.cost.error):.1%}" in line
    assert "switch" not in line


def test_the_model_line_has_the_mode_switches(log: Log) -> None:
    modes = ModeTracker(Vocabulary({0: "```"}))
    for _ in range(3):
        modes.scan("r", [0])
        modes.scan("r", [1])
    teach(log.controller)
    (line,) = log.step(4, 0.0, modes)
    assert "3 mode switches" in line


def test_both_lines_may_fall_on_one_step(log: Log) -> None:
    teach(log.controller)
    change, model = log.step(2, 0.0)
    assert "->" in change
    assert "cost model" in model


@pytest.mark.parametrize("spec", ["2:47,4:53,8:65", "2:47"])
def test_a_table_is_described_by_its_points(spec: str) -> None:
    controller = reference_controller(draft_limit=1, levels=(1,), code_mode="0", learns_cost=False)
    line = describe_cost(CompiledController(controller, parse_table(spec), max_requests=1))
    for point in spec.split(","):
        tokens, ms = point.split(":")
        assert f"ms_at_{tokens}" in line
        assert f" {ms} ms" in line


def test_a_dense_model_is_described_without_experts(untaught: CompiledController) -> None:
    line = describe_cost(untaught)
    assert "base 27 ms" in line
    assert "per_token 0.5" in line
    assert "expert" not in line
