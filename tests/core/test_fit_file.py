"""Starting from a fit: on the engine that it came from, and on another."""

import dataclasses
import sys
from types import SimpleNamespace

import jax
import msgspec
import numpy as np
import pytest

from akjax import AbstractCostModel, InnovationGate, RatioGate
from akjax.fit_file import MOST_BYTES, FitFile, FittedParameter, decoded_fit, start_of
from akjax.forms import FORMS, Engine

ENGINE = Engine(lengths=(0, 2, 4), experts=64, top_k=6, sizes=(8, 16))


def fit_of(form: str = "reference") -> FitFile:
    model = FORMS[form](ENGINE)
    values = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(model)]) * 1.5
    errors = 0.01 * values
    return FitFile(
        form=form,
        engine={},
        parameters=[
            FittedParameter(name=p.name, unit=p.unit, value=float(v), standard_error=float(e), determined=True)
            for p, v, e in zip(model.parameters(), values, errors, strict=True)
        ],
        covariance=np.diag(errors**2).tolist(),
        noise=0.05,
        error_percent=3.0,
        rows=100,
    )


def values_of(model: object) -> list[float]:
    return [float(value) for leaf in jax.tree.leaves(model) for value in np.ravel(leaf)]


def test_the_same_engine_starts_with_the_fits_values_and_covariance() -> None:
    fit = fit_of()
    start = start_of(decoded_fit(msgspec.json.encode(fit), "fit.json"), ENGINE)
    np.testing.assert_array_equal(values_of(start.model), [p.value for p in fit.parameters])
    np.testing.assert_allclose(start.covariance, fit.covariance, rtol=1e-12)
    assert start.unmatched == ()


def test_an_engine_with_other_draft_lengths_takes_what_it_shares() -> None:
    other = ENGINE._replace(lengths=(0, 4, 8))
    start = start_of(fit_of("serving"), other)
    assert start.unmatched == ("factor_at_2", "factor_at_8")
    names = [parameter.name for parameter in start.model.parameters()]
    values = dict(zip(names, values_of(start.model), strict=True))
    assert values["factor_at_4"] == pytest.approx(1.5)
    assert values["factor_at_8"] == 1.0
    assert start.covariance is not None
    at = names.index("factor_at_8")
    assert start.covariance[at, at] == pytest.approx(0.05**2)


def test_a_file_does_not_say_which_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Engine] = []

    def of_my_own(engine: Engine) -> AbstractCostModel:
        ran.append(engine)
        return FORMS["reference"](engine)

    monkeypatch.setitem(sys.modules, "my_forms", SimpleNamespace(of_my_own=of_my_own))
    fit = dataclasses.replace(fit_of(), form="my_forms:of_my_own")
    for runs in ("", "my_forms:other"):
        with pytest.raises(ValueError, match=r"'my_forms:of_my_own' is none of akjax's \(serving, .* name it"):
            start_of(fit, ENGINE, runs=runs)
    assert not ran
    assert start_of(fit, ENGINE, runs="my_forms:of_my_own").unmatched == ()
    assert ran == [ENGINE]


def test_what_the_fit_found_to_be_nothing_starts_just_above_it_and_unsure() -> None:
    fit = fit_of()
    gone = [
        dataclasses.replace(p, value=0.0, standard_error=None) if p.name == "per_expert" else p for p in fit.parameters
    ]
    start = start_of(dataclasses.replace(fit, parameters=gone), ENGINE)
    at = [p.name for p in fit.parameters].index("per_expert")
    assert values_of(start.model)[at] == pytest.approx(0.635e-3)
    assert start.covariance is not None
    assert start.covariance[at, at] == start.model.parameters()[at].variance
    # Both learners take it.
    InnovationGate().init(start.model, start.covariance)
    RatioGate().init(start.model, start.covariance)


def test_figures_without_errors_start_as_sure_as_their_form() -> None:
    fit = fit_of()
    published = [dataclasses.replace(p, standard_error=None) for p in fit.parameters]
    start = start_of(dataclasses.replace(fit, parameters=published), ENGINE)
    np.testing.assert_array_equal(values_of(start.model), [p.value for p in fit.parameters])
    assert start.covariance is None


def test_a_learner_is_as_sure_as_the_fit_but_of_the_speed() -> None:
    start = start_of(fit_of(), ENGINE)
    state = InnovationGate().init(start.model, start.covariance)
    own, shared = 0.01**2, 0.1**2
    base, per_expert, diversity, per_token = np.diag(np.asarray(state.belief.covariance))
    # Next to the prior's variance the fit's is so small that both together are the fit's, but for a ten-thousandth.
    np.testing.assert_allclose([base, per_expert, per_token], own + shared, rtol=1e-3)
    np.testing.assert_allclose(diversity, own, rtol=2e-3)


def test_a_learner_is_never_less_sure_than_its_prior() -> None:
    wide = fit_of()
    wide = dataclasses.replace(wide, covariance=(1e6 * np.asarray(wide.covariance)).tolist())
    start = start_of(wide, ENGINE)
    prior = np.asarray(InnovationGate().init(start.model).belief.covariance)
    fitted = np.asarray(InnovationGate().init(start.model, start.covariance).belief.covariance)
    speed = 0.1**2
    assert np.all(np.diag(fitted) <= np.diag(prior) + speed)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"version": 2}, "version 2"),
        ({"covariance": [[1.0]]}, "4 by 4"),
        ({"covariance": np.diag([1.0, 1.0, 1.0, -1.0]).tolist()}, "negative"),
        ({"covariance": (np.diag([1e-310] * 4) + 1e308 * (1 - np.eye(4))).tolist()}, "negative"),
        ({"covariance": [[np.nan] * 4] * 4}, "finite"),
        ({"form": "best"}, "serving, reference"),
    ],
)
def test_a_fit_that_cannot_be_is_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        start_of(dataclasses.replace(fit_of(), **changes), ENGINE)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "no fit of a cost model"),
        (b"\x00\xff", "no fit of a cost model"),
        (b"[" * 100_000, "no fit of a cost model"),
        (b'{"form": 3}', "no fit of a cost model"),
        (b'{"kind": "header"}', "no fit of a cost model"),
        (b" " * (MOST_BYTES + 1), "longer than"),
    ],
)
def test_a_file_that_holds_no_fit_is_refused(content: bytes, complaint: str) -> None:
    with pytest.raises(ValueError, match=rf"fit\.json.*{complaint}"):
        decoded_fit(content, "fit.json")
