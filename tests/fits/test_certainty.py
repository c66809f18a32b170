"""Standard errors against least squares worked out by hand, and what is said of parameters that nobody can tell."""

import numpy as np
import pytest

from akjax import Parameter
from akjax.fits.certainty import covariance_of, determined, findings

NAMED = (
    Parameter("base", "ms", variance=25.0),
    Parameter("share", "1", variance=0.1, lower=0.0, upper=1.0),
    Parameter("offset", "ms", variance=4.0, spread=None),
)


def test_with_noise_as_assumed_the_sandwich_is_the_inverse_of_the_curvature() -> None:
    # Of a negative log-likelihood the slopes' squares add up to its curvature.
    curvature = np.array([[4.0, 1.0], [1.0, 2.0]])
    covariance = covariance_of(curvature, curvature, np.ones(2), np.zeros(2, bool))
    np.testing.assert_allclose(covariance, np.linalg.inv(curvature), rtol=1e-12)


def test_units_scale_and_what_is_fitted_beside_the_parameters_widens() -> None:
    curvature = np.array([[4.0, 1.0, 0.5], [1.0, 2.0, 0.0], [0.5, 0.0, 3.0]])
    squares = np.diag([1.0, 2.0, 5.0])
    covariance = covariance_of(curvature, squares, np.array([10.0, 0.1]), np.zeros(2, bool))
    inverse = np.linalg.inv(curvature)
    expected = (inverse @ squares @ inverse)[:2, :2] * np.outer([10.0, 0.1], [10.0, 0.1])
    np.testing.assert_allclose(covariance, expected, rtol=1e-12)


def test_a_parameter_on_a_bound_is_left_out() -> None:
    curvature = np.array([[4.0, 1.0], [1.0, 2.0]])
    covariance = covariance_of(curvature, curvature, np.ones(2), np.array([False, True]))
    np.testing.assert_allclose(covariance, [[0.25, 0.0], [0.0, 0.0]], rtol=1e-12)


def test_where_nothing_curves_nothing_is_determined() -> None:
    curvature = np.outer([1.0, 1.0], [1.0, 1.0])
    covariance = covariance_of(curvature, np.eye(2), np.ones(2), np.zeros(2, bool))
    assert np.all(np.diag(covariance) > 1e7)
    assert not np.any(determined(NAMED[:2], np.ones(2), covariance, np.zeros(2, bool)))


def test_determined_means_an_error_below_a_third() -> None:
    values = np.array([9.0, 0.9, 0.0])
    covariance = np.diag([2.9, 0.31, 0.6]) ** 2
    np.testing.assert_array_equal(determined(NAMED, values, covariance, np.zeros(3, bool)), [True, False, True])
    np.testing.assert_array_equal(
        determined(NAMED, values, covariance, np.array([True, False, False])), [False, False, True]
    )


def test_findings_name_what_cannot_be_told() -> None:
    values = np.array([9.0, 0.9, 3.0])
    errors = np.array([1.0, 0.5, 1.0])
    correlation = np.array([[1.0, 0.0, -0.99], [0.0, 1.0, 0.0], [-0.99, 0.0, 1.0]])
    said = findings(NAMED, values, correlation * np.outer(errors, errors), np.zeros(3, bool), np.zeros(3, bool))
    assert said == [
        "share is not determined: 0.9 with a standard error of 0.5",
        "offset is not determined: 3 with a standard error of 1",
        "base and offset are hard to tell apart: their errors are correlated by -0.990, so trust what they predict"
        " together more than either",
    ]


@pytest.mark.parametrize(
    ("at", "said"),
    [(0, "base is 0 as far as these steps say"), (1, "share is at a bound, 1 of 0 to 1: the steps ask for more")],
)
def test_findings_name_what_is_on_a_bound(at: int, said: str) -> None:
    at_bound = np.arange(2) == at
    values = np.where(at_bound, [0.0, 1.0], [9.0, 0.5])
    assert said in findings(NAMED[:2], values, np.diag([1e-6, 1e-6]) * ~at_bound, at_bound, np.zeros(2, bool))[0]


def test_findings_name_what_is_in_none_of_the_steps() -> None:
    unseen = np.array([False, True, True])
    said = findings(NAMED, np.array([9.0, 0.5, 1.0]), np.diag([1e-6, 0.0, 0.0]), np.zeros(3, bool), unseen)
    assert said == ["share, offset: in none of these steps"]
