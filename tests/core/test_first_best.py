"""The first of the largest."""

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from akjax.policy.first_best import first_best


@given(st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 2.0, np.inf]), min_size=1, max_size=9))
def test_of_equals_it_is_the_first(values: list[float]) -> None:
    with jax.enable_x64(True):
        assert int(first_best(jax.numpy.asarray(values))) == int(np.argmax(values))


def test_among_nan_it_is_the_very_first() -> None:
    assert int(first_best(jax.numpy.asarray([1.0, np.nan, 3.0]))) == 0
