"""The two controllers that serving offers: what they are made of, whose text teaches what, and a run of each."""

from typing import Any

import jax
import numpy as np
import pytest

from akjax import (
    Controller,
    FixedCost,
    InnovationGate,
    LogitFilter,
    RatioGate,
    StepFeatures,
    default_controller,
    reference_controller,
)
from akjax.acceptance import RunningRates
from akjax.controller import CODE, TOOL, USUAL, Batch, CodeMode, ControllerState, Observations, Outcome, RequestRows
from akjax.cost import serving_cost
from akjax.policy import Decision, ReferencePolicy, SteadyPolicy

K, ROWS, LEVELS = 4, 4, (0, 1, 2, 4)
step = jax.jit(Controller.step)
COST = serving_cost(20.0, 0.5, 0.5, lengths=LEVELS, experts=64, top_k=4)
MODES: list[CodeMode] = ["gated", "1", "0"]


def features(tokens: float, requests: float, drafting: float) -> StepFeatures:
    return StepFeatures(*(np.float64(value) for value in (tokens, requests, drafting, 1000.0, 0.0, 0.0)))


def outcome(of: StepFeatures, ms: float, seen: list[tuple[int, int, int, int]]) -> Outcome:
    """`seen` are row, drafted, accepted and mode of each request; the rest is padding."""
    padding = [(ROWS, 1, 0, 0)] * (3 - len(seen))
    columns = np.asarray([*seen, *padding], np.int32).T
    return Outcome(of, np.float64(ms), np.bool_(True), Observations(*columns))


def batch(rows: list[int], modes: list[int]) -> Batch:
    rows, modes = [*rows, *[ROWS] * (3 - len(rows))], [*modes, *[0] * (3 - len(modes))]
    return Batch(np.asarray(rows, np.int32), np.asarray(modes, np.int32), np.float64(1000))


def started(controller: Controller) -> tuple[ControllerState, RequestRows]:
    state = controller.init(COST)
    return state, controller.init_rows(state, ROWS)


def test_the_default_is_the_logit_filter_the_innovation_gate_and_the_steady_policy() -> None:
    controller = default_controller(draft_limit=K, levels=LEVELS, per_request=True)
    assert isinstance(controller.acceptance, LogitFilter)
    assert isinstance(controller.learner, InnovationGate)
    assert isinstance(controller.policy, SteadyPolicy)
    assert controller.policy.levels == LEVELS
    assert controller.policy.per_request
    assert controller.code_mode == "1"
    assert isinstance(default_controller(draft_limit=K, levels=LEVELS, learns_cost=False).learner, FixedCost)


def test_the_reference_is_running_rates_the_ratio_gate_and_the_margin() -> None:
    controller = reference_controller(draft_limit=K, levels=(1, 2, 4), margin=0.1)
    assert isinstance(controller.acceptance, RunningRates)
    assert isinstance(controller.learner, RatioGate)
    assert isinstance(controller.policy, ReferencePolicy)
    assert controller.policy.margin == 0.1
    assert controller.code_mode == "gated"
    assert controller.uses_modes
    assert not controller.usual_is_prose
    assert not reference_controller(draft_limit=K, levels=(1, 2), per_request=True).uses_modes
    assert isinstance(reference_controller(draft_limit=K, levels=(1, 2), learns_cost=False).learner, FixedCost)


@pytest.mark.parametrize("code_mode", MODES)
def test_the_usual_rates_are_proses_alone_only_where_each_mode_has_its_own(code_mode: CodeMode) -> None:
    controller = default_controller(draft_limit=K, levels=LEVELS, code_mode=code_mode)
    assert controller.usual_is_prose == (code_mode == "1")
    assert controller.modes == (1 if code_mode == "0" else 3)


@pytest.mark.parametrize("code_mode", MODES)
@pytest.mark.parametrize("mode", [USUAL, CODE, TOOL])
def test_text_teaches_its_own_mode_and_the_usual_rates_where_they_are_everyones(code_mode: CodeMode, mode: int) -> None:
    controller = default_controller(draft_limit=K, levels=LEVELS, code_mode=code_mode)
    state, rows = started(controller)
    after, _, _ = step(controller, state, rows, outcome(features(5, 1, 4), 30.0, [(0, 4, 4, mode)]), batch([], []))
    before, means = np.asarray(state.pools.mean), np.asarray(after.pools.mean)
    for pool in range(controller.modes):
        taught = pool == mode or (pool == USUAL and code_mode != "1")
        if taught:
            assert np.all(means[pool] > before[pool])
        else:
            np.testing.assert_array_equal(means[pool], before[pool])
        assert float(after.pools.untested[pool]) == (0 if taught else 1)


