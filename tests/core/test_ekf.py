"""The filter against the oracle, and what holds for any cost form."""

import equinox as eqx
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Array, Float

import oracle
from akjax import (
    AbstractCostModel,
    Parameter,
    StepFeatures,
    as_parameter,
    dense_cost,
    parse_table,
    prior_belief,
    reference_cost,
    update,
)

learn = jax.jit(update)


def step_of(tokens: float) -> StepFeatures:
    return StepFeatures(tokens=np.float64(tokens), requests=np.float64(1))


@given(
    theta=st.tuples(st.floats(0.1, 60), st.floats(0.01, 2), st.floats(0.01, 2)),
    events=st.lists(st.tuples(st.integers(1, 300), st.floats(0.1, 400)), max_size=30),
)
def test_any_run_of_steps_follows_the_oracle(
    theta: tuple[float, float, float], events: list[tuple[int, float]]
) -> None:
    expected = oracle.CostFilter(oracle.Settings(model=theta))
    belief = prior_belief(reference_cost(*theta, experts=288, top_k=8))
    order = [0, 1, 3, 2]  # the oracle's (base, per_expert, per_token, d), from the form's own order
    for tokens, ms in events:
        predicted = expected.predicted(tokens)
        expected.update(tokens, ms)
        belief, innovation = learn(belief, step_of(tokens), np.float64(ms))
        np.testing.assert_allclose(innovation.predicted, predicted, rtol=1e-9)
        np.testing.assert_allclose(innovation.residual, ms - predicted, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(np.asarray(jax.tree.leaves(belief.model))[order], expected.x, rtol=1e-9, atol=1e-11)
        covariance = np.asarray(belief.covariance)[np.ix_(order, order)]
        spread = np.sqrt(np.outer(np.diag(expected.P), np.diag(expected.P)))
        np.testing.assert_allclose(covariance / spread, expected.P / spread, atol=1e-7)


@pytest.mark.parametrize(
    "model",
    [reference_cost(27.0, 0.635, 0.542, experts=64, top_k=4), dense_cost(20.0, 0.5), parse_table("2:47,4:53,8:65")],
)
def test_the_covariance_stays_symmetric_and_positive_for_any_form(model: AbstractCostModel) -> None:
    rng = np.random.default_rng(0)
    belief = prior_belief(model)
    for tokens in rng.integers(1, 200, 300):
        belief, _ = learn(belief, step_of(tokens), np.float64(30 + 0.7 * tokens * rng.lognormal(0, 0.05)))
        np.testing.assert_allclose(belief.covariance, np.asarray(belief.covariance).T, rtol=1e-9, atol=1e-15)
    assert np.linalg.eigvalsh(belief.covariance).min() > 0


def test_the_innovation_is_as_large_as_the_filter_expects() -> None:
    """Over data drawn from the model itself the normalised innovation has mean square 1 (within its own error)."""
    rng = np.random.default_rng(1)
    belief = prior_belief(dense_cost(25.0, 0.5))
    squares = []
    for tokens in rng.integers(1, 100, 2000):
        true_ms = 27.0 + 0.55 * tokens
        belief, innovation = learn(belief, step_of(tokens), np.float64(true_ms * (1 + 0.05 * rng.standard_normal())))
        squares.append(float(innovation.residual**2 / innovation.variance))
    assert abs(np.mean(squares) - 1) < 4 * np.sqrt(2 / len(squares))


class _Misnamed(AbstractCostModel):
    value: Float[Array, "2"] = eqx.field(converter=as_parameter)

    def __call__(self, step: StepFeatures) -> Float[Array, "*steps"]:
        return self.value[0] * step.tokens

    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter("only_one", "ms", variance=1.0),)


def test_a_form_that_does_not_name_each_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"_Misnamed has 2 scalars.*only_one"):
        prior_belief(_Misnamed(np.zeros(2)))
