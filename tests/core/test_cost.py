"""Cost forms: their values against the oracle, their gradients, and what they refuse."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from jax.test_util import check_grads

import oracle
from akjax import (
    AbstractCostModel,
    Constant,
    CostTable,
    DiverseTokens,
    ExpertReads,
    PerToken,
    StepFeatures,
    Sum,
    dense_cost,
    parse_table,
    predicted_ms,
    reference_cost,
    table_from_points,
)

TOKENS = np.asarray([1.0, 2.0, 7.0, 40.0, 512.0])


def steps(tokens: np.ndarray) -> StepFeatures:
    return StepFeatures(tokens=jnp.asarray(tokens), requests=jnp.ones_like(tokens))


@given(
    theta=st.tuples(st.floats(-50, 100), st.floats(-1, 5), st.floats(-1, 5)),
    diversity=st.floats(0.05, 2.0),
    experts_and_top_k=st.integers(1, 512).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, e))),
)
def test_the_reference_form_is_the_oracles(
    theta: tuple[float, float, float], diversity: float, experts_and_top_k: tuple[int, int]
) -> None:
    experts, top_k = experts_and_top_k
    base, per_expert, per_token = theta
    expected = oracle.CostFilter(oracle.Settings(experts=experts, topk=top_k, model=theta))
    expected.x[3] = diversity
    model = Constant(base) + ExpertReads(per_expert, DiverseTokens(diversity, experts, top_k)) + PerToken(per_token)
    np.testing.assert_allclose(model(steps(TOKENS)), expected.raw(TOKENS), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(predicted_ms(model, steps(TOKENS)), expected.predicted(TOKENS), rtol=1e-9, atol=1e-9)


def test_one_independent_token_touches_top_k_experts() -> None:
    union = DiverseTokens(1.0, 288, 8)
    np.testing.assert_allclose(union(steps(np.asarray([1.0]))), [8.0], rtol=1e-12)
    np.testing.assert_allclose(union(steps(np.asarray([1e6]))), [288.0], rtol=1e-12)


def test_tokens_that_pick_all_experts_touch_all_whatever_their_diversity() -> None:
    union = DiverseTokens(1.0, 8, 8)
    np.testing.assert_allclose(union(steps(TOKENS)), 8.0, rtol=1e-12)
    assert float(jax.grad(lambda u: jnp.sum(u(steps(TOKENS))))(union).diversity) == 0.0


@pytest.mark.parametrize(
    "model",
    [reference_cost(27.0, 0.635, 0.542, experts=288, top_k=8), dense_cost(20.0, 0.5), parse_table("2:47,4:53,8:65")],
)
def test_every_form_has_right_gradients_and_names_each_parameter(model: AbstractCostModel) -> None:
    values, unravel = ravel_pytree(model)
    names = [parameter.name for parameter in model.parameters()]
    assert len(names) == len(values) == len(set(names))
    tokens = steps(np.asarray([1.0, 3.0, 7.0, 40.0]))
    check_grads(lambda x: unravel(x)(tokens), (values,), order=1, atol=1e-7, rtol=1e-7)


def test_terms_add_up_flat() -> None:
    model = Constant(1.0) + (PerToken(2.0) + Constant(3.0))
    assert isinstance(model, Sum)
    assert [type(term) for term in model.terms] == [Constant, PerToken, Constant]
    np.testing.assert_allclose(model(steps(np.asarray([5.0]))), [14.0])


@given(
    st.lists(st.tuples(st.integers(1, 30).map(lambda n: 10.0 * n), st.floats(0.5, 500)), min_size=1, max_size=9),
    st.randoms(use_true_random=False),
)
def test_tables_are_the_oracles_in_any_order(points: list[tuple[float, float]], random: object) -> None:
    random.shuffle(points)  # pyright: ignore[reportAttributeAccessIssue]
    spec = ",".join(f"{tokens:g}:{ms!r}" for tokens, ms in points)
    tokens = np.arange(1.0, 400.0)
    np.testing.assert_allclose(
        parse_table(spec)(steps(tokens)), oracle.CostTable(spec).predicted(tokens), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize(
    ("spec", "tokens", "ms"),
    [
        ("4:50", [1.0, 4.0, 9.0], [50.0, 50.0, 50.0]),
        ("2:40,8:60,8:60", [8.0, 100.0], [60.0, 60.0]),
        ("2:40,2:40,8:70", [1.0, 2.0, 4.0, 10.0], [40.0, 40.0, 50.0, 80.0]),
        ("2:10,4:20,4:30", [3.0, 4.0, 5.0, 100.0], [15.0, 30.0, 30.0, 30.0]),
        ("2:10,4:20,4:30,6:50", [3.0, 4.0, 5.0, 8.0], [15.0, 30.0, 40.0, 70.0]),
        ("8:60, 2:40", [5.0], [50.0]),
    ],
)
def test_a_table_of_one_point_or_with_a_point_twice(spec: str, tokens: list[float], ms: list[float]) -> None:
    table = parse_table(spec)
    np.testing.assert_allclose(table(steps(np.asarray(tokens))), ms, rtol=1e-12)
    gradient = jax.grad(lambda model: jnp.sum(model(steps(np.asarray(tokens)))))(table)
    assert np.all(np.isfinite(gradient.ms))


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("", "at least one"),
        ("2:40,", "given ''"),
        ("2:x", "'2:x'"),
        ("2", "given '2'"),
        ("0:5", "0:5"),
        ("2:-1", "2:-1"),
        ("2:inf", "2:inf"),
        ("nan:3", "nan:3"),
    ],
)
def test_a_malformed_table_is_refused(spec: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        parse_table(spec)


def test_a_table_out_of_order_is_refused() -> None:
    with pytest.raises(ValueError, match="ascend"):
        CostTable(np.asarray([1.0, 2.0]), (4.0, 2.0))
    with pytest.raises(ValueError, match="one ms for each"):
        CostTable(np.asarray([1.0, 2.0]), (4.0,))
    assert table_from_points([(4.0, 2.0), (2.0, 1.0)]).tokens == (2.0, 4.0)


@pytest.mark.parametrize(("experts", "top_k"), [(8, 9), (8, 0), (0, 0)])
def test_a_union_that_no_tokens_can_have_is_refused(experts: int, top_k: int) -> None:
    with pytest.raises(ValueError, match=f"top_k={top_k}"):
        DiverseTokens(1.0, experts, top_k)