@pytest.mark.parametrize(
    ("code_mode", "of_code", "of_prose"), [("0", USUAL, USUAL), ("gated", USUAL, USUAL), ("1", CODE, USUAL)]
)
def test_a_mixed_batch_is_judged_by_the_usual_rates_unless_each_request_has_its_modes(
    code_mode: CodeMode, of_code: int, of_prose: int
) -> None:
    controller = default_controller(draft_limit=K, levels=LEVELS, code_mode=code_mode)
    state, rows = started(controller)
    idle = outcome(features(0, 0, 0), 0.0, [])
    _, rows, _ = step(controller, state, rows, idle, batch([2, 0], [CODE, USUAL]))
    made = np.asarray(rows.made)
    # The rates that a request was judged by are those that it has a state of from then on.
    for row, used in ((2, of_code), (0, of_prose)):
        assert np.flatnonzero(made[row]).tolist() == [used]
    assert not made[[1, 3]].any()


def test_a_batch_of_code_alone_is_judged_as_code_when_gated() -> None:
    controller = default_controller(draft_limit=K, levels=LEVELS, code_mode="gated")
    state, rows = started(controller)
    idle = outcome(features(0, 0, 0), 0.0, [])
    _, rows, _ = step(controller, state, rows, idle, batch([2, 0], [CODE, CODE]))
    assert np.asarray(rows.made)[[2, 0]].tolist() == [[False, True, False]] * 2


def scripted(controller: Controller, rates: tuple[float, ...], steps: int) -> tuple[ControllerState, list[int], Any]:
    """Three requests of prose, code and tool calls, each step costing what the model starts from at twice the speed."""
    rng = np.random.default_rng(5)
    state, rows = started(controller)
    lengths: list[int] = []
    length = K
    each = np.full(3, K)
    for _ in range(steps):
        tokens = float(3 + each.sum())
        of = features(tokens, 3.0, float(length))
        ms = 0.5 * float(COST(of)) * float(np.exp(rng.normal(0, 0.03)))
        hits = [int(np.cumprod(rng.random(K) < rate)[:k].sum()) for rate, k in zip(rates, each, strict=True)]
        seen = [(row, int(k), hit, row) for row, (k, hit) in enumerate(zip(each, hits, strict=True)) if k]
        state, rows, decision = step(controller, state, rows, outcome(of, ms, seen), batch([0, 1, 2], [0, 1, 2]))
        checked(state, rows, decision)
        length = int(decision.draft_length)
        each = np.full(3, length) if decision.per_request is None else np.asarray(decision.per_request)
        lengths.append(length)
    return state, lengths, rows


def checked(state: ControllerState, rows: RequestRows, decision: Decision) -> None:
    for leaf in jax.tree.leaves((state, rows, decision)):
        assert np.all(np.isfinite(np.asarray(leaf, np.float64)))
    for covariance in np.asarray(state.pools.covariance):
        assert np.linalg.eigvalsh(covariance)[0] > 0
    assert np.linalg.eigvalsh(np.asarray(state.cost.belief.covariance))[0] > -1e-12


@pytest.mark.parametrize("code_mode", MODES)
def test_a_run_of_three_requests_stays_within_the_levels_and_learns_the_speed(code_mode: CodeMode) -> None:
    controller = default_controller(draft_limit=K, levels=LEVELS, code_mode=code_mode)
    state, lengths, rows = scripted(controller, (0.8, 0.85, 0.9), 150)
    assert set(lengths) <= set(LEVELS)
    assert lengths[-1] > 0
    of = features(3.0 * (1 + lengths[-1]), 3.0, float(lengths[-1]))
    assert float(state.cost.belief.model(of)) == pytest.approx(0.5 * float(COST(of)), rel=0.03)
    assert int(state.cost.taught) > 100
    if code_mode == "1":
        assert np.asarray(rows.made)[:3].tolist() == np.eye(3, dtype=bool).tolist()


def test_a_run_of_worthless_drafts_ends_without_any() -> None:
    state, lengths, _ = scripted(default_controller(draft_limit=K, levels=LEVELS), (0.03, 0.03, 0.03), 150)
    assert set(lengths) <= set(LEVELS)
    # Looks bring drafts back now and then.
    assert np.mean(np.asarray(lengths[50:]) == 0) > 0.8
    assert np.all(np.asarray(state.pools.mean) < 0)


def test_lengths_of_their_own_are_the_batchs_level_or_at_most_the_draft_limit() -> None:
    controller = default_controller(draft_limit=K, levels=LEVELS, per_request=True)
    state, rows = started(controller)
    idle = outcome(features(0, 0, 0), 0.0, [])
    _, _, decision = step(controller, state, rows, idle, batch([0, 1, 2], [0, 1, 2]))
    each = np.asarray(decision.per_request)
    assert np.all((each >= 0) & (each <= K))
    assert int(decision.draft_length) == each.max()


@pytest.mark.parametrize("levels", [(0, K + 1), (), (2, 1), (1, 1), (-1, 2)])
def test_levels_that_no_step_could_have_are_refused(levels: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="levels must be"):
        default_controller(draft_limit=K, levels=levels)


def test_the_reference_always_drafts() -> None:
    with pytest.raises(ValueError, match="at least 1, given"):
        reference_controller(draft_limit=K, levels=(0, 1))
