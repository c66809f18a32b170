"""The batch fit against scipy on the same loss, and what it refuses."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from jax.flatten_util import ravel_pytree
from jaxtyping import Float

from akjax import (
    AbstractCostModel,
    ByDraftLength,
    Constant,
    Context,
    DiverseTokens,
    ExpertReads,
    Parameter,
    PerToken,
    StepFeatures,
    as_parameter,
    dense_cost,
    parse_table,
    reference_cost,
)
from akjax.arrays import Array
from akjax.fits import fit_cost
from akjax.fits.loss import LOSSES, SCALE_OF_NORMAL, check_loss


def drawn(model: AbstractCostModel, noise: float, steps: int = 400) -> tuple[StepFeatures, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 300, steps).astype(np.float64)
    features = StepFeatures(tokens=tokens, requests=np.ones(steps))
    return features, np.asarray(model(features)) * np.exp(noise * rng.standard_normal(steps))


@pytest.mark.parametrize(
    ("truth", "start"),
    [
        (dense_cost(12.0, 0.3), dense_cost(27.0, 0.542)),
        (
            reference_cost(20.0, 0.4, 0.3, experts=64, top_k=4),
            reference_cost(27.0, 0.635, 0.542, experts=64, top_k=4),
        ),
        (parse_table("1:10,100:40,300:150"), parse_table("1:20,100:60,300:100")),
    ],
    ids=["dense", "reference", "table"],
)
def test_the_fit_is_the_optimum_that_scipy_finds(truth: AbstractCostModel, start: AbstractCostModel) -> None:
    features, ms = drawn(truth, 0.05)
    fit = fit_cost(start, features, ms, loss="squares")
    values, unravel = ravel_pytree(start)
    parameters = start.parameters()
    expected = scipy.optimize.least_squares(
        jax.jit(lambda x: (unravel(x)(features) - ms) / ms),
        values,
        jac=jax.jit(jax.jacfwd(lambda x: (unravel(x)(features) - ms) / ms)),
        bounds=([p.lower for p in parameters], [p.upper for p in parameters]),
        x_scale=np.sqrt([p.variance for p in parameters]),
        xtol=1e-14,
        ftol=1e-14,
        gtol=1e-14,
        max_nfev=2000,
    )
    assert fit.converged
    np.testing.assert_allclose(fit.relative_error**2, 2 * expected.cost / len(ms), rtol=1e-9)
    np.testing.assert_allclose(ravel_pytree(fit.model)[0], expected.x, rtol=1e-6)


@pytest.mark.parametrize("outliers", [0.0, 0.05])
def test_the_robust_fit_is_the_optimum_that_scipy_finds_at_its_scale(outliers: float) -> None:
    truth = reference_cost(20.0, 0.4, 0.3, experts=64, top_k=4)
    features, ms = drawn(truth, 0.05)
    ms = np.where(np.random.default_rng(1).random(len(ms)) < outliers, 5.0 * ms, ms)
    start = reference_cost(27.0, 0.635, 0.542, experts=64, top_k=4)
    fit = fit_cost(start, features, ms, priors=False)
    values, unravel = ravel_pytree(start)
    expected = scipy.optimize.least_squares(
        jax.jit(lambda x: jnp.log(ms / unravel(x)(features))),
        values,
        jac=jax.jit(jax.jacfwd(lambda x: jnp.log(ms / unravel(x)(features)))),
        loss="cauchy",
        f_scale=2.0 * SCALE_OF_NORMAL * fit.noise,
        bounds=([0.01, 0.001, 0.05, 0.001], [100.0, 10.0, 2.0, 10.0]),
        x_scale=[5.0, 0.02, 0.3, 0.06],
        xtol=1e-14,
        ftol=1e-14,
        gtol=1e-14,
        max_nfev=5000,
    )
    assert fit.converged
    np.testing.assert_allclose(fit.values, expected.x, rtol=1e-5)
    # The scale is in a minimum too: the likelihood's slope along it vanishes.
    residuals = np.log(ms / np.asarray(fit.model(features)))
    squares = (residuals / (SCALE_OF_NORMAL * fit.noise)) ** 2
    assert np.mean(5.0 * squares / (4.0 + squares)) == pytest.approx(1.0, abs=1e-7)
    # Nearly all that was made an outlier is named, and next to nothing else.
    made = np.flatnonzero(np.abs(residuals) > 1.0)
    assert set(made) <= set(fit.outliers)
    assert len(fit.outliers) <= len(made) + 2


def test_gross_outliers_hardly_move_the_robust_fit() -> None:
    truth = dense_cost(12.0, 0.3)
    features, ms = drawn(truth, 0.05, steps=4000)
    spoilt = np.where(np.random.default_rng(1).random(len(ms)) < 0.05, 8.0 * ms, ms)
    np.testing.assert_allclose(
        fit_cost(truth, features, spoilt).values, fit_cost(truth, features, ms).values, rtol=0.01
    )
    assert fit_cost(truth, features, spoilt, loss="squares").relative_error > 0.1


def test_steps_without_weight_count_for_nothing() -> None:
    truth = dense_cost(12.0, 0.3)
    features, ms = drawn(truth, 0.05)
    some = np.arange(len(ms)) % 3 > 0
    spoilt = np.where(some, ms, 1000.0 * ms)
    for loss in LOSSES:
        weighted = fit_cost(truth, features, spoilt, weights=some.astype(np.float64), loss=loss)
        alone = fit_cost(truth, StepFeatures(features.tokens[some], features.requests[some]), ms[some], loss=loss)
        np.testing.assert_allclose(weighted.values, alone.values, rtol=1e-7)
        np.testing.assert_allclose(weighted.covariance, alone.covariance, rtol=1e-6)


def test_what_the_steps_put_at_zero_is_said_to_be_there() -> None:
    features, ms = drawn(Constant(12.0), 0.02)
    fit = fit_cost(dense_cost(27.0, 0.542), features, ms * (1.0 - 1e-4 * np.asarray(features.tokens)))
    assert fit.converged
    np.testing.assert_array_equal(fit.at_bound, [False, True])
    assert 0.0 <= fit.values[1] < 1e-2
    assert fit.standard_errors[1] == 0.0


def test_errors_are_those_of_plain_least_squares_where_it_has_some() -> None:
    # A line in the tokens, with noise in proportion to it: the usual formula of weighted least squares.
    features, ms = drawn(dense_cost(12.0, 0.3), 0.05, steps=20_000)
    fit = fit_cost(dense_cost(12.0, 0.3), features, ms, loss="squares")
    design = np.stack([np.ones_like(ms), np.asarray(features.tokens)], axis=1) / ms[:, None]
    expected = fit.relative_error**2 * np.linalg.inv(design.T @ design)
    np.testing.assert_allclose(fit.covariance, expected, rtol=0.05)


def test_the_noise_of_a_fit_is_that_of_normal_noise_and_its_errors_are_wider_by_what_t_gives_away() -> None:
    features, ms = drawn(dense_cost(12.0, 0.3), 0.05, steps=50_000)
    robust, squares = (fit_cost(dense_cost(12.0, 0.3), features, ms, loss=loss) for loss in LOSSES)
    assert robust.noise == pytest.approx(0.05, rel=0.01)
    # The efficiency of t's score on normal noise, by quadrature.
    z, scale = np.linspace(-9.0, 9.0, 100_001), SCALE_OF_NORMAL
    density = scipy.stats.norm.pdf(z) * (z[1] - z[0])
    assert np.sum(density * 5.0 * z**2 / (4.0 * scale**2 + z**2)) == pytest.approx(1.0, abs=1e-9)
    score = 5.0 * z / (4.0 * scale**2 + z**2)
    slope = 5.0 * (4.0 * scale**2 - z**2) / (4.0 * scale**2 + z**2) ** 2
    efficiency = np.sum(density * slope) ** 2 / np.sum(density * score**2)
    assert efficiency == pytest.approx(0.8927, abs=1e-4)
    np.testing.assert_allclose(np.diag(squares.covariance) / np.diag(robust.covariance), efficiency, rtol=0.02)


def test_no_search_is_refused() -> None:
    features, ms = drawn(dense_cost(12.0, 0.3), 0.05)
    with pytest.raises(ValueError, match="searches must be at least 1, given 0"):
        fit_cost(dense_cost(12.0, 0.3), features, ms, searches=0)


def test_a_loss_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="loss='cubes' must be one of robust, squares"):
        check_loss("cubes")


@pytest.mark.parametrize("weights", [[0.0] * 400, [1.0] * 3, [-1.0] * 400])
def test_weights_that_cannot_be_are_refused(weights: list[float]) -> None:
    features, ms = drawn(dense_cost(12.0, 0.3), 0.05)
    with pytest.raises(ValueError, match="weights must be"):
        fit_cost(dense_cost(12.0, 0.3), features, ms, weights=np.asarray(weights))


def test_without_noise_the_truth_comes_back() -> None:
    truth = reference_cost(20.0, 0.4, 0.3, experts=64, top_k=4)
    features, ms = drawn(truth, 0.0)
    fit = fit_cost(reference_cost(27.0, 0.635, 0.542, experts=64, top_k=4), features, ms, priors=False)
    assert fit.relative_error < 1e-6
    assert np.all(fit.determined)
    np.testing.assert_allclose(jax.tree.leaves(fit.model), jax.tree.leaves(truth), rtol=1e-3)


def test_a_fit_that_had_no_time_says_so() -> None:
    features, ms = drawn(dense_cost(12.0, 0.3), 0.05)
    fit = fit_cost(dense_cost(27.0, 0.542), features, ms, max_iterations=1, tolerance=0.0)
    assert not fit.converged


@pytest.mark.parametrize("diversity", [0.05, 2.0, 3.0])
def test_a_search_may_begin_on_a_bound_or_beyond(diversity: float) -> None:
    features, ms = drawn(reference_cost(20.0, 0.4, 0.3, experts=64, top_k=4), 0.05)
    start = Constant(27.0) + ExpertReads(0.635, DiverseTokens(diversity, 64, 4)) + PerToken(0.542)
    best = fit_cost(reference_cost(27.0, 0.635, 0.542, experts=64, top_k=4), features, ms, priors=False)
    fit = fit_cost(start, features, ms, priors=False)
    assert fit.converged
    np.testing.assert_allclose(fit.relative_error, best.relative_error, rtol=1e-9)


class _OneSided(AbstractCostModel):
    slope: Float[Array, ""] = eqx.field(converter=as_parameter)

    def __call__(self, step: StepFeatures) -> Float[Array, "*steps"]:
        return self.slope * step.tokens

    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter("slope", "ms/token", variance=1.0, lower=0.0),)


def test_a_parameter_bounded_on_one_side_is_refused() -> None:
    features, ms = drawn(dense_cost(12.0, 0.3), 0.05)
    with pytest.raises(ValueError, match="slope is bounded on one side"):
        fit_cost(_OneSided(1.0), features, ms)


def test_features_that_are_not_one_for_each_time_are_refused() -> None:
    with pytest.raises(ValueError, match="one equal axis"):
        fit_cost(dense_cost(1.0, 1.0), StepFeatures(tokens=np.ones(2), requests=np.ones(2)), np.ones(3))
    with pytest.raises(ValueError, match="every feature"):
        fit_cost(dense_cost(1.0, 1.0), StepFeatures(tokens=np.full(2, np.nan), requests=np.ones(2)), np.ones(2))


@pytest.mark.parametrize(
    ("tokens", "ms", "complaint"),
    [
        ([], [], "one equal axis"),
        ([1.0, 2.0], [10.0], "one equal axis"),
        ([1.0, 2.0], [10.0, 0.0], "positive and finite"),
        ([1.0, 2.0], [10.0, np.nan], "positive and finite"),
    ],
)
def test_steps_that_cannot_be_fitted_are_refused(tokens: list[float], ms: list[float], complaint: str) -> None:
    features = StepFeatures(tokens=np.asarray(tokens), requests=np.ones(len(tokens)))
    with pytest.raises(ValueError, match=complaint):
        fit_cost(dense_cost(1.0, 1.0), features, np.asarray(ms))


def test_of_what_only_a_product_is_seen_the_prior_says_which_is_which() -> None:
    truth = dense_cost(12.0, 0.3)
    features, ms = drawn(truth, 0.05)
    features = dataclasses.replace(features, tokens=1.0 + features.requests)
    ms = 12.0 * np.exp(0.05 * np.random.default_rng(1).standard_normal(len(ms)))
    # A base times a factor: with a prior of 5% about 1 for the factor.
    start = ByDraftLength(Constant(27.0), np.ones(1), (1,))
    fit = fit_cost(start, features, ms)
    np.testing.assert_allclose(fit.values[1], 1.0, atol=1e-3)
    np.testing.assert_allclose(fit.values[0], 12.0, rtol=0.01)
    np.testing.assert_allclose(fit.standard_errors[1], 0.05, rtol=0.01)
    # Their errors are the prior's; together they are known as well as the steps say.
    assert fit.covariance[0, 1] / np.prod(fit.standard_errors) < -0.99
    alone = fit_cost(start, features, ms, priors=False)
    assert not np.any(alone.determined)


def test_what_is_in_none_of_the_steps_stays_as_it_was() -> None:
    features, ms = drawn(dense_cost(12.0, 0.3), 0.05)
    fit = fit_cost(dense_cost(27.0, 0.542) + Context(1e-4), features, ms)
    assert fit.converged
    np.testing.assert_array_equal(fit.unseen, [False, False, True])
    np.testing.assert_array_equal(fit.determined, [True, True, False])
    assert fit.standard_errors[2] == 0.0


def test_what_is_in_none_of_the_steps_is_not_scattered_with_the_searches() -> None:
    start = dense_cost(27.0, 0.5) + Context(1e-4)
    features, ms = drawn(dense_cost(1.0, 3.0), 0.05)
    fit = fit_cost(start, features, ms)
    np.testing.assert_array_equal(fit.unseen, [False, False, True])
    # At the speed of the steps.
    np.testing.assert_allclose(fit.values[2], 1e-4 * np.exp(np.mean(np.log(ms / start(features)))), rtol=1e-6)
