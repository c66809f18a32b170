"""The forms by name, and what they ask for."""

import jax
import numpy as np
import pytest

from akjax import AbstractCostModel, Constant, PerToken, StepFeatures
from akjax.forms import FORMS, Engine, check_features, features_used, form_named

ENGINE = Engine(lengths=(0, 2, 4), experts=64, top_k=6, sizes=(8, 16))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("engine", [ENGINE, ENGINE._replace(experts=None, top_k=None, sizes=())])
def test_every_form_makes_a_model_whose_parameters_are_named_and_start_above_zero(name: str, engine: Engine) -> None:
    model = form_named(name)(engine)
    names = [parameter.name for parameter in model.parameters()]
    values = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(model)])
    assert len(set(names)) == len(names) == len(values)
    assert np.all(values > 0)
    assert float(model(StepFeatures(np.float64(12.0), np.float64(4.0), np.float64(2.0)))) > 0


def of_my_own(engine: Engine) -> AbstractCostModel:
    return Constant(engine.base) + PerToken(1.0)


def test_a_form_of_ones_own_is_found_by_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "my_forms", __import__("sys").modules[__name__])
    assert form_named("my_forms:of_my_own")(ENGINE).parameters()[0].name == "base"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("best", "not known: there are serving, reference"),
        ("no_such_module:form", "cannot be imported"),
        ("math:tau_of", "cannot be imported"),
        (":form", "cannot be imported"),
        ("math:tau", "a float and not something that makes a cost model"),
    ],
)
def test_a_form_that_is_not_there_is_refused(name: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        form_named(name)


def test_a_model_says_which_features_it_uses() -> None:
    assert features_used(FORMS["line"](ENGINE)) == ("tokens",)
    assert features_used(FORMS["split"](ENGINE._replace(sizes=()))) == ("tokens", "requests")
    assert features_used(FORMS["work"](ENGINE._replace(sizes=()))) == (
        "tokens",
        "requests",
        "drafting",
        "context",
        "prefill",
    )


def test_steps_without_a_feature_that_a_form_uses_are_refused() -> None:
    with pytest.raises(ValueError, match=r"needs drafting, context, prefill, which .* they have tokens, requests"):
        check_features(FORMS["work"](ENGINE), ("tokens", "requests"))
    check_features(FORMS["reference"](ENGINE), ("tokens",))
