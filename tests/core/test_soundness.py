"""Whether a controller's state is sound: learning never makes another, every other is told, and a restart mends it."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akjax import (
    CODE,
    CompiledController,
    DraftOutcomes,
    Soundness,
    StepMeasures,
    UnsoundStateError,
    default_controller,
    parse_table,
    reference_controller,
    reference_cost,
)
from akjax.cost import UNEVEN, serving_cost

K, MOST = 4, 8
IDS = [f"r{number}" for number in range(MOST)]
COST = reference_cost(27.0, 0.635, 0.542, experts=64, top_k=4)


def default(per_request: bool = False) -> CompiledController:
    levels = (0, 1, 2, 4)
    cost = serving_cost(
        27.0, 0.635, 0.542, lengths=levels, experts=64, top_k=4, sizes=(4, 8), uneven=UNEVEN if per_request else None
    )
    return CompiledController(default_controller(draft_limit=K, levels=levels, per_request=per_request), cost, MOST)


def reference(per_request: bool = False) -> CompiledController:
    rules = reference_controller(draft_limit=K, levels=(1, 2), per_request=per_request, code_mode="1")
    return CompiledController(rules, COST, MOST)


def fixed(per_request: bool = False) -> CompiledController:
    rules = reference_controller(draft_limit=K, levels=(1, 2), learns_cost=False)
    return CompiledController(rules, parse_table("2:47,4:53,8:65"), MOST)


@pytest.fixture(
    scope="module",
    params=[(default, False), (default, True), (reference, False), (reference, True), (fixed, False)],
    ids=["default", "default per request", "reference", "reference per request", "fixed"],
)
def any_controller(request: pytest.FixtureRequest) -> CompiledController:
    of_policy, per_request = request.param
    return of_policy(per_request)


@pytest.fixture(scope="module")
def of_default() -> CompiledController:
    return default()


@pytest.fixture(scope="module")
def of_reference() -> CompiledController:
    return reference()


def serve(controller: CompiledController, steps: int, seed: int = 0) -> list[list[int]]:
    """Random steps of some requests; the lengths that were decided in each."""
    rng = np.random.default_rng(seed)
    decided = []
    for _ in range(steps):
        ids = [request_id for request_id in IDS if rng.random() < 0.7]
        outcomes = DraftOutcomes(
            ids, [K] * len(ids), rng.integers(K + 1, size=len(ids)).tolist(), rng.integers(3, size=len(ids)).tolist()
        )
        tokens = (K + 1) * len(ids)
        controller.observe(
            step=StepMeasures(tokens, len(ids), K), ms=float(rng.uniform(30, 60)), teaches=True, outcomes=outcomes
        )
        lengths = controller.decide(ids, [0] * len(ids))
        decided.append([lengths.batch] if lengths.each is None else lengths.each.tolist())
        if ids and rng.random() < 0.2:
            controller.forget(ids[0])
    return decided


outcomes = st.lists(
    st.tuples(st.sampled_from(IDS), st.integers(1, K), st.integers(0, K), st.integers(0, 2)), max_size=8
)
# Times as no engine has them are among these: clocks jump, and machines sleep.
times = st.floats(allow_nan=True, allow_infinity=True) | st.floats(1.0, 1e4)
steps = st.tuples(outcomes, times, st.booleans(), st.integers(0, 10**7), st.integers(0, 10**6), st.booleans())


@settings(max_examples=40)
@given(run=st.lists(steps, max_size=30), repeats=st.integers(1, 10))
def test_no_run_of_steps_leads_to_a_state_that_is_not_sound(
    any_controller: CompiledController, run: list[Any], repeats: int
) -> None:
    any_controller.restart()
    for seen, ms, teaches, context, prefill, uneven in run * repeats:
        of_each = {request_id: (drafted, min(accepted, drafted), mode) for request_id, drafted, accepted, mode in seen}
        columns = DraftOutcomes([*of_each], *map(list, zip(*of_each.values(), strict=True)))
        drafting = max(columns.drafted, default=0)
        step = StepMeasures(len(of_each) + sum(columns.drafted), len(of_each), drafting, context, prefill, uneven)
        any_controller.observe(step=step, ms=ms, teaches=teaches, outcomes=columns)
        any_controller.decide([*of_each], columns.modes or [], context)
    any_controller.settle()


DEFAULT_FAULTS: dict[str, tuple[Callable[[Any], Any], float, str]] = {
    "cost parameter": (lambda state: jax.tree.leaves(state.cost.belief.model)[0], np.nan, "cost"),
    "cost parameter without a logarithm": (lambda state: jax.tree.leaves(state.cost.belief.model)[0], -1.0, "cost"),
    "cost covariance": (lambda state: state.cost.belief.covariance[0, 1:2], np.inf, "cost"),
    "cost variance negative": (lambda state: state.cost.belief.covariance[1, 1:2], -1e3, "cost"),
    "cost error": (lambda state: state.cost.error, np.nan, "cost"),
    "cost error negative": (lambda state: state.cost.error, -0.1, "cost"),
    "cost count": (lambda state: state.cost.taught, -5.0, "cost"),
    "cost noise": (lambda state: state.cost.memory.noise, np.nan, "cost"),
    "cost drift": (lambda state: state.cost.memory.drift, -1.0, "cost"),
    "cost surprises": (lambda state: state.cost.memory.run, -1.0, "cost"),
    "pool mean": (lambda state: state.pools.mean[1, :1], np.nan, "acceptance"),
    "pool covariance": (lambda state: state.pools.covariance[2, 0, 1:2], -np.inf, "acceptance"),
    "pool variance negative": (lambda state: state.pools.covariance[0, 3, 3:], -1e3, "acceptance"),
    "pool steps": (lambda state: state.pools.steps[:1], -9.0, "acceptance"),
    "pool surprise": (lambda state: state.pools.surprise[:1], np.nan, "acceptance"),
    "arm": (lambda state: state.choice.arm, 4.0, "choice"),
    "arm negative": (lambda state: state.choice.arm, -2.0, "choice"),
    "losses": (lambda state: state.choice.work[2:3], np.nan, "choice"),
    "losses negative": (lambda state: state.choice.work[2:3], -1.0, "choice"),
    "look": (lambda state: state.choice.look, 40.0, "choice"),
}
REFERENCE_FAULTS: dict[str, tuple[Callable[[Any], Any], float, str]] = {
    "cost parameter": (lambda state: jax.tree.leaves(state.cost.belief.model)[1], np.nan, "cost"),
    "cost variance negative": (lambda state: state.cost.belief.covariance[0, :1], -1.0, "cost"),
    "cost certain": (lambda state: state.cost.belief.covariance[0, :1], 0.0, "cost"),
    "rate": (lambda state: state.pools[0, 1:2], np.nan, "acceptance"),
    "rate above 1": (lambda state: state.pools[1, 1:2], 1.01, "acceptance"),
    "rate below 0": (lambda state: state.pools[2, 3:], -0.01, "acceptance"),
    "k no level": (lambda state: state.choice, 3.0, "choice"),
    "k far": (lambda state: state.choice, 2.0**40, "choice"),
}


def told(controller: CompiledController, fault: tuple[Callable[[Any], Any], float, str]) -> None:
    """Puts the fault into the state, and checks that the next call tells its part and that a restart mends it."""
    place, value, part = fault
    controller.restart()
    first = serve(controller, 30)
    place(controller.settle())[...] = value
    with pytest.raises(UnsoundStateError, match=f"not sound in {part}: ") as caught:
        # Nothing scheduled and nothing come: what is wrong stays where it is.
        controller.decide([], [])
    assert part in caught.value.parts
    with pytest.raises(UnsoundStateError):
        controller.decide([], [])
    controller.restart()
    assert controller.taught == 0
    assert serve(controller, 30) == first


@pytest.mark.parametrize("fault", DEFAULT_FAULTS.values(), ids=DEFAULT_FAULTS.keys())
def test_the_default_tells_which_part_is_not_sound(
    of_default: CompiledController, fault: tuple[Callable[[Any], Any], float, str]
) -> None:
    told(of_default, fault)


@pytest.mark.parametrize("fault", REFERENCE_FAULTS.values(), ids=REFERENCE_FAULTS.keys())
def test_the_reference_tells_which_part_is_not_sound(
    of_reference: CompiledController, fault: tuple[Callable[[Any], Any], float, str]
) -> None:
    told(of_reference, fault)


def test_parts_that_are_not_sound_are_all_named(of_default: CompiledController) -> None:
    of_default.restart()
    state: Any = of_default.settle()
    state.cost.error[...] = np.nan
    state.choice.look[...] = 99.0
    with pytest.raises(UnsoundStateError) as caught:
        of_default.decide([], [])
    assert caught.value.parts == ("cost", "choice")
    of_default.restart()


@pytest.mark.parametrize("value", [np.nan, -1.0, 2.0])
def test_a_requests_own_rates_are_judged_once_they_are_read(of_reference: CompiledController, value: float) -> None:
    controller = of_reference
    controller.restart()
    first = serve(controller, 5)
    # The first time that the mode is used its rates are made.
    controller.decide(["r0"], [CODE])
    controller.request_state("r0")[CODE, 0] = value
    controller.decide(["r1"], [CODE])
    with pytest.raises(UnsoundStateError) as caught:
        controller.decide(["r0"], [CODE])
    assert caught.value.parts == ("acceptance",)
    controller.restart()
    assert not controller.knows("r0")
    assert serve(controller, 5) == first


def test_after_a_restart_nothing_of_a_request_that_was_not_sound_is_left(of_reference: CompiledController) -> None:
    controller = of_reference
    controller.restart()
    columns = DraftOutcomes(IDS, [K] * MOST, [1] * MOST, [0] * MOST)
    controller.observe(step=StepMeasures((K + 1) * MOST, MOST, K), ms=30.0, teaches=True, outcomes=columns)
    controller.request_state(IDS[-1])[0, 0] = np.nan
    with pytest.raises(UnsoundStateError):
        controller.decide(IDS, [0] * MOST)
    controller.restart()
    # As many rows are computed, of which these requests fill two.
    controller.observe(
        step=StepMeasures(6, 2, 2), ms=30.0, teaches=True, outcomes=DraftOutcomes(IDS[:2], [2, 2], [1, 1], [0, 0])
    )
    controller.decide(IDS[:2], [0, 0])


def test_numbers_of_a_mode_that_was_never_used_mean_nothing(of_reference: CompiledController) -> None:
    controller = of_reference
    controller.restart()
    controller.observe(step=StepMeasures(5, 1, 4), ms=30.0, teaches=True, outcomes=DraftOutcomes(["r0"], [4], [2], [0]))
    controller.request_state("r0")[CODE, 0] = np.nan
    controller.decide(["r0"], [0])
    controller.restart()


def test_a_restarted_controller_is_as_a_new_one(any_controller: CompiledController) -> None:
    controller = any_controller
    serve(controller, 40, seed=1)
    controller.observe(
        step=StepMeasures(2, 1, 1), ms=30.0, teaches=True, outcomes=DraftOutcomes(["last"], [1], [1], [0])
    )
    controller.restart()
    assert not controller._slots
    assert sorted(controller._free) == list(range(len(controller._rows)))
    first = serve(controller, 40)
    state = jax.tree.map(np.copy, controller.settle())
    serve(controller, 40, seed=2)
    controller.restart()
    assert serve(controller, 40) == first
    jax.tree.map(np.testing.assert_array_equal, controller.settle(), state)


@pytest.mark.parametrize("variance", [0.0, -1e-5])
def test_a_start_from_which_nothing_can_be_learned_is_refused(variance: float) -> None:
    covariance = np.diag([1.0, 0.01, 0.01, 0.01])
    rules = reference_controller(draft_limit=K, levels=(1, 2))
    CompiledController(rules, COST, 1, covariance)
    covariance[1, 1] = variance
    with pytest.raises(ValueError, match=r"learning cannot start from this cost model and covariance: .* in cost: "):
        CompiledController(rules, COST, 1, covariance)


def test_a_cost_that_is_not_finite_is_refused() -> None:
    rules = reference_controller(draft_limit=K, levels=(1, 2))
    with pytest.raises(ValueError, match=r"learning cannot start from this .* not sound in cost"):
        CompiledController(rules, reference_cost(np.nan, 0.635, 0.542, experts=64, top_k=4), 1)


def test_what_is_sound_has_no_part_that_is_not() -> None:
    yes, no = np.bool_(True), np.bool_(False)
    assert Soundness(yes, yes, yes).unsound == ()
    assert Soundness(no, yes, no).unsound == ("cost", "choice")
