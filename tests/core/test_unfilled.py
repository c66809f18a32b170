"""Steps that do not fill the graph that they run in."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from jax.test_util import check_grads

from akjax import Constant, Padded, PerToken, StepFeatures, Unfilled, prior_belief

SIZES = (1, 2, 4, 8)


def steps(tokens: list[float]) -> StepFeatures:
    return StepFeatures(tokens=np.asarray(tokens), requests=np.ones(len(tokens)))


def test_a_step_that_does_not_fill_its_graph_costs_the_factor() -> None:
    model = Unfilled(Padded(PerToken(1.0), SIZES), 1.5, SIZES)
    np.testing.assert_allclose(
        model(steps([1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 8.0, 9.0])), [1, 2, 6, 4, 12, 12, 8, 9], rtol=1e-12
    )


@given(sizes=st.lists(st.integers(1, 600), min_size=1, max_size=12, unique=True).map(lambda s: tuple(sorted(s))))
def test_it_is_so_for_all_sizes(sizes: tuple[int, ...]) -> None:
    tokens = list(range(1, 700))
    expected = [1.0 if t in sizes or t > sizes[-1] else 1.25 for t in tokens]
    np.testing.assert_array_equal(Unfilled(Constant(1.0), 1.25, sizes)(steps([*map(float, tokens)])), expected)


def test_a_filled_graph_does_not_teach_the_factor() -> None:
    model = Unfilled(Constant(10.0), 1.5, SIZES)
    slopes = jax.jacrev(lambda m: m(steps([3.0, 4.0, 9.0])))(model)
    np.testing.assert_array_equal(slopes.factor, [10.0, 0.0, 0.0])
    np.testing.assert_array_equal(slopes.model.base, [1.5, 1.0, 1.0])


def test_its_parameters_are_the_leaves_in_order_with_right_gradients() -> None:
    model = Unfilled(Padded(Constant(27.0) + PerToken(0.5), SIZES), 1.03, SIZES)
    assert [parameter.name for parameter in model.parameters()] == ["base", "per_token", "unfilled_factor"]
    values, unravel = ravel_pytree(model)
    np.testing.assert_allclose(values, [27.0, 0.5, 1.03])
    assert prior_belief(model).covariance.shape == (3, 3)
    # A step of padding has no tokens.
    some = steps([0.0, 1.0, 3.0, 8.0, 20.0])
    check_grads(lambda x: unravel(x)(some), (values,), order=1, atol=1e-7, rtol=1e-7)
    assert np.all(np.isfinite(jax.grad(lambda x: jnp.sum(unravel(x)(some)))(values)))


def test_a_single_step_has_the_shape_of_one() -> None:
    one = StepFeatures(np.asarray(3.0), np.asarray(1.0))
    assert jnp.shape(Unfilled(Constant(1.0), 1.1, SIZES)(one)) == ()


@pytest.mark.parametrize("sizes", [(), (0, 1), (-1, 2), (4, 2), (2, 2)])
def test_sizes_that_cannot_be_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"given {sizes}")):
        Unfilled(Constant(1.0), 1.1, sizes)
