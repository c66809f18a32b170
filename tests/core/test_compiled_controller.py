"""The controller as a serving process calls it: what it keeps, what it forgets, and that it never compiles again."""

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from akjax import (
    CODE,
    USUAL,
    CompiledController,
    DraftOutcomes,
    RunningRates,
    StepFeatures,
    StepMeasures,
    compiled_controller,
    default_controller,
    parse_table,
    predicted_ms,
    reference_controller,
    reference_cost,
)
from akjax.cost import serving_cost
from akjax.one_kernel import compiled_for_cpu

COST = reference_cost(27.0, 0.635, 0.542, experts=64, top_k=4)
DRAFT_LIMIT = 4

# A request, its drafts, those accepted, and its mode.
Outcome = tuple[str, int, int, int]


def make(max_requests: int = 4, **rules: object) -> CompiledController:
    controller = reference_controller(draft_limit=DRAFT_LIMIT, levels=(1, 2, 4), **rules)  # pyright: ignore[reportArgumentType]
    return CompiledController(controller, COST, max_requests)


def observe(controller: CompiledController, *outcomes: Outcome, ms: float = 40.0, teaches: bool = True) -> None:
    columns = DraftOutcomes(*map(list, zip(*outcomes, strict=True)))
    tokens = len(outcomes) + sum(columns.drafted)
    controller.observe(step=StepMeasures(tokens, len(outcomes)), ms=ms, teaches=teaches, outcomes=columns)


def make_default(max_requests: int = 4, *, per_request: bool = False) -> CompiledController:
    levels = (0, 1, 2, 4)
    return CompiledController(
        default_controller(draft_limit=DRAFT_LIMIT, levels=levels, per_request=per_request),
        serving_cost(27.0, 0.635, 0.542, lengths=levels, experts=64, top_k=4, sizes=(4, 8, 16)),
        max_requests,
    )


@pytest.fixture(
    scope="module",
    params=[(make, False), (make, True), (make_default, False), (make_default, True)],
    ids=["reference", "reference per request", "default", "default per request"],
)
def served(request: pytest.FixtureRequest) -> CompiledController:
    of_policy, per_request = request.param
    return of_policy(8, per_request=per_request)


