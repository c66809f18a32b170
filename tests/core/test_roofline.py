"""The smooth maximum of reading and computing, and its limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akjax import Constant, PerToken, Roofline, StepFeatures, smooth_maximum

TIMES = st.floats(1e-3, 1e4)
SOFTNESS = st.floats(0.01, 1.0)


def plain(one: float, other: float, softness: float) -> float:
    """The p-norm, from the logarithms of its terms."""
    logs = np.array([np.log(one), np.log(other)]) / softness
    return float(np.exp(softness * np.logaddexp(*logs)))


@given(one=TIMES, other=TIMES, softness=SOFTNESS)
def test_it_is_the_p_norm(one: float, other: float, softness: float) -> None:
    np.testing.assert_allclose(smooth_maximum(*map(jnp.asarray, (one, other, softness))), plain(one, other, softness))


@given(one=TIMES, other=TIMES, third=TIMES, unit=TIMES, softness=SOFTNESS)
def test_neither_the_unit_nor_the_order_matters(
    one: float, other: float, third: float, unit: float, softness: float
) -> None:
    a, b, c, s = map(jnp.asarray, (one, other, third, softness))
    together = smooth_maximum(smooth_maximum(a, b, s), c, s)
    np.testing.assert_allclose(smooth_maximum(smooth_maximum(c, a, s), b, s), together, rtol=1e-9)
    np.testing.assert_allclose(smooth_maximum(unit * a, unit * b, s), unit * smooth_maximum(a, b, s), rtol=1e-9)


@given(one=TIMES, other=TIMES)
def test_its_limits_are_the_sum_and_the_maximum(one: float, other: float) -> None:
    a, b = jnp.asarray(one), jnp.asarray(other)
    np.testing.assert_allclose(smooth_maximum(a, b, jnp.asarray(1.0)), one + other, rtol=1e-12)
    assert float(smooth_maximum(a, b, jnp.asarray(0.0))) == max(one, other)
    np.testing.assert_allclose(smooth_maximum(a, b, jnp.asarray(1e-9)), max(one, other), rtol=1e-8)
    for softness in (0.01, 0.25, 0.9):
        between = float(smooth_maximum(a, b, jnp.asarray(softness)))
        assert max(one, other) <= between <= max(one, other) * 2**softness * (1 + 1e-12)


@pytest.mark.parametrize("softness", [0.0, 0.01, 0.25, 1.0])
@pytest.mark.parametrize("times", [(0.0, 0.0), (0.0, 5.0), (5.0, 0.0), (3.0, 3.0), (1e-300, 1e4)])
def test_its_gradient_is_finite_at_nothing_and_at_the_ridge(times: tuple[float, float], softness: float) -> None:
    slopes = jax.grad(smooth_maximum, argnums=(0, 1, 2))(*map(jnp.asarray, (*times, softness)))
    assert np.all(np.isfinite(slopes))


def test_a_step_takes_the_longer_of_reading_and_computing() -> None:
    tokens = np.asarray([1.0, 8.0, 4000.0])
    step = StepFeatures(tokens, np.ones(3))
    sharp = Roofline(Constant(20.0), PerToken(0.1), 0.0)
    np.testing.assert_array_equal(sharp(step), [20.0, 20.0, 400.0])
    soft = Roofline(Constant(20.0), PerToken(0.1), 0.5)
    np.testing.assert_allclose(soft(step), np.hypot(20.0, 0.1 * tokens), rtol=1e-12)
    assert [parameter.name for parameter in soft.parameters()] == ["base", "per_token", "softness"]
