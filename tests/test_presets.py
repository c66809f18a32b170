"""The fits that come with akjax: what they are made from, and what they predict."""

import jax
import numpy as np
import pytest
from make_presets import TABLES, Table, from_coefficients, from_table

from akjax.fit_file import FitFile, start_of
from akjax.forms import Engine
from akjax.presets import preset, preset_names


def engine_of(fit: FitFile) -> Engine:
    """The engine that it was made for."""
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fit.engine.items()}
    return Engine(**fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", preset_names())
def test_every_one_says_where_it_is_from_and_starts_its_own_engine(name: str) -> None:
    fit = preset(name)
    assert all(fit.logs)
    start = start_of(fit, engine_of(fit))
    given = {parameter.name for parameter in fit.parameters}
    assert {parameter.name for parameter in start.model.parameters()} - given == set(start.unmatched)
    values = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(start.model)])
    assert np.all(np.isfinite(values) & (values > 0))
    # Errors are there where thousands of steps were fitted, and nowhere else.
    assert (start.covariance is not None) == (fit.rows > 1000)


@pytest.mark.parametrize(("name", "table"), TABLES.items(), ids=TABLES)
def test_a_published_table_gives_the_fit_again_and_is_predicted_by_it(name: str, table: Table) -> None:
    fit, again = preset(name), from_table(table)
    assert [p.name for p in again.parameters] == [p.name for p in fit.parameters]
    np.testing.assert_allclose([p.value for p in again.parameters], [p.value for p in fit.parameters], rtol=1e-4)
    predicted = start_of(fit, engine_of(fit)).model(table.steps)
    error = 100 * np.mean(np.abs(predicted / np.asarray(table.ms) - 1))
    assert error == pytest.approx(fit.error_percent, rel=0.01)
    # One straight line does not do for a dense model that comes to be bound by its arithmetic.
    assert error < (7.0 if name == "llama-8b-eagle" else 1.5)


def test_the_default_is_made_of_the_published_coefficients() -> None:
    fit = preset("default")
    assert fit.parameters == from_coefficients().parameters
    assert fit.rows == 0


def test_a_name_that_is_not_there_is_refused_with_those_that_are() -> None:
    for name in ("best", "", "../forms", "default.json"):
        with pytest.raises(ValueError, match=r"there are default, glm-4\.5-air, .* the path of a file"):
            preset(name)
