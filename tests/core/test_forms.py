"""The forms by name, and what they ask for."""

import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from akjax import (
    AbstractCostLearner,
    AbstractCostModel,
    Constant,
    InnovationGate,
    PerToken,
    RatioGate,
    StepFeatures,
    prior_belief,
    reference_cost,
    update,
)
from akjax.forms import FORMS, Engine, check_features, features_used, form_named

ENGINE = Engine(lengths=(0, 2, 4), experts=64, top_k=6, sizes=(8, 16))
EVERY_FORM = pytest.mark.parametrize("name", FORMS)
# Of a few batches and draft lengths, none of which changes over from no drafts to some.
STEPS = StepFeatures(
    tokens=np.asarray([1.0, 3.0, 4.0, 12.0, 20.0, 40.0]),
    requests=np.asarray([1.0, 1.0, 4.0, 4.0, 4.0, 8.0]),
    drafting=np.asarray([0.0, 2.0, 0.0, 2.0, 4.0, 4.0]),
    context=np.asarray([500.0, 600.0, 9e3, 1e4, 2e4, 5e4]),
    prefill=np.zeros(6),
    uneven=np.zeros(6),
)


def step_at(number: int) -> StepFeatures:
    return jax.tree.map(lambda leaf: leaf[number % 6], STEPS)


@EVERY_FORM
@pytest.mark.parametrize("engine", [ENGINE, ENGINE._replace(experts=None, top_k=None, sizes=())])
def test_every_form_makes_a_model_whose_parameters_are_named_and_start_above_zero(name: str, engine: Engine) -> None:
    model = form_named(name)(engine)
    names = [parameter.name for parameter in model.parameters()]
    values = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(model)])
    assert len(set(names)) == len(names) == len(values)
    assert all(value > 0 for value, of in zip(values, model.parameters(), strict=True) if of.spread is not None)
    assert float(model(StepFeatures(np.float64(12.0), np.float64(4.0), np.float64(2.0)))) > 0


@EVERY_FORM
@pytest.mark.parametrize("learner", [InnovationGate(), RatioGate()], ids=lambda learner: type(learner).__name__)
def test_every_form_is_learned_online(name: str, learner: AbstractCostLearner) -> None:
    start = form_named(name)(ENGINE)
    # Within the ratio gate, which refuses what is far off.
    true_ms = 1.3 * start(STEPS)
    state = learner.init(start)
    learn = jax.jit(learner.learn)
    for number in range(240):
        state = learn(state, step_at(number), jnp.asarray(true_ms[number % 6]), jnp.asarray(True))
    assert int(state.taught) > 200
    told = learner.forecast(state, STEPS)
    np.testing.assert_allclose(np.exp(told.log_ms), true_ms, rtol=0.03)
    assert np.all(np.isfinite(told.covariance))


@EVERY_FORM
def test_every_form_is_learned_by_the_plain_filter_and_compiled_once(name: str) -> None:
    belief = prior_belief(form_named(name)(ENGINE))
    true_ms = 1.3 * belief.model(STEPS)
    learn = jax.jit(partial(update, relative_noise=0.02))
    for number in range(240):
        belief, _ = learn(belief, step_at(number), jnp.asarray(true_ms[number % 6]))
    np.testing.assert_allclose(belief.model(STEPS), true_ms, rtol=0.03)
    # Once for NumPy's leaves and once for JAX's.
    assert learn._cache_size() <= 2


def test_making_every_form_touches_no_backend() -> None:
    check = (
        "from akjax.forms import FORMS, Engine\nfrom jax._src import xla_bridge\n"
        "models = [form(Engine(experts=64, top_k=6, sizes=(8, 16))).parameters() for form in FORMS.values()]\n"
        "assert not xla_bridge.backends_are_initialized(), 'a JAX backend is up'\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def knots(engine: Engine) -> list[float]:
    names = [parameter.name for parameter in form_named("table")(engine).parameters()]
    return [float(name.removeprefix("ms_at_")) for name in names]


def test_the_tables_points_are_captured_sizes_or_what_lengths_and_requests_come_to() -> None:
    many = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
    assert knots(ENGINE._replace(sizes=many)) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 88, 120, 160, 216, 288, 384, 512]
    assert knots(ENGINE._replace(sizes=(), lengths=(1, 3))) == [2, 4, 8, 16, 32, 64, 128, 256]
    assert knots(ENGINE._replace(sizes=(), lengths=(0, 2, 4)))[:8] == [1, 2, 3, 4, 6, 8, 12, 16]


def test_the_table_starts_at_the_reference_and_is_linear_between_its_points() -> None:
    engine = Engine(20.0, 0.5, 0.4, lengths=(1, 3), experts=64, top_k=6)
    table, reference = form_named("table")(engine), reference_cost(20.0, 0.5, 0.4, experts=64, top_k=6)
    points = reference(StepFeatures(np.asarray([2.0, 4.0, 128.0, 256.0]), np.ones(4)))
    # At points, between two of them, and beyond the last.
    np.testing.assert_allclose(table(StepFeatures(np.asarray([2.0, 4.0]), np.ones(2))), points[:2], rtol=1e-12)
    np.testing.assert_allclose(table(StepFeatures(np.asarray(3.0), np.ones(()))), np.mean(points[:2]), rtol=1e-12)
    np.testing.assert_allclose(
        table(StepFeatures(np.asarray(384.0), np.ones(()))), 2 * points[3] - points[2], rtol=1e-12
    )


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
