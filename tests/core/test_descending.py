"""The network puts values in order, whatever they are."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akjax.policy.descending import descending

in_order = jax.jit(descending)


@pytest.mark.parametrize("count", range(1, 14))
def test_all_zeros_and_ones_come_in_order(count: int) -> None:
    # A network that does so puts any values in order: the zero-one principle (Knuth, vol. 3, 5.3.4, theorem Z).
    values = np.asarray(list(itertools.product((0.0, 1.0), repeat=count)))
    np.testing.assert_array_equal(jax.vmap(in_order)(values), -np.sort(-values, axis=1))


@pytest.mark.parametrize("count", [24, 25, 48, 49, 100, 384])
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), different=st.sampled_from([1, 3, 1000]))
def test_many_values_come_in_order(count: int, seed: int, different: int) -> None:
    values = np.random.default_rng(seed).integers(0, different, count) / 7.0 - 1.0
    ordered = in_order(values)
    assert ordered.dtype == np.float64
    np.testing.assert_array_equal(ordered, -np.sort(-values))


def test_infinite_values_come_in_order_too() -> None:
    values = np.asarray([-np.inf, 1.0, np.inf, -np.inf, 0.0])
    np.testing.assert_array_equal(in_order(values), [np.inf, 1.0, 0.0, -np.inf, -np.inf])
