"""Fits of many sets at once: against scipy set by set, what weights and priors do, and what is refused."""

import jax
import numpy as np
import pytest
import scipy.optimize
from jax.flatten_util import ravel_pytree

from akjax import (
    AbstractCostModel,
    Constant,
    DispersedTokens,
    ExpertReads,
    IndependentTokens,
    PerToken,
    StepFeatures,
    dense_cost,
    reference_cost,
)
from akjax.fits.many import fit_many

TOKENS = np.asarray([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0])
STEPS = StepFeatures(tokens=TOKENS, requests=np.ones_like(TOKENS))
START = reference_cost(27.0, 0.6, 0.5, experts=64, top_k=4)
# Of its parameters: base, per_expert, diversity, per_token.
IS_TIME = np.asarray([True, True, False, True])


def drawn(truths: list[AbstractCostModel], noise: float) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.stack([np.asarray(truth(STEPS)) * np.exp(noise * rng.standard_normal(len(TOKENS))) for truth in truths])


def values(model: AbstractCostModel) -> np.ndarray:
    return np.stack([np.asarray(leaf) for leaf in jax.tree.leaves(model)], axis=1)


def test_each_fit_is_the_optimum_that_scipy_finds_for_its_set() -> None:
    # From machines a thousand times apart.
    ms = drawn([reference_cost(s * 20.0, s * 0.4, s * 0.3, experts=64, top_k=4) for s in (1.0, 30.0, 0.03)], 0.03)
    weights = np.ones(ms.shape)
    weights[1, 3] = 0.0
    weights[2, 5] = 2.0
    fits = fit_many(START, STEPS, ms, weights)
    natural, unravel = ravel_pytree(START)
    for row, share, found, error in zip(ms, weights, values(fits.model), fits.relative_error, strict=True):
        scale = np.where(IS_TIME, row[0] / 27.0, 1.0)

        def residuals(x: np.ndarray, row=row, share=share, scale=scale) -> np.ndarray:
            return np.sqrt(share / share.sum()) * (np.asarray(unravel(x * scale)(STEPS)) / row - 1.0)

        bounds = [0.0, 0.0, 0.05, 0.0], [np.inf, np.inf, 2.0, np.inf]
        best = scipy.optimize.least_squares(
            residuals, natural, bounds=bounds, x_scale="jac", xtol=1e-14, ftol=1e-14, gtol=1e-14
        )
        np.testing.assert_allclose(error, np.sqrt(np.sum(best.fun**2)), rtol=1e-6)
        np.testing.assert_allclose(unravel(found)(STEPS), unravel(best.x * scale)(STEPS), rtol=1e-4)
    np.testing.assert_allclose(
        fits.predicted(STEPS, ms.shape), [unravel(found)(STEPS) for found in values(fits.model)], rtol=1e-12
    )


@pytest.mark.parametrize("dispersion", [-0.8, 0.0, 2.0])
def test_without_noise_the_truth_is_found(dispersion: float) -> None:
    def form(dispersion: float) -> AbstractCostModel:
        return Constant(5.0) + ExpertReads(0.5, DispersedTokens(dispersion, 64, 4)) + PerToken(0.1)

    ms = drawn([form(dispersion)], 0.0)
    fits = fit_many(form(0.2), STEPS, ms, np.ones(ms.shape))
    assert fits.relative_error[0] < 1e-6
    np.testing.assert_allclose(values(fits.model), [[5.0, 0.5, dispersion, 0.1]], rtol=1e-3, atol=1e-3)


def test_a_step_of_no_weight_is_not_looked_at() -> None:
    ms = np.repeat(drawn([START], 0.02), 2, axis=0)
    ms[1, 4] *= 7.0
    weights = np.ones(ms.shape)
    weights[:, 4] = 0.0
    first, second = values(fit_many(START, STEPS, ms, weights).model)
    np.testing.assert_allclose(first, second, rtol=1e-6)


def test_noise_holds_what_has_no_unit_near_its_start_and_leaves_prices_free() -> None:
    truth = reference_cost(2000.0, 40.0, 30.0, experts=64, top_k=4)
    ms = drawn([truth], 0.05)
    weights = np.ones(ms.shape)
    free, held, fixed = (
        values(fit_many(START, STEPS, ms, weights, noise=noise).model)[0] for noise in (0.0, 0.05, 1e4)
    )
    assert abs(held[2] - 1.0) < abs(free[2] - 1.0)
    np.testing.assert_allclose(fixed[2], 1.0, atol=1e-4)
    independent = Constant(27.0) + ExpertReads(0.6, IndependentTokens(64, 4)) + PerToken(0.5)
    alone = values(fit_many(independent, STEPS, ms, weights).model)[0]
    np.testing.assert_allclose(fixed[IS_TIME], alone, rtol=1e-2)


def test_what_cannot_be_fitted_is_refused() -> None:
    start, ms = dense_cost(20.0, 0.5), np.ones((2, len(TOKENS)))
    for bad in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="positive and finite"):
            fit_many(start, STEPS, np.where(TOKENS == 4.0, bad, ms), ms)
    for weights in (-ms, np.where(np.arange(2)[:, None] == 0, 0.0, ms)):
        with pytest.raises(ValueError, match="weights must be one for each time"):
            fit_many(start, STEPS, ms, weights)
