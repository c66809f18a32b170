"""Acceptance: the recursion against the oracle, and what it promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

import oracle
from akjax import RunningRates, survival

DRAFT_LIMIT = 6
RATE = st.floats(0.01, 1.0)

observe = jax.jit(RunningRates.observe)


@st.composite
def outcomes(draw: st.DrawFn) -> tuple[str, int, int]:
    drafted = draw(st.integers(1, DRAFT_LIMIT))
    return draw(st.sampled_from("abc")), drafted, draw(st.integers(0, drafted))


@given(
    alpha=RATE, global_alpha=RATE, global_drift=RATE, prior=st.floats(0, 1), events=st.lists(outcomes(), max_size=40)
)
def test_any_sequence_follows_the_oracle(
    alpha: float, global_alpha: float, global_drift: float, prior: float, events: list[tuple[str, int, int]]
) -> None:
    expected = oracle.Acceptance(
        oracle.Settings(alpha=alpha, global_alpha=global_alpha, global_drift=global_drift, prior=prior), DRAFT_LIMIT
    )
    model = RunningRates(alpha, global_alpha, global_drift, prior)
    pool, requests = model.init_pool(DRAFT_LIMIT), {}
    for request, drafted, accepted in events:
        expected.observe(request, drafted, accepted)
        state = requests.get(request, model.init_request(pool))
        pool, requests[request] = observe(model, pool, state, np.int32(drafted), np.int32(accepted))
        np.testing.assert_allclose(pool, expected.g, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(requests[request], expected.of(request), rtol=1e-12, atol=1e-14)
        forecast = model.forecast(pool[None], requests[request][None], np.zeros(1, np.int32), np.int32(drafted))
        np.testing.assert_allclose(forecast.survival[0], expected.survivals(request), rtol=1e-12, atol=1e-14)
        assert np.all((np.asarray(pool) >= 0) & (np.asarray(pool) <= 1))
        assert np.all((np.asarray(requests[request]) >= 0) & (np.asarray(requests[request]) <= 1))


def test_a_rejection_leaves_deeper_positions_alone() -> None:
    model = RunningRates()
    pool = jnp.full(4, 0.8)
    pool_after, request_after = model.observe(pool, pool, jnp.int32(3), jnp.int32(1))
    np.testing.assert_allclose(request_after, [0.85, 0.6, 0.8, 0.8], rtol=1e-12)
    np.testing.assert_allclose(pool_after, [0.81, 0.76, 0.8, 0.8], rtol=1e-12)


def test_full_acceptance_lends_the_lead_to_untested_positions() -> None:
    model = RunningRates()
    pool, request = jnp.asarray([0.8, 0.8, 0.5]), jnp.asarray([0.4, 0.4, 0.4])
    pool_after, request_after = model.observe(pool, request, jnp.int32(2), jnp.int32(2))
    # Tested: 0.4 + 0.25 * 0.6 and 0.8 + 0.05 * 0.2; the lead at the last of them is 0.55 - 0.81.
    np.testing.assert_allclose(request_after, [0.55, 0.55, 0.4 + 0.25 * (0.5 - 0.26 - 0.4)], rtol=1e-12)
    np.testing.assert_allclose(pool_after, [0.81, 0.81, 0.5 + 0.01 * (0.81 - 0.5)], rtol=1e-12)


@pytest.mark.parametrize(("drafted", "accepted"), [(4, 1), (3, 3), (6, 6), (1, 0)])
def test_gradients_by_hyperparameters_are_right(drafted: int, accepted: int) -> None:
    def last_rate(parameters: jax.Array) -> jax.Array:
        model = RunningRates(*parameters)
        pool = model.init_pool(DRAFT_LIMIT)
        request = model.init_request(pool)
        for _ in range(3):
            pool, request = model.observe(pool, request, jnp.int32(drafted), jnp.int32(accepted))
        return jnp.sum(survival(request)) + jnp.sum(pool**2)

    check_grads(last_rate, (jnp.asarray([0.25, 0.05, 0.01, 0.7]),), order=1, atol=1e-7, rtol=1e-7)