def test_serving_compiles_nothing(served: CompiledController, caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    alive: list[str] = []
    with jax.log_compiles(), caplog.at_level(logging.DEBUG, "jax"):
        for step in range(500):
            if len(alive) < 8 and rng.random() < 0.4:
                alive.append(f"r{step}")
            if alive and rng.random() < 0.3:
                served.forget(alive.pop(rng.integers(len(alive))))
            outcomes = [(r, 4, int(rng.integers(5)), int(rng.integers(3))) for r in alive]
            observe(served, *outcomes, ms=float(rng.uniform(20, 60)), teaches=bool(rng.random() < 0.8))
            served.decide(alive, [int(rng.integers(3)) for _ in alive])
        assert "ompil" not in caplog.text, caplog.text
        jax.jit(lambda x: x + 1)(jnp.ones(17))
        assert "Compiling" in caplog.text, "the log did not show a compilation either"


@pytest.mark.parametrize("per_request", [False, True], ids=["batch", "per request"])
@pytest.mark.parametrize("of_policy", [make, make_default], ids=["reference", "default"])
def test_a_choice_is_one_kernel(
    of_policy: Callable[..., CompiledController], per_request: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[jax.stages.Compiled] = []

    def recorded(function: Callable[[Array], Array], argument: jax.ShapeDtypeStruct) -> jax.stages.Compiled:
        steps.append(compiled_for_cpu(function, argument))
        return steps[-1]

    monkeypatch.setattr(compiled_controller, "compiled_for_cpu", recorded)
    of_policy(256, per_request=per_request)
    kernels = [(step.as_text() or "").partition("\nENTRY")[2] for step in steps]
    assert [(kernel.count(" call("), kernel.count("fusion(")) for kernel in kernels] == [(1, 0)] * 6


def test_a_step_is_padded_to_the_first_size_that_holds_its_requests() -> None:
    size, index = compiled_controller._size, compiled_controller._size_index
    assert [size(i) for i in range(8)] == [1, 8, 32, 64, 128, 256, 512, 1024]
    for requests in range(1, 1025):
        least = index(requests)
        assert size(least) >= requests
        assert least == 0 or size(least - 1) < requests


def test_serving_needs_no_global_float64(served: CompiledController) -> None:
    with jax.enable_x64(False):
        observe(served, ("r", 4, 4, 0))
        served.decide(["r"], [0])
        assert served.settle().cost.belief.covariance.dtype == np.float64
    served.forget("r")


def test_rows_of_requests_that_were_never_observed_are_freed() -> None:
    controller = make_default(2)
    rows = len(controller._rows)
    for number in range(0, 2000, 2):
        ids = [f"r{number}", f"r{number + 1}"]
        controller.observe(step=StepMeasures(2, 2), ms=30.0, teaches=True, outcomes=DraftOutcomes())
        controller.decide(ids, [0, 0])
        for request_id in ids:
            controller.forget(request_id)
    controller.settle()
    assert len(controller._rows) == rows
    assert sorted(controller._free) == list(range(rows))
    assert not controller._slots
    np.testing.assert_array_equal(controller._rows, 0.0)


def test_a_request_that_was_decided_for_keeps_its_row_when_it_is_observed() -> None:
    controller = make_default(2)
    assert controller.decide(["r"], [0]).batch in (0, 1, 2, 4)
    assert controller.knows("r")
    before = float(controller.request_state("r").mean[0])
    observe(controller, ("r", 4, 0, 0))
    assert float(controller.request_state("r").mean[0]) < before
    assert len(controller._slots) == 1


def test_a_request_is_known_from_its_first_observation_until_it_is_forgotten() -> None:
    controller = make()
    with pytest.raises(ValueError, match="as many of each"):
        controller.observe(step=StepMeasures(2, 1), ms=30.0, teaches=True, outcomes=DraftOutcomes(["r"], [1], [1], []))
    assert not controller.knows("r")
    observe(controller, ("r", 4, 0, 0))
    assert controller.knows("r")
    controller.forget("r")
    with pytest.raises(ValueError, match="as many of each"):
        controller.observe(step=StepMeasures(2, 1), ms=30.0, teaches=True, outcomes=DraftOutcomes(["r"], [1], [1], []))
    assert not controller.knows("r")
    with pytest.raises(KeyError):
        controller.decide(["r"], [0])


def test_the_last_observation_counts_after_a_request_is_forgotten() -> None:
    controller = make()
    observe(controller, ("r", 4, 0, 0))
    controller.forget("r")
    np.testing.assert_allclose(controller.settle().pools[0], [0.76, 0.8, 0.8, 0.8], rtol=1e-12)


def test_an_id_used_again_starts_afresh() -> None:
    controller = make()
    observe(controller, ("r", 1, 0, 0))
    controller.forget("r")
    observe(controller, ("r", 1, 1, 0))
    # From the pool as the first observation left it, 0.8 - 0.05 * 0.8, and not from the first request's own rates.
    np.testing.assert_allclose(controller.request_state("r")[0, 0], 0.76 + 0.25 * 0.24, rtol=1e-12)


def test_a_request_that_was_set_apart_is_so_until_it_is_forgotten() -> None:
    controller = make_default()

    def pool_after(*outcomes: Outcome) -> float:
        observe(controller, *outcomes)
        return float(controller.settle().pools.mean[0, 0])

    first = pool_after()
    controller.set_apart("a")
    assert pool_after(("a", 4, 0, USUAL)) == first
    assert float(controller.request_state("a").mean[USUAL]) < 0.0
    # One that is known already, and whose slot another had before.
    lower = pool_after(("b", 4, 0, USUAL))
    assert lower < first
    controller.set_apart("b")
    controller.decide(["a", "b"], [USUAL, USUAL])
    assert pool_after(("b", 4, 0, USUAL)) == lower
    controller.forget("a")
    assert pool_after(("c", 4, 0, USUAL)) < lower
    lowest = float(controller.settle().pools.mean[0, 0])
    assert pool_after(("a", 4, 0, USUAL)) < lowest


def test_more_requests_than_can_run_at_once_keep_their_rates() -> None:
    """Preempted requests wait with their state, so there may be any number of them."""
    controller = make(max_requests=2)
    for number in range(40):
        observe(controller, (f"r{number}", 4, number % 5, 0))
    model = RunningRates()
    pool = model.init_pool(DRAFT_LIMIT)
    for number in range(40):
        pool, request = model.observe(pool, pool, jnp.int32(4), jnp.int32(number % 5))
        np.testing.assert_allclose(controller.request_state(f"r{number}")[0], request, rtol=1e-12)


def test_a_batch_that_was_replaced_since_the_last_output_is_decided_for() -> None:
    controller = make(max_requests=2)
    observe(controller, ("a", 4, 4, 0), ("b", 4, 4, 0))
    observe(controller, ("c", 4, 0, 0), ("d", 4, 0, 0))
    assert controller.decide(["a", "b"], [0, 0]).batch == 4
    assert int(controller.settle().cost.taught) == 2


def test_a_step_that_does_not_teach_leaves_the_cost_alone() -> None:
    controller = make()
    before = jax.tree.map(np.copy, controller.settle().cost.belief)
    observe(controller, ("r", 4, 2, 0), teaches=False)
    observe(controller, ("r", 4, 2, 0), ms=1e4)
    observe(controller, ("r", 4, 2, 0), ms=float("nan"))
    observe(controller, ("r", 4, 2, 0), ms=1.0)
    after = controller.settle()
    assert int(after.cost.taught) == 0
    assert float(after.cost.error) == 0.0
    jax.tree.map(np.testing.assert_array_equal, after.cost.belief, before)


def test_a_fixed_table_is_not_taught() -> None:
    controller = CompiledController(
        reference_controller(draft_limit=4, levels=(2, 4), learns_cost=False),
        parse_table("2:47,4:53,8:65"),
        max_requests=1,
    )
    observe(controller, ("r", 4, 4, 0), ms=55.0)
    controller.decide(["r"], [0])
    assert int(controller.settle().cost.taught) == 0
    np.testing.assert_array_equal(controller.settle().cost.belief.model.ms, [47.0, 53.0, 65.0])  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("learns_cost", "of_default"), [(True, False), (True, True), (False, False)], ids=["reference", "default", "fixed"]
)
def test_what_a_step_was_predicted_to_take_is_told_once_it_was_taken_in(learns_cost: bool, of_default: bool) -> None:
    if of_default:
        controller = make_default(1)
    else:
        cost = COST if learns_cost else parse_table("2:47,4:53,8:65")
        rules = reference_controller(draft_limit=DRAFT_LIMIT, levels=(1, 2, 4), learns_cost=learns_cost)
        controller = CompiledController(rules, cost, 1)
    assert (controller.taught, controller.predicted_ms) == (0, 0.0)

    def predicted(step: StepMeasures) -> float:
        features = StepFeatures(*(np.float64(value) for value in step))
        return float(predicted_ms(controller.settle().cost.belief.model, features))

    for drafting, teaches, ms in (
        (4, True, 45.0),
        (2, True, 41.0),
        (4, False, 45.0),
        (4, True, 5000.0),
        (4, True, 44.0),
    ):
        step = StepMeasures(1 + drafting, 1, drafting)
        before, expected = controller.taught, predicted(step)
        controller.observe(step=step, ms=ms, teaches=teaches, outcomes=DraftOutcomes())
        assert controller.taught == before, "nothing was taken in yet"
        controller.decide([], [])
        np.testing.assert_allclose(controller.predicted_ms, expected, rtol=1e-12)
        assert controller.taught == before + (learns_cost and teaches and ms < 1000.0)
        controller.decide([], [])
        np.testing.assert_allclose(controller.predicted_ms, expected, rtol=1e-12)
    assert controller.taught == int(controller.settle().cost.taught)


def test_the_default_admits_no_step_that_changes_over_to_or_from_no_drafts() -> None:
    reference, default = make(1), make_default(1)
    for step, admitted in (
        (StepMeasures(5, 1, 4), True),
        (StepMeasures(1, 1, 0), True),
        (StepMeasures(1, 1, 4), False),
        (StepMeasures(5, 1, 0), False),
        (StepMeasures(1, 1, 4, prefill=9), True),
    ):
        assert default.admits(step) == admitted
        assert reference.admits(step)
        before = default.taught
        default.observe(step=step, ms=40.0, teaches=True, outcomes=DraftOutcomes())
        default.decide([], [])
        assert default.taught == before + admitted


def test_a_modes_rates_are_made_from_its_own_pool_and_kept() -> None:
    controller = make(code_mode="1")
    observe(controller, ("a", 1, 0, CODE))
    np.testing.assert_allclose(controller.settle().pools[CODE], [0.76, 0.8, 0.8, 0.8], rtol=1e-12)
    observe(controller, ("b", 1, 1, 0))
    controller.decide(["b"], [CODE])  # first use: a copy of the mode's pool as it is now
    observe(controller, ("a", 1, 0, CODE))
    observe(controller, ("b", 1, 0, CODE))
    np.testing.assert_allclose(controller.request_state("b")[CODE, 0], 0.76 * 0.75, rtol=1e-12)


@pytest.mark.parametrize("levels", [(), (2, 1), (1, 1), (0, 2), (1, 5)])
def test_levels_that_no_step_can_have_are_refused(levels: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="levels"):
        reference_controller(draft_limit=4, levels=levels)


def test_no_requests_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="max_requests"):
        make(max_requests=0)


