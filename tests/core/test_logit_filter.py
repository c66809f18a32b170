"""The logit filter: against the exact posterior, and what it promises."""

import jax
import numpy as np
import pytest

from akjax import LogitFilter, StepFeatures, Verified
from akjax.acceptance import PoolLogits, RequestLead

K = 4
MODEL = LogitFilter()
# The positions share a deviation of 1 and have 0.4 each of their own.
FIRST = np.ones((K, K)) + 0.16 * np.eye(K)
observe = jax.jit(LogitFilter.observe_step)
forecast = jax.jit(LogitFilter.forecast)


def passed(requests: int) -> StepFeatures:
    return StepFeatures(np.float64(3 * requests), np.float64(requests))


def verified(
    drafted: list[int], accepted: list[int], counts: list[bool] | None = None, apart: list[bool] | None = None
) -> Verified:
    n = len(drafted)
    return Verified(
        drafted=np.asarray(drafted, np.int32),
        accepted=np.asarray(accepted, np.int32),
        counts=np.asarray([True] * n if counts is None else counts),
        fresh=np.zeros(n, bool),
        apart=np.asarray([False] * n if apart is None else apart),
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
    np.testing.assert_allclose(np.asarray(seen.afresh), 0.8 ** np.arange(1, K + 1), rtol=1e-12)
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
        np.array([1.0, 0.5, 0.2, 0.1]), np.diag([0.1, 0.2, 0.3, 0.4]), np.float64(0), *(np.float64(0),) * 4
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


def test_the_requests_leads_follow_the_oracle() -> None:
    rng = np.random.default_rng(4)
    pool, n = MODEL.init_pool(K), 5
    requests = leads([0.0] * n, [0.25] * n)
    lead, variance = np.zeros(n), np.full(n, 0.25)
    stay = np.exp(-2 / 30)
    for _ in range(60):
        drafted = rng.integers(1, K + 1, n)
        accepted = np.minimum((np.cumprod(rng.random((n, K)) < 0.75, axis=1)).sum(1), drafted)
        counts, fresh = rng.random(n) < 0.8, rng.random(n) < 0.1
        # The oracle takes the pool before the step, drifted; the leads do not change what is compared of it.
        covariance = np.exp(-2 / 3000) * np.asarray(pool.covariance) + (1 - np.exp(-2 / 3000)) * FIRST
        mean, jumps = np.asarray(pool.mean), float(pool.jumps)
        pool, requests = observe(
            MODEL,
            pool,
            requests,
            Verified(drafted.astype(np.int32), accepted.astype(np.int32), counts, fresh, np.zeros(n, bool)),
            passed(n),
        )
        covariance = covariance + 4.0 * (float(pool.jumps) - jumps)
        for i in np.flatnonzero(counts):
            before = 0.0 if fresh[i] else np.sqrt(stay) * lead[i]
            spread = 0.25 if fresh[i] else stay * variance[i] + (1 - stay) * 0.25
            tested = min(accepted[i] + 1, drafted[i])
            chance = sigmoid(mean[:tested] + before)
            information = chance * (1 - chance)
            score = accepted[i] - chance.sum()
            doubt = information @ np.diag(covariance)[:tested] / information.sum()
            # A trial of the sum of the lead and a pool's logit as unsure as `doubt`.
            left = 1 / (1 / spread + 1 / (1 / information.sum() + doubt))
            lead[i] = before + left * score / (1 + doubt * information.sum())
            variance[i] = left
        np.testing.assert_allclose(np.asarray(requests.mean), lead, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(np.asarray(requests.variance), variance, rtol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_one_trial_of_one_request_is_the_exact_update_of_two_gaussians(seed: int) -> None:
    rng = np.random.default_rng(seed)
    of_pool, of_lead, mean, lead = (
        rng.uniform(0.1, 1.1),
        rng.uniform(0.05, 0.25),
        rng.normal(0.5, 1),
        rng.normal(0, 0.3),
    )
    zero = np.float64(0)
    pool = PoolLogits(np.array([mean]), np.array([[of_pool]]), *(zero,) * 5)
    hit = int(rng.integers(2))
    after, request = observe(MODEL, pool, leads([lead], [of_lead]), verified([1], [hit]), passed(1))
    keep, stay = np.exp(-2 / 3000), np.exp(-2 / 30)
    prior = np.diag([keep * of_pool + (1 - keep) * 1.16, stay * of_lead + (1 - stay) * 0.25])
    lead = np.sqrt(stay) * lead
    chance = sigmoid(np.asarray(mean + lead))
    posterior = np.linalg.inv(np.linalg.inv(prior) + chance * (1 - chance) * np.ones((2, 2)))
    moved = np.array([mean, lead]) + posterior @ np.full(2, hit - chance)
    np.testing.assert_allclose([float(after.mean[0]), float(request.mean[0])], moved, rtol=1e-10)
    np.testing.assert_allclose(
        [float(after.covariance[0, 0]), float(request.variance[0])], np.diag(posterior), rtol=1e-10
    )


def test_surprises_to_one_side_add_up_and_widen_the_common_logit() -> None:
    # Two positions at logit 0, so sure of themselves that a step changes next to nothing; one request with next to no
    # lead, whose first draft is rejected: score -1/2 and information 1/4, so one deviation down each time. The sum
    # settles at 0.6 / (1 - 0.8) = 3 of them, below the limit; two such requests, sqrt(2) each, pass it with the 13th
    # step, 3 * sqrt(2) * (1 - 0.8**13) = 4.01.
    tight, zero = PoolLogits(np.zeros(2), 1e-9 * np.eye(2), *(np.float64(0),) * 5), np.float64(0)
    sure = LogitFilter(shared_spread=1e-9, own_spread=1e-9, lead_spread=1e-9)
    for requests, jumps_at in ((1, None), (2, 13)):
        pool, start, expected = tight, leads([0.0] * requests, [1e-18] * requests), 0.0
        for number in range(1, 41):
            pool, start = observe(sure, pool, start, verified([1] * requests, [0] * requests), passed(requests))
            expected = 0.8 * expected - 0.6 * np.sqrt(requests)
            if abs(expected) > 4:
                assert number == jumps_at
                assert float(pool.jumps) == 1
                assert float(pool.surprise) == zero
                # 2**2 on every entry before the trial, whose information of 1/2 then leaves 4 / (1 + 2).
                np.testing.assert_allclose(np.asarray(pool.covariance), 4 / 3, rtol=1e-6)
                break
            np.testing.assert_allclose(float(pool.surprise), expected, rtol=1e-5)
            assert float(pool.jumps) == 0
        else:
            assert jumps_at is None


def test_each_row_reads_the_pool_it_belongs_to() -> None:
    zero = np.zeros(2)
    pools = PoolLogits(
        np.array([[1.0] * K, [-1.0] * K]), np.tile(0.1 * np.eye(K), (2, 1, 1)), zero, np.array([0.0, 7.0]), *(zero,) * 3
    )
    both = forecast(MODEL, pools, leads([0.2, 0.2], [0.1, 0.1]), np.array([1, 0], np.int32), np.int32(1))
    for row, of in enumerate((1, 0)):
        alone = forecast(MODEL, pools, leads([0.2], [0.1]), np.array([of], np.int32), np.int32(1))
        np.testing.assert_allclose(np.asarray(both.survival[row]), np.asarray(alone.survival[0]), rtol=1e-12)
        np.testing.assert_allclose(float(both.changed[row]), -np.expm1(-7e-3) if of else 0.0, rtol=1e-12)


def test_a_request_apart_teaches_itself_while_there_are_others() -> None:
    pool, start = MODEL.init_pool(K), leads([0.1, -0.2], [0.25, 0.25])
    with_it, requests = observe(MODEL, pool, start, verified([K, K], [2, 0], apart=[False, True]), passed(2))
    without, only = observe(MODEL, pool, start, verified([K, K], [2, 0], counts=[True, False]), passed(2))
    for one, other in zip(jax.tree.leaves(with_it), jax.tree.leaves(without), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-12)
    as_others, same = observe(MODEL, pool, start, verified([K, K], [2, 0]), passed(2))
    np.testing.assert_array_equal(np.asarray(requests.mean), np.asarray(same.mean))
    assert float(requests.mean[1]) < float(only.mean[1])
    assert np.all(np.asarray(as_others.mean) < np.asarray(with_it.mean))


def test_where_nobody_else_is_for_long_a_request_apart_teaches_the_pool() -> None:
    pool, start = MODEL.init_pool(K), leads([0.0], [0.25])
    first = np.asarray(pool.mean)
    for number in range(31):
        assert float(pool.alone) == number
        assert float(pool.untested) == number
        np.testing.assert_array_equal(np.asarray(pool.mean), first)
        pool, start = observe(MODEL, pool, start, verified([K], [0], apart=[True]), passed(1))
    # The 31st, after 30 without anyone else.
    assert float(pool.mean[0]) < first[0]
    assert float(pool.untested) == 0
    taught, _ = observe(MODEL, pool, start, verified([K], [0], apart=[True]), passed(1))
    assert float(taught.mean[0]) < float(pool.mean[0])
    ended, start = observe(MODEL, taught, start, verified([K], [0]), passed(1))
    assert float(ended.alone) == 0
    again, _ = observe(MODEL, ended, start, verified([K], [0], apart=[True]), passed(1))
    np.testing.assert_array_equal(np.asarray(again.mean), np.asarray(ended.mean))


@pytest.mark.parametrize("length", [1, 3, 8])
def test_the_pools_covariance_stays_symmetric_and_positive_for_any_events(length: int) -> None:
    rng = np.random.default_rng(length)
    pool, requests = MODEL.init_pool(length), leads([0.0] * 3, [0.25] * 3)
    for _ in range(300):
        drafted = rng.integers(1, length + 1, 3)
        accepted = np.minimum(rng.integers(0, length + 1, 3), drafted)
        counts = rng.random(3) < 0.7
        pool, requests = observe(
            MODEL, pool, requests, verified(drafted.tolist(), accepted.tolist(), counts.tolist()), passed(3)
        )
        covariance = np.asarray(pool.covariance)
        np.testing.assert_allclose(covariance, covariance.T, rtol=1e-12, atol=1e-15)
        assert np.linalg.eigvalsh(covariance)[0] > 0
        assert np.all(np.asarray(requests.variance) > 0)


@pytest.mark.parametrize("requests", [4, 16])
@pytest.mark.parametrize(("first", "then"), [(1.0, 0.5), (0.98, 0.6), (0.0, 0.7)])
def test_an_abrupt_change_is_followed_without_overshooting(requests: int, first: float, then: float) -> None:
    rng = np.random.default_rng(3)
    pool, start = MODEL.init_pool(K), leads([0.0] * requests, [0.25] * requests)
    truth = np.log(then / (1 - then))
    for number in range(100):
        rate = first if number < 60 else then
        hits = np.cumprod(rng.random((requests, K)) < rate, axis=1).sum(axis=1)
        pool, start = observe(MODEL, pool, start, verified([K] * requests, hits.tolist()), passed(requests))
        assert np.all(np.abs(np.asarray(pool.mean)) < 8)
        if number >= 80:
            assert abs(float(pool.mean[0]) - truth) < 1
    assert float(pool.jumps) <= 3
