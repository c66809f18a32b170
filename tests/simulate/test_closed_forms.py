"""Runs whose outcome can be said beforehand."""

import jax.numpy as jnp
import numpy as np
import pytest
from simulate.worlds import COST, RATES, busy, steady

from akjax import Constant, PerToken, StepFeatures, predicted_ms
from akjax.simulate import (
    ClosedLoop,
    Drafter,
    FixedLength,
    LengthByBatch,
    Lengths,
    Oracle,
    Scenario,
    StepTimes,
    Text,
    Windows,
    simulate,
    steady_scores,
    tune_by_batch,
)

SEEDS = np.arange(4)
LENGTHS = FixedLength(np.arange(5))
SURVIVAL = np.cumprod(RATES[0])
# Of the mean accepted drafts, k = 0..4.
EXPECTED = np.concatenate([[0.0], np.cumsum(SURVIVAL)])
VARIANCE = np.concatenate([[0.0], np.cumsum((2 * np.arange(1, 5) - 1) * SURVIVAL)]) - EXPECTED**2


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_a_fixed_length_accepts_the_sum_of_survivals_and_yields_that_per_step_time(slots: int) -> None:
    steps = 2000
    result = simulate(steady(slots), LENGTHS, SEEDS, max_steps=steps, stacked_policies=True, traced=True)
    assert result.trace is not None
    # The first step has no drafts yet.
    record = result.trace.step
    tokens, ms, accepted = (np.asarray(x)[..., 1:] for x in (record.tokens, record.ms, record.accepted))
    count = len(SEEDS) * (steps - 1) * slots
    error = 4.0 * np.sqrt(VARIANCE / count) + 1e-12
    assert np.all(np.abs(accepted.sum((1, 2)) / count - EXPECTED) <= error)
    of_step = np.array([float(predicted_ms(COST, _verifying(slots, k))) for k in range(5)])
    np.testing.assert_allclose(ms, np.broadcast_to(of_step[:, None, None], ms.shape), rtol=1e-12)
    score = tokens.sum((1, 2)) / ms.sum((1, 2))
    assert np.all(np.abs(score - slots * (1 + EXPECTED) / of_step) <= slots * error / of_step)


def _verifying(slots: int, length: int) -> StepFeatures:
    return StepFeatures(tokens=np.float64(slots * (1 + length)), requests=np.float64(slots))


@pytest.mark.parametrize("slots", [1, 5])
def test_no_drafts_yield_one_token_a_request_and_step_exactly(slots: int) -> None:
    result = simulate(steady(slots, work_tokens=100.0 * slots), FixedLength(0), SEEDS, max_steps=200)
    assert result.finished.all()
    assert np.all(result.steps == 100)
    np.testing.assert_allclose(result.tokens_per_ms, slots / (20.0 + 0.9 * slots), rtol=1e-12)
    np.testing.assert_allclose(result.tokens_per_request_ms, 1 / (20.0 + 0.9 * slots), rtol=1e-12)


def test_noise_leaves_the_mean_time_and_spikes_and_drift_scale_it() -> None:
    times = StepTimes(COST, noise=0.2, spike_chance=0.1, spike_factor=4.0, drift=1.5)
    result = simulate(steady(1, 5000.0, times=times), FixedLength(0), np.arange(8), max_steps=6000)
    assert result.finished.all()
    mean = result.ms.sum() / result.steps.sum()
    np.testing.assert_allclose(mean, 20.9 * (1 + 0.1 * 3.0) * 1.25, rtol=0.02)


