"""The logit filter: against the exact posterior, and what it promises."""

import jax
import numpy as np
import pytest

from akjax import LogitFilter, StepFeatures, Verified
from akjax.acceptance import PoolLogits, RequestLead

K = 4
MODEL = LogitFilter()
observe = jax.jit(LogitFilter.observe_step)
forecast = jax.jit(LogitFilter.forecast)


def passed(requests: int) -> StepFeatures:
    return StepFeatures(np.float64(3 * requests), np.float64(requests))


def verified(drafted: list[int], accepted: list[int], counts: list[bool] | None = None) -> Verified:
    n = len(drafted)
    return Verified(
        drafted=np.asarray(drafted, np.int32),
        accepted=np.asarray(accepted, np.int32),
        counts=np.asarray([True] * n if counts is None else counts),
        fresh=np.zeros(n, bool),
    )


def leads(mean: list[float], variance: list[float]) -> RequestLead:
    return RequestLead(np.asarray(mean, np.float64), np.asarray(variance, np.float64))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def test_the_pool_learns_what_the_exact_posterior_says() -> None:
    rng = np.random.default_rng(0)
    pool = MODEL.init_pool(K)
    first = np.full((K, K), 1.0) + 0.16 * np.eye(K)
    mean, covariance = np.full(K, np.log(4.0)), first
    np.testing.assert_allclose(np.asarray(pool.covariance), first, rtol=1e-12)
    for _ in range(40):
        drafted = rng.integers(1, K + 1, 3)
        accepted = np.minimum(rng.integers(0, K + 1, 3), drafted)
        before = leads(rng.normal(0, 0.3, 3).tolist(), [0.1, 0.2, 0.25])
        keep, stay = np.exp(-2 / 3000), np.exp(-2 / 30)
        covariance = keep * covariance + (1 - keep) * first
        variance = stay * np.asarray(before.variance) + (1 - stay) * 0.25
        lead = np.sqrt(stay) * np.asarray(before.mean)
        position = np.arange(K)
        tested = position <= np.minimum(accepted, drafted - 1)[:, None]
        hit = position < accepted[:, None]
        chance = sigmoid(mean + lead[:, None])
        information = np.where(tested, chance * (1 - chance), 0.0)
        score = np.where(tested, hit - chance, 0.0)
        weight = 1 / (1 + variance * information.sum(1))
        jumped = float(pool.jumps)
        pool, _ = observe(MODEL, pool, before, verified(drafted.tolist(), accepted.tolist()), passed(3))
        covariance = covariance + 4.0 * (float(pool.jumps) - jumped)
        precision = np.linalg.inv(covariance) + np.diag(weight @ information)
        covariance = np.linalg.inv(precision)
        mean = mean + covariance @ (weight @ score)
        np.testing.assert_allclose(np.asarray(pool.covariance), covariance, rtol=1e-8, atol=1e-12)
        np.testing.assert_allclose(np.asarray(pool.mean), mean, rtol=1e-8)


def test_one_request_shares_a_single_trial_between_pool_and_lead_as_two_gaussians_would() -> None:
    pool = MODEL.init_pool(1)
    start = leads([0.0], [0.25])
    after_pool, after = observe(MODEL, pool, start, verified([1], [0]), passed(1))
    # Prior variances: 1.16 of the pool's logit and 0.25 of the lead, both at their stationary values. One rejection
    # at p = 0.8 has score -0.8 and information 0.16.
    information, score, total = 0.16, -0.8, 1.16 + 0.25
    shift = score / (1 + information * total)
    np.testing.assert_allclose(float(after_pool.mean[0]), np.log(4.0) + 1.16 * shift, rtol=1e-12)
    np.testing.assert_allclose(float(after.mean[0]), 0.25 * shift, rtol=1e-12)
    np.testing.assert_allclose(float(after.variance[0]), 0.25 - 0.25**2 * information / (1 + information * total))


def test_no_output_changes_nothing_and_padding_counts_for_nothing() -> None:
    pool, start = MODEL.init_pool(K), leads([0.3, -0.1], [0.2, 0.1])
    none = StepFeatures(np.float64(0), np.float64(0))
    after_pool, after = observe(MODEL, pool, start, verified([2, 2], [1, 2], [False, False]), none)
    for new, old in zip(jax.tree.leaves((after_pool, after)), jax.tree.leaves((pool, start)), strict=True):
        np.testing.assert_array_equal(new, old)
    one, _ = observe(MODEL, pool, start, verified([2, 2], [1, 2], [True, False]), passed(1))
    alone, _ = observe(MODEL, pool, leads([0.3], [0.2]), verified([2], [1]), passed(1))
    for new, old in zip(jax.tree.leaves(one), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-12)


