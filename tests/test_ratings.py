"""The benchmark's arithmetic."""

from random import Random
from statistics import mean

import pytest
from ratings import best, ratio, spread, unbiased_ratio

FIXED = ("a", "b")


def test_a_ratio_is_to_the_best_median() -> None:
    rates = {"a": [1.0, 9.0, 2.0], "b": [3.0, 4.0, 5.0], "x": [2.0, 2.0, 9.0]}
    assert best(rates, FIXED) == "b"
    assert ratio(rates, "x", FIXED) == 0.5


def test_the_unbiased_ratio_rates_an_arm_where_it_was_not_picked() -> None:
    rates = {"a": [8.0, 1.0], "b": [2.0, 4.0], "x": [2.0, 4.0]}
    # In the first repeat a is picked, and is 1 in the second; there b is picked, and is 2 in the first.
    assert unbiased_ratio(rates, "x", FIXED) == pytest.approx((4.0 / 1.0 + 2.0 / 2.0) / 2)
    assert unbiased_ratio({arm: values[:1] for arm, values in rates.items()}, "x", FIXED) is None


def test_noise_flatters_the_best_of_many_and_not_the_unbiased_ratio() -> None:
    rng = Random(0)
    fixed = [str(number) for number in range(7)]
    runs = [{arm: [rng.gauss(100, 5) for _ in range(4)] for arm in [*fixed, "x"]} for _ in range(400)]
    assert mean(ratio(rates, "x", fixed) for rates in runs) < 0.97
    assert mean(unbiased_ratio(rates, "x", fixed) or 0.0 for rates in runs) == pytest.approx(1.0, abs=0.005)


def test_spread_is_the_median_deviation_by_the_median() -> None:
    assert spread({"a": [10.0, 11.0, 12.0], "b": [10.0, 10.0, 10.0], "c": [80.0, 100.0, 120.0]}) == pytest.approx(
        1 / 11
    )