def test_windows_hold_from_start_to_end_of_the_work() -> None:
    windows = Windows(start=[0.25], end=[0.5], acceptance=[0.0], time=[3.0])
    scenario = steady(1, 2000.0, windows=windows)
    trace = simulate(scenario, FixedLength(4), SEEDS[:1], max_steps=2000, traced=True).trace
    assert trace is not None
    record = trace.step
    real = np.asarray(trace.real)[0]
    tokens, accepted, ms = (np.asarray(x)[0][real] for x in (record.tokens, record.accepted, record.ms))
    progress = (np.cumsum(tokens) - tokens) / 2000.0
    inside = (progress >= 0.25) & (progress < 0.5)
    assert inside.sum() == 500
    assert not accepted[inside].any()
    assert accepted[~inside].mean() > 1.0
    np.testing.assert_allclose(ms[inside][1:], 3 * 24.5, rtol=1e-12)
    np.testing.assert_allclose(ms[~inside][1:], 24.5, rtol=1e-12)


def test_phases_divide_the_work_and_hovering_takes_each_number_of_slots() -> None:
    traffic = ClosedLoop([[1, 2], [4, 4]], Lengths(0.0), Lengths(1e8))
    trace = simulate(steady(4, 3000.0, traffic=traffic), FixedLength(0), SEEDS[:1], max_steps=2000, traced=True).trace
    assert trace is not None
    real = np.asarray(trace.real)[0]
    requests, tokens = (np.asarray(x)[0][real] for x in (trace.step.requests, trace.step.tokens))
    early = np.cumsum(tokens) - tokens < 1500
    assert set(requests[early]) == {1, 2}
    assert abs((requests[early] == 1).mean() - 0.5) < 0.1
    assert set(requests[~early]) == {4}


def test_a_prompt_is_taken_in_by_chunks_and_its_last_yields_the_first_token() -> None:
    traffic = ClosedLoop([[2]], Lengths(500.0), Lengths(1e8))
    times = StepTimes(Constant(10.0) + PerToken(1.0))
    scenario = steady(2, traffic=traffic, times=times, prompt_chunk=300)
    trace = simulate(scenario, FixedLength(2), SEEDS[:1], max_steps=6, traced=True).trace
    assert trace is not None
    record = trace.step
    # Prompt tokens by step and slot: 300+0, 200+100, 0+300, 0+100.
    assert np.asarray(record.requests)[0].tolist() == [1, 2, 2, 2, 2, 2]
    assert np.asarray(record.drafted)[0].tolist() == [0, 0, 2, 2, 4, 4]
    assert np.asarray(record.tokens)[0, :2].tolist() == [0, 1]
    np.testing.assert_allclose(np.asarray(record.ms)[0], [11, 12, 14, 14, 16, 16], rtol=1e-12)


