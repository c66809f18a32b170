"""The bank: its cases run, its costs are the published ones, and policies are told what they should be."""

import numpy as np
import pytest

from akjax import StepFeatures, default_controller, reference_controller
from akjax.cost import serving_cost
from akjax.simulate import Controlled, FixedLength, OpenLoop, simulate
from akjax.simulate.bank import DRAFT_LIMIT, GLM_FLASH, LEVELS, Case, bank, named

CASES = bank()

PUBLISHED = {
    "GLM-5.3-Flash": {2: 29.7, 3: 33.1, 4: 36.5, 5: 39.8, 6: 43.1, 7: 46.0, 8: 48.9},
    "Nemotron 30B-A3B, M5 Max": {1: 8.47, 2: 13.49, 3: 15.64, 5: 20.67, 8: 28.13},
    "GLM-4.5-Air": {1: 5.88, 2: 17.93, 3: 20.58, 4: 22.89, 6: 27.05, 8: 30.07},
    "speculation never pays": {1: 37.7, 2: 98.7, 8: 263.0},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_costs_are_the_published_ones(name: str) -> None:
    cost = GLM_FLASH if name == "GLM-5.3-Flash" else named(name, CASES).scenario.times.cost
    for tokens, ms in PUBLISHED[name].items():
        step = StepFeatures(*(np.float64(x) for x in (tokens, 1, tokens - 1)))
        assert float(cost(step)) == pytest.approx(ms, rel=0.02)


def test_names_are_distinct_and_an_unknown_one_is_told_which_there_are() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 25
    with pytest.raises(KeyError, match="one stream"):
        named("nothing of the kind", CASES)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_case_has_the_levels_and_a_start_that_can_be_learned_from(case: Case) -> None:

    assert case.scenario.draft_limit == DRAFT_LIMIT == LEVELS[-1]
    start = serving_cost(
        *case.prior, lengths=LEVELS, experts=case.experts, top_k=case.top_k, sizes=case.sizes, uneven=None
    )
    default_controller(draft_limit=DRAFT_LIMIT, levels=LEVELS).learner.init(start)
    assert case.is_open_loop == isinstance(case.scenario.traffic, OpenLoop)


def test_runs_end_with_their_work_and_the_default_is_near_the_best_fixed_length() -> None:
    case = named("one stream", CASES)
    seeds = np.arange(4)
    fixed = simulate(case.scenario, FixedLength(np.asarray(LEVELS)), seeds, max_steps=40_000, stacked_policies=True)
    controller = default_controller(draft_limit=DRAFT_LIMIT, levels=LEVELS)
    start = serving_cost(*case.prior, lengths=LEVELS, experts=case.experts, top_k=case.top_k)
    policy = Controlled(controller, start, counts_unobserved=True, prefill_teaches=True)
    default = simulate(case.scenario, policy, seeds, max_steps=40_000)
    assert fixed.finished.all()
    assert default.finished.all()
    assert default.tokens_per_ms.mean() > 0.98 * fixed.tokens_per_ms.mean(axis=1).max()


def test_the_reference_knows_no_length_of_none() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        reference_controller(draft_limit=DRAFT_LIMIT, levels=LEVELS)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_case_runs_at_a_fixed_length(case: Case) -> None:
    seeds, steps = np.arange(3), 60
    result = simulate(case.scenario, FixedLength(2), seeds, max_steps=steps)
    assert np.all(result.steps == steps)
    assert not result.finished.any()
    assert np.all(np.isfinite(result.ms))
    assert np.all(result.ms > 0)
    counts, busy = np.asarray(result.totals.length_counts), np.asarray(result.totals.busy_steps)
    np.testing.assert_array_equal(counts[:, 2], busy)
    assert np.all(counts.sum(axis=1) == busy)
    assert np.all(busy > 0)
    # Every request that decodes gets a token, and one more for each draft accepted.
    assert np.all(result.tokens >= np.asarray(result.totals.accepted))
    assert np.all(np.asarray(result.totals.accepted) <= np.asarray(result.totals.drafted))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_reference_and_the_default_can_start_in_every_case(case: Case) -> None:
    start = serving_cost(
        *case.prior, lengths=LEVELS, experts=case.experts, top_k=case.top_k, sizes=case.sizes, uneven=1.1
    )
    default = default_controller(draft_limit=DRAFT_LIMIT, levels=LEVELS, per_request=True)
    reference = reference_controller(draft_limit=DRAFT_LIMIT, levels=LEVELS[1:])
    for controller in (default, reference):
        state = controller.init(start)
        assert int(controller.draft_length(state)) == DRAFT_LIMIT
        for tokens in (1.0, 4.0, 9.0):
            step = StepFeatures(*(np.float64(x) for x in (tokens, 1.0, tokens - 1.0, 500.0, 0.0, 0.0)))
            assert 0 < float(state.cost.belief.model(step)) < 1e4