def test_steps_without_drafts_are_counted_until_a_draft_is_tested() -> None:
    pool, start = MODEL.init_pool(K), leads([0.0], [0.25])
    for _ in range(5):
        pool, start = observe(MODEL, pool, start, verified([1], [0], [False]), passed(1))
    assert float(pool.untested) == 5
    seen = forecast(MODEL, stacked(pool), start, np.zeros(1, np.int32), np.int32(0))
    np.testing.assert_allclose(float(seen.changed[0]), 1 - np.exp(-5 / (1000 + 5)), rtol=1e-12)
    np.testing.assert_allclose(np.asarray(seen.afresh[0]), 0.8 ** np.arange(1, K + 1), rtol=1e-12)
    pool, _ = observe(MODEL, pool, start, verified([1], [0]), passed(1))
    assert float(pool.untested) == 0


def test_a_collapse_is_noticed_and_believed_within_ten_steps() -> None:
    pool, start = MODEL.init_pool(K), leads([0.0] * 4, [0.25] * 4)
    for _ in range(100):
        pool, start = observe(MODEL, pool, start, verified([2] * 4, [2, 2, 1, 2]), passed(4))
    assert float(pool.jumps) == 0
    for _ in range(10):
        pool, start = observe(MODEL, pool, start, verified([2] * 4, [0] * 4), passed(4))
    assert float(pool.jumps) >= 1
    seen = forecast(MODEL, stacked(pool), start, np.zeros(4, np.int32), np.int32(2))
    assert np.all(np.asarray(seen.survival[:, 0]) < 0.15)


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
def test_the_belief_finds_the_true_rate(rate: float) -> None:
    rng = np.random.default_rng(1)
    pool, start = MODEL.init_pool(K), leads([0.0] * 8, [0.25] * 8)
    found = []
    for number in range(600):
        hits = np.cumprod(rng.random((8, K)) < rate, axis=1).sum(axis=1)
        pool, start = observe(MODEL, pool, start, verified([K] * 8, hits.tolist()), passed(8))
        if number >= 100:
            seen = forecast(MODEL, stacked(pool), start, np.zeros(8, np.int32), np.int32(K))
            found.append(np.asarray(seen.survival).mean(axis=0))
    np.testing.assert_allclose(np.mean(found, axis=0), rate ** np.arange(1, K + 1), atol=0.03)
    covariance = np.asarray(pool.covariance)
    np.testing.assert_allclose(covariance, covariance.T, atol=1e-12)
    assert np.linalg.eigvalsh(covariance)[0] > 0


def test_a_forecast_is_the_quadrature_of_the_belief_and_doubts_only_what_is_not_tested() -> None:
    pool = PoolLogits(
        np.array([1.0, 0.5, 0.2, 0.1]), np.diag([0.1, 0.2, 0.3, 0.4]), np.float64(0), *(np.float64(0),) * 3
    )
    lead = leads([0.4], [0.15])
    seen = forecast(MODEL, stacked(pool), lead, np.zeros(1, np.int32), np.int32(2))
    logits, own = np.asarray(pool.mean) + 0.4, np.array([0.1, 0.2, 0.3, 0.4])
    nodes = [np.cumprod(sigmoid(logits + z * np.sqrt(own + 0.15))) for z in (-np.sqrt(3), 0.0, np.sqrt(3))]
    np.testing.assert_allclose(np.asarray(seen.survival[0]), (nodes[0] + 4 * nodes[1] + nodes[2]) / 6, rtol=1e-12)
    hopeful = np.cumprod(sigmoid(logits + np.sqrt(3) * np.where(np.arange(K) >= 2, np.sqrt(own), 0.0)))
    np.testing.assert_allclose(np.asarray(seen.upside[0]), (hopeful - nodes[1]) / np.sqrt(3), rtol=1e-9, atol=1e-15)
    assert np.all(np.asarray(seen.upside[0, :2]) == 0)


def test_a_prior_that_is_no_chance_is_refused() -> None:
    with pytest.raises(ValueError, match=r"between 0 and 1, given 1\.0"):
        LogitFilter(prior=1.0)


def stacked(pool: PoolLogits) -> PoolLogits:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[None], pool)