def test_text_turns_by_the_token() -> None:
    text = Text(RATES, switching=np.array([[0.0, 0.02, 0.06], [0.1, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    n = 100_000
    uniform = (jnp.arange(n, dtype=jnp.float32) + 0.5) / n
    leaves = 1 - 0.92**5
    after = np.asarray(text.next_kind(jnp.zeros(n, jnp.int32), jnp.full(n, 5, jnp.int32), uniform))
    np.testing.assert_allclose(np.bincount(after) / n, [1 - leaves, leaves / 4, leaves * 3 / 4], atol=1e-4)
    after = np.asarray(text.next_kind(jnp.full(n, 1, jnp.int32), jnp.ones(n, jnp.int32), uniform))
    np.testing.assert_allclose(np.bincount(after) / n, [0.1, 0.9], atol=1e-4)
    after = np.asarray(text.next_kind(jnp.full(n, 2, jnp.int32), jnp.full(n, 9, jnp.int32), uniform))
    assert np.all(after == 2)


def test_effects_add_to_the_logit() -> None:
    text = Text(RATES, context_slope=-0.5)
    rates = text.conditional_rates(
        jnp.array([2], jnp.int32), jnp.array([0.3], jnp.float32), jnp.array([3000], jnp.int32), jnp.float32(0.5)
    )
    logit = np.log(RATES[2] / (1 - RATES[2])) + 0.3 - 1.5
    np.testing.assert_allclose(np.asarray(rates)[0], 0.5 / (1 + np.exp(-logit)), rtol=1e-5)


def test_staleness_follows_an_undrafted_step_and_fades() -> None:
    drafter = Drafter(stale_logit=-2.0, stale_keep=0.5)
    stale = drafter.staleness(jnp.zeros(2, jnp.float32), jnp.array([0, 3], jnp.int32))
    assert np.asarray(stale).tolist() == [-2.0, 0.0]
    assert np.asarray(drafter.staleness(stale, jnp.array([1, 0], jnp.int32))).tolist() == [-1.0, -2.0]


def test_an_uneven_drafter_makes_lists_of_its_own_length() -> None:
    scenario = steady(4, drafter=Drafter(uneven_drafts=True, list_keep=0.7))
    steps = 3000
    result = simulate(scenario, FixedLength(4), SEEDS, max_steps=steps)
    count = len(SEEDS) * 4 * (steps - 1)
    reach = 0.7 ** np.arange(1, 5)
    np.testing.assert_allclose(np.asarray(result.totals.drafted).sum() / count, reach.sum(), rtol=0.02)
    np.testing.assert_allclose(np.asarray(result.totals.accepted).sum() / count, (reach * SURVIVAL).sum(), rtol=0.02)


def _best(slots: int) -> int:
    of_step = np.array([20.0 + 0.9 * slots * (1 + k) for k in range(5)])
    return int(np.argmax((1 + EXPECTED) / of_step))


@pytest.mark.parametrize("slots", [1, 8, 32])
def test_the_oracle_takes_the_best_length_where_nothing_varies(slots: int) -> None:
    result = simulate(steady(slots), Oracle((0, 1, 2, 3, 4)), SEEDS[:1], max_steps=50)
    assert np.asarray(result.totals.length_counts)[0, _best(slots)] == 50


def test_the_oracle_beats_every_fixed_length_where_text_turns() -> None:
    traffic = ClosedLoop([[1]], Lengths(50.0), Lengths(300.0))
    scenario = busy(1, 20_000.0, times=StepTimes(Constant(10.0) + PerToken(3.0)), traffic=traffic)
    fixed = simulate(scenario, LENGTHS, SEEDS, max_steps=20_000, stacked_policies=True)
    oracle = simulate(scenario, Oracle((0, 1, 2, 3, 4)), SEEDS, max_steps=20_000)
    assert fixed.finished.all()
    assert oracle.finished.all()
    assert oracle.tokens_per_ms.mean() > 1.01 * fixed.tokens_per_ms.mean(1).max()


def test_the_tuned_list_has_the_best_length_at_each_size() -> None:
    scenario = steady(32, 20_000.0)
    policy = tune_by_batch(scenario, (0, 1, 2, 3, 4), (1, 8, 32), SEEDS, max_steps=20_000)
    assert np.asarray(policy.table)[[1, 8, 32]].tolist() == [_best(1), _best(8), _best(32)]
    assert np.asarray(policy.table)[[0, 7, 31]].tolist() == [_best(1), _best(1), _best(8)]
    scores = steady_scores(scenario, (0, 1, 2, 3, 4), (8,), SEEDS, max_steps=20_000)
    np.testing.assert_allclose(scores[0], 8 * (1 + EXPECTED) / (20.0 + 7.2 * np.arange(1, 6)), rtol=0.02)


def test_a_list_goes_by_the_requests_of_the_step() -> None:
    traffic = ClosedLoop([[1], [3]], Lengths(0.0), Lengths(1e8))
    scenario: Scenario = steady(3, 1000.0, traffic=traffic)
    trace = simulate(scenario, LengthByBatch([0, 4, 0, 2]), SEEDS[:1], max_steps=1000, traced=True).trace
    assert trace is not None
    real = np.asarray(trace.real)[0]
    requests, chosen = np.asarray(trace.step.requests)[0][real], np.asarray(trace.draft_length)[0][real]
    assert np.all(chosen == np.where(requests == 1, 4, 2))
    assert set(requests) == {1, 3}
