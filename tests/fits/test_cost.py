"""The batch fit against scipy on the same loss, and what it refuses."""

import equinox as eqx
import jax
import numpy as np
import pytest
import scipy.optimize
from jax.flatten_util import ravel_pytree
from jaxtyping import Float

from akjax import (
    AbstractCostModel,
    Constant,
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
    fit = fit_cost(start, features, ms)
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
    np.testing.assert_allclose(ravel_pytree(fit.model)[0], expected.x, rtol=1e-4)


def test_without_noise_the_truth_comes_back() -> None:
    truth = reference_cost(20.0, 0.4, 0.3, experts=64, top_k=4)
    features, ms = drawn(truth, 0.0)
    fit = fit_cost(reference_cost(27.0, 0.635, 0.542, experts=64, top_k=4), features, ms)
    assert fit.relative_error < 1e-6
    np.testing.assert_allclose(jax.tree.leaves(fit.model), jax.tree.leaves(truth), rtol=1e-3)


def test_a_fit_that_had_no_time_says_so() -> None:
    features, ms = drawn(dense_cost(12.0, 0.3), 0.05)
    fit = fit_cost(dense_cost(27.0, 0.542), features, ms, max_iterations=1)
    assert (fit.iterations, fit.converged) == (1, False)


@pytest.mark.parametrize("diversity", [0.05, 2.0, 3.0])
def test_a_search_may_begin_on_a_bound_or_beyond(diversity: float) -> None:
    features, ms = drawn(reference_cost(20.0, 0.4, 0.3, experts=64, top_k=4), 0.05)
    start = Constant(27.0) + ExpertReads(0.635, DiverseTokens(diversity, 64, 4)) + PerToken(0.542)
    best = fit_cost(reference_cost(27.0, 0.635, 0.542, experts=64, top_k=4), features, ms)
    fit = fit_cost(start, features, ms)
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
