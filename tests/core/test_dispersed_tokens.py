"""The union of tokens whose picks pile up or are spread out: its limits, an oracle by drawing, gradients, learning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from jax.test_util import check_grads

from akjax import (
    Constant,
    DispersedPower,
    DispersedTokens,
    ExpertReads,
    IndependentTokens,
    PerToken,
    PowerTokens,
    StepFeatures,
    prior_belief,
    update,
)

LAYERS = st.integers(2, 900).flatmap(lambda experts: st.tuples(st.just(experts), st.integers(1, experts - 1)))
TOKENS = [1.0, 2.0, 3.5, 9.0, 40.0, 512.0]


def steps(tokens: list[float]) -> StepFeatures:
    return StepFeatures(tokens=np.asarray(tokens), requests=np.ones(len(tokens)))


@given(layer=LAYERS, dispersion=st.floats(-1.0, 8.0))
def test_one_token_touches_top_k_whatever_the_dispersion(layer: tuple[int, int], dispersion: float) -> None:
    np.testing.assert_allclose(DispersedTokens(dispersion, *layer)(steps([1.0])), [layer[1]], rtol=1e-9)


@given(layer=LAYERS)
def test_without_dispersion_tokens_are_independent(layer: tuple[int, int]) -> None:
    independent = IndependentTokens(*layer)(steps(TOKENS))
    np.testing.assert_allclose(DispersedTokens(0.0, *layer)(steps(TOKENS)), independent, rtol=1e-12)
    for dispersion in (-1e-12, 1e-12):
        np.testing.assert_allclose(DispersedTokens(dispersion, *layer)(steps(TOKENS)), independent, rtol=1e-9)


@given(layer=LAYERS)
def test_picks_spread_as_far_as_can_be_touch_all_experts_before_any_twice(layer: tuple[int, int]) -> None:
    experts, top_k = layer
    expected = [min(float(experts), top_k * tokens) for tokens in TOKENS]
    np.testing.assert_allclose(DispersedTokens(-1.0, *layer)(steps(TOKENS)), expected, rtol=1e-9)


@pytest.mark.parametrize("dispersion", [-0.5, -1e-3, 1e-3, 0.4, 3.0])
def test_the_formula_by_hand(dispersion: float) -> None:
    grown = np.asarray(TOKENS) * ((1 - 8 / 256) ** -dispersion - 1)
    expected = 256 * (1 - np.maximum(1 + grown, 0.0) ** (-1 / dispersion))
    np.testing.assert_allclose(DispersedTokens(dispersion, 256, 8)(steps(TOKENS)), expected, rtol=1e-9)


def test_it_passes_the_line_at_zero_without_a_jump() -> None:
    near = [np.asarray(DispersedTokens(s, 256, 8)(steps(TOKENS))) for s in (0.999e-6, 1.001e-6)]
    np.testing.assert_allclose(near[0], near[1], rtol=1e-8)


def test_popularities_of_a_gamma_distribution_touch_as_many() -> None:
    # Each expert's picks by n tokens are Poisson about its popularity, which has a relative variance of 0.7.
    rng = np.random.default_rng(0)
    experts, top_k, dispersion = 100_000, 1_000, 0.7
    popularity = rng.gamma(1 / dispersion, dispersion, experts) * top_k / experts
    for tokens in (10.0, 100.0, 400.0):
        drawn = np.count_nonzero(rng.poisson(popularity * tokens))
        np.testing.assert_allclose(DispersedTokens(dispersion, experts, top_k)(steps([tokens])), [drawn], rtol=0.02)


@pytest.mark.parametrize("dispersion", [-0.9, -0.3, -1e-4, 1e-4, 0.5, 6.0])
def test_gradients_are_right(dispersion: float) -> None:
    model = ExpertReads(0.6, DispersedTokens(dispersion, 128, 6))
    values, unravel = ravel_pytree(model)
    # Below 0, where the union has a kink at which all are touched, on both sides of it.
    check_grads(lambda x: unravel(x)(steps([1.0, 3.0, 7.0, 400.0])), (values,), order=1, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dispersion", [-1.0, -0.5, 0.0, 5e-7, 8.0])
def test_gradients_are_finite_at_the_edges(dispersion: float) -> None:
    tokens = steps([0.0, 1.0, 16.0, 32.0, 33.0, 1e7])
    gradient = jax.grad(lambda union: jnp.sum(union(tokens)))(DispersedTokens(dispersion, 256, 8))
    assert np.isfinite(gradient.dispersion)
    at_tokens = jax.grad(lambda t: jnp.sum(DispersedTokens(dispersion, 256, 8)(StepFeatures(t, t))))(tokens.tokens)
    assert np.all(np.isfinite(at_tokens))


def test_the_slope_at_zero_is_the_limit_of_those_about_it() -> None:
    def slope(dispersion: float) -> np.ndarray:
        model = DispersedTokens(dispersion, 256, 8)
        return np.asarray(jax.jacfwd(lambda union: union(steps(TOKENS)))(model).dispersion)

    np.testing.assert_allclose(slope(0.0), (slope(-1e-4) + slope(1e-4)) / 2, rtol=1e-4, atol=1e-6)


def test_tokens_that_pick_all_experts_touch_all() -> None:
    union = DispersedTokens(0.5, 8, 8)
    np.testing.assert_array_equal(union(steps(TOKENS)), 8.0)
    assert jax.grad(lambda u: jnp.sum(u(steps(TOKENS))))(union).dispersion == 0.0
    for experts, top_k in ((8, 9), (8, 0), (0, 0)):
        with pytest.raises(ValueError, match=f"top_k={top_k}"):
            DispersedTokens(0.5, experts, top_k)


def test_the_reference_filter_learns_it() -> None:
    truth = Constant(3.0) + ExpertReads(0.05, DispersedTokens(1.5, 256, 8)) + PerToken(0.02)
    belief = prior_belief(Constant(3.0) + ExpertReads(0.05, DispersedTokens(0.0, 256, 8)) + PerToken(0.02))
    taught = jax.jit(update)
    for tokens in 20 * [1.0, 4.0, 16.0, 64.0]:
        step = StepFeatures(np.asarray(tokens), np.asarray(1.0))
        belief, _ = taught(belief, step, np.asarray(truth(step)))
    np.testing.assert_allclose(belief.model(steps([1.0, 8.0, 32.0])), truth(steps([1.0, 8.0, 32.0])), rtol=0.02)


def test_with_a_power_it_is_either_of_its_parts() -> None:
    np.testing.assert_allclose(
        DispersedPower(0.0, 0.8, 128, 6)(steps(TOKENS)), PowerTokens(0.8, 128, 6)(steps(TOKENS)), rtol=1e-12
    )
    np.testing.assert_array_equal(
        DispersedPower(0.7, 1.0, 128, 6)(steps(TOKENS)), DispersedTokens(0.7, 128, 6)(steps(TOKENS))
    )
    np.testing.assert_allclose(
        DispersedPower(0.7, 0.5, 128, 6)(steps([1.0, 16.0])),
        DispersedTokens(0.7, 128, 6)(steps([1.0, 4.0])),
        rtol=1e-12,
    )
    with pytest.raises(ValueError, match="top_k=9"):
        DispersedPower(0.5, 0.8, 8, 9)


@pytest.mark.parametrize("dispersion", [-0.9, -0.3, 0.5, 6.0])
def test_with_a_power_its_parameters_are_its_leaves_with_right_gradients(dispersion: float) -> None:
    model = ExpertReads(0.6, DispersedPower(dispersion, 0.9, 128, 6))
    assert [parameter.name for parameter in model.parameters()] == ["per_expert", "dispersion", "gamma"]
    values, unravel = ravel_pytree(model)
    np.testing.assert_allclose(values, [0.6, dispersion, 0.9])
    check_grads(lambda x: unravel(x)(steps([1.0, 3.0, 7.0, 400.0])), (values,), order=1, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dispersion", [-1.0, 0.0, 8.0])
def test_with_a_power_a_step_of_padding_spoils_no_gradient(dispersion: float) -> None:
    union = DispersedPower(dispersion, 0.9, 128, 6)
    gradient = jax.grad(lambda u: jnp.sum(u(steps([0.0, 1.0, 512.0]))))(union)
    assert np.isfinite(gradient.dispersion)
    assert np.isfinite(gradient.gamma)