@pytest.mark.parametrize(
    "outcome",
    [
        ("r", 0, 0, 0),
        ("r", 5, 0, 0),
        ("r", 2, 3, 0),
        ("r", 2, -1, 0),
        ("r", -1, -1, 0),
        ("r", 256, 1, 0),
    ],
)
def test_an_outcome_that_no_step_can_have_is_refused(outcome: Outcome) -> None:
    controller = make(max_requests=1)
    with pytest.raises(ValueError, match=f"drafted must be 1 to 4, .* given request_ids 'r', drafted {outcome[1]}, "):
        observe(controller, outcome)
    with pytest.raises(ValueError, match="2 outcomes"):
        observe(controller, ("a", 1, 0, 0), ("b", 1, 0, 0))
    with pytest.raises(ValueError, match="as many of each"):
        controller.observe(step=StepMeasures(2, 1), ms=30.0, teaches=True, outcomes=DraftOutcomes(["r"], [1], [1], []))
    assert not controller.knows("r")


def test_columns_that_are_no_lists_are_refused_and_not_misread() -> None:
    """Of an array of int64 `bytes` makes eight numbers for each."""
    controller = make(max_requests=2)
    drafted: Any = np.asarray([2, 2])
    with pytest.raises(ValueError, match="given request_ids"):
        controller.observe(
            step=StepMeasures(6, 2),
            ms=30.0,
            teaches=True,
            outcomes=DraftOutcomes(["a", "b"], drafted, [1, 1], [0, 0]),
        )


@pytest.mark.parametrize("modes", [[], [0], [0, 0, 0]])
def test_a_mode_for_each_request_is_needed(modes: list[int]) -> None:
    with pytest.raises(ValueError, match="2 requests have as many modes"):
        make_default(2).decide(["a", "b"], modes)


def test_more_drafts_than_a_byte_can_say_are_refused() -> None:
    controller = reference_controller(draft_limit=256, levels=(1, 2))
    with pytest.raises(ValueError, match="at most 255, given 256"):
        CompiledController(controller, COST, 1)
