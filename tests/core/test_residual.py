"""A form with a small network for what it gets wrong."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.test_util import check_grads

from akjax import AbstractCostModel, Constant, PerToken, Residual, StepFeatures, prior_belief, small_network, update

BASE = Constant(27.0) + PerToken(0.5)
STEPS = StepFeatures(tokens=np.asarray([1.0, 6.0, 40.0, 300.0]), requests=np.asarray([1.0, 2.0, 8.0, 60.0]))


def plain_factor(values: np.ndarray, size: float) -> np.ndarray:
    """The network by hand: 4 units of 2 weights and a bias each, and a weight for what each says."""
    hidden, bias, out = values[:8].reshape(4, 2), values[8:12], values[12:]
    x = (np.log1p(np.stack([STEPS.tokens, STEPS.requests])) - 3.5) / 2.75
    return np.exp(size * (out @ np.tanh(hidden @ x + bias[:, None])))


def test_it_starts_as_the_model_alone() -> None:
    np.testing.assert_array_equal(Residual(BASE, small_network())(STEPS), BASE(STEPS))


def test_it_is_the_model_times_the_networks_factor() -> None:
    start = Residual(BASE, small_network(), size=0.1)
    values, unravel = ravel_pytree(start)
    names = [parameter.name for parameter in start.parameters()]
    assert names == ["base", "per_token", *(f"residual_{number}" for number in range(16))]
    moved = np.concatenate([values[:2], np.random.default_rng(3).standard_normal(16)])
    expected = np.asarray(BASE(STEPS)) * plain_factor(moved[2:], 0.1)
    np.testing.assert_allclose(unravel(jnp.asarray(moved))(STEPS), expected, rtol=1e-9)
    check_grads(lambda x: unravel(x)(STEPS), (jnp.asarray(moved),), order=1, atol=1e-6, rtol=1e-6)


def test_a_network_of_another_seed_has_other_units_and_the_same_form() -> None:
    one, same, other = (Residual(BASE, small_network(seed=seed)) for seed in (0, 0, 1))
    assert jax.tree.structure(one) == jax.tree.structure(same) == jax.tree.structure(other)
    first, second, third = (np.asarray(ravel_pytree(model)[0]) for model in (one, same, other))
    np.testing.assert_array_equal(first, second)
    assert not np.any(first[2:14] == third[2:14])


def test_the_filter_learns_what_the_form_cannot_say() -> None:
    # A bump that no base and slope have.
    true = 27.0 + 0.5 * STEPS.tokens + np.asarray([0.0, 4.0, 0.0, 0.0])

    def worst_error(model: AbstractCostModel) -> float:
        belief = prior_belief(model)
        learn = jax.jit(partial(update, relative_noise=0.01))
        for number in range(400):
            at = number % 4
            step = StepFeatures(STEPS.tokens[at], STEPS.requests[at])
            belief, _ = learn(belief, step, np.asarray(true[at]))
        return float(np.max(np.abs(belief.model(STEPS) / true - 1)))

    assert worst_error(Residual(BASE, small_network(), size=0.3)) < 0.03 < worst_error(BASE)
